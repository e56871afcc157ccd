"""Chunks of arrays in files, databases and buckets: where they lie, their bytes, their checksums.

In the order of their imports:

    _compat         what Orbax does not tell
    grid            boxes of an array, and the cells of its chunk grid
    aligned         memory and modes of files for reads and writes past the page cache
    pieces          what of an array is read or written at once
    syncs           files made durable beside the writes of others
    data_file       a file that several threads write
    database        where the values of an OCDBT database lie
    plain_array     arrays stored as their values and nothing else
    plain_reads     these, read past the page cache
    bucket          buckets: drivers, and how long they try
    literal         paths in whose own name nothing is a pattern, nor a slash
    item_files      the files of an item, and their digests
    storage_errors  what a storage refused, by name
    beside          what else is in an item's step, and its digests
    checksum_files  the files that keep the checksums
    checksums       a checksum of every chunk, before it is written
    direct          values written past the page cache
"""
