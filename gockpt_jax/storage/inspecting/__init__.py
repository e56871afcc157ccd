"""What a checkpoint on disk holds, seen without devices: for the command line, and for restores.

In the order of their imports:

    stored_item    an item as it lies there: leaves, layout, reads of boxes
    directory      a directory of checkpoints: steps, items, leftovers
    describe       what an item is, without its values
    diff           how two items differ, chunk by chunk
    verdict        what verifying has found
    verify_chunks  the chunks of a leaf against their checksums
    verify_files   the files of an item against the list of them
    verify_step    what lies beside the trees of a step; whether it is being deleted
    verify         a whole checkpoint against them
"""
