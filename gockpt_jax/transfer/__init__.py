"""From device to host: staging copies, pulls, byte budgets.

In the order of their imports:

    mounts       which file system holds a directory
    host_memory  how much memory the host has left, and may pin
    boxes        which part of an array something is
    budget       how many bytes may be in flight
    chunks       which elements of which array travel
    layout       the flat buffers in which they do
    packing      the program that fills these
    staging      copies of what cannot be packed
    meter        how fast bytes leave the devices
    pull         buffers on their way to the host
    block        the chunks that leave together
    replicas     who takes and writes what several devices hold
    turns        which boxes of what leaves early are looked at
    sample       small boxes of live arrays, for the audit
    probe        when what a device was given has run
"""
