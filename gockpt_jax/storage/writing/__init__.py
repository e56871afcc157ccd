"""Trees of host arrays, written where and how stock Orbax would write the `jax.Array`s.

In the order of their imports:

    host_array       arrays whose bytes are on the host, or will be
    registry         Orbax's registries of leaf types, with one that is ours
    leaf_names       the names under which leaves are stored
    write_budget     the byte limit of a save, and what it reports of its writing
    array_layout     where stock would put an array: pieces, chunks
    database_index   the index of a database whose values are still to come
    spec             the TensorStore specs of a stock save
    leaf_writer      the shards of one leaf, chunk by chunk
    arrivals         shards are written as their bytes come
    database_writer  this process's part of a database
    tree_writer      the leaves of one save, and what says what they are
    array_handler    the handler of host arrays, as a leaf type of Orbax's
    tree_handler     stock's PyTree handler, with that among its leaf types
"""
