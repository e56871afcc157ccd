"""Storage: host arrays and their way into an ordinary Orbax checkpoint, and back.

A file imports from its own folder and from those above it; in its own, from the files that the
folder's table has above it:

    files       chunks in files and databases: boxes, places, checksums, reads and writes of bytes
    inspecting  what a checkpoint on disk holds, without devices: described, compared, verified
    writing     trees of host arrays, written as stock Orbax would, chunk by chunk as they come
    restoring   checkpoints into arrays on devices
    saving      one save under Orbax, from the state at hand to its commit; the handlers
    managing    what the manager adds: saves in turn, the arguments it takes, where it resumes
"""
