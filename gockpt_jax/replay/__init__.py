"""Updates repeated on the host.

In the order of their imports:

    memory       chunks that were pulled, as memory to work in
    programs     a recipe, some updates in a row, on a piece of a fixed size
    shards       what replay is given
    engine       updates applied to shards, in place
    contraction  whether the CPU backend contracts multiply-adds
    ulps         how far elements are from each other
"""
