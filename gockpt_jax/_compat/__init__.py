"""The one place where JAX, Orbax and Python are asked for what their public interfaces do not tell.

    of_jax     traced steps, arrays and programs; the coordination service
    of_orbax   barriers and operations, the parts of a `CheckpointManager`, buckets
    of_python  ends of threads, and locks

Each entry says why it is needed and on which versions it was read. Where an attribute is missing,
the caller takes the path that needs less; but without those of a `CheckpointManager` ours fails.
"""
