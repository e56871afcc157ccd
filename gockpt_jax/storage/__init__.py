"""Storage: host arrays and their way into an ordinary Orbax checkpoint.

A file imports from its own group, or from those above it:

    files: grid, aligned, pieces, syncs, bucket, database, plain_array, plain_reads, item_files,
      checksum_files, checksums, data_file, direct
    trees on disk: stored_item, directory, describe, diff, verify_chunks, verify
    writing: host_array, registry, leaf_names, array_layout, database_index, spec, write_budget,
      leaf_writer, database_writer, writer, tree_handler
    restoring: array_reader, one_replica, target, restore, resume
    a save: refused, taken, hand_over, commit, written, policies, handler, checkpointable
    saves in turn: turn, waiting, in_turn, arguments
"""
