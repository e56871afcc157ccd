"""What the manager adds to the handler: which save's turn it is, its arguments, what it restores.

In the order of their imports:

    naming     items by their names, and whose handler takes them
    resume     where a manager resumes from, or an error that says what is there
    turn       at which call a save that waits begins, the same on all processes
    waiting    a save that waits on the host for the one before it
    places     where its checkpoints are, and the names of steps
    arguments  what a manager is given, as stock's takes it
    calls      who is in the middle of one: other threads wait, signal handlers cannot
    deleting   old checkpoints go out of sight before their files go
    last_save  the save that is with Orbax: how it begins, and how it ended
    in_turn    which save is begun now, which waits for it, which is left out
    restores   which step is restored, which of its items, and under whose names
"""
