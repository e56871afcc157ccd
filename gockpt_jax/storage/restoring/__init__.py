"""Checkpoints into arrays on devices, as stock restores them.

In the order of their imports:

    arguments     what a restore is asked for
    array_reader  arrays read without TensorStore, inside Orbax's restore
    one_replica   one replica reads, and sends to the others
    placed        where arrays shall lie of which the target does not say it
    stored        what is known of stored arrays without reading them
    target        whether checkpoint and target fit together
    stock         stock's handlers, asked for what is stored
    restore       the restore itself
    together      on several processes: verified by all before it, and its end
"""
