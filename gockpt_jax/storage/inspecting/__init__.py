"""What a checkpoint on disk holds, seen without devices: for the command line, and for restores.

In the order of their imports:

    stored_item    an item as it lies there: leaves, layout, reads of boxes
    directory      a directory of checkpoints: steps, items, leftovers
    describe       what an item is, without its values
    diff           how two items differ, chunk by chunk
    verify_chunks  the chunks of a leaf against their checksums
    verify         a whole checkpoint against them
"""
