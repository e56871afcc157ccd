"""One save under Orbax: the state is taken from the devices, handed over, written, committed.

In the order of their imports:

    policies        what a save policy says about saves to come
    commit          a save of several processes: all of it, or an error
    refused         what no checkpoint can hold
    taken           an item that is on its way from the devices
    hand_over       handing it to stock, away from the trainer's thread
    written         what Orbax waits for before it commits
    begun_item      one item of a save that has begun
    left            what saves that were given up have left behind
    begun           what has begun of saves, and is given up if its save fails
    state_handler   how a state is saved and restored, whoever asks for it
    handler         the handler for stock's managers, which tells what ours would
    checkpointable  the same for Orbax's v1
"""
