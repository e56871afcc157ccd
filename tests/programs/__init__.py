"""Training programs as users write them, on one device and on a mesh of eight.

Every program is a user's own jitted step, with the state and the loop around it. Marks:

    no_donation    the step keeps the buffers of its input state
    typed_key      a leaf of the state is a typed PRNG key (`jax.random.key`)
    skips          some batches have no finite loss, and the step leaves the parameters as they are
    frozen         some leaves of the state are returned unchanged
    static         the step takes a static argument besides the state
    resharded      on the mesh, the first state is laid out differently from all later ones
    replicated     on the mesh, every leaf is replicated after the first step
    one_axis       on the mesh, leaves are split over one axis alone
    python_scalar  a leaf of the first state is a Python number
"""

from . import calls, features, language, leaves, marked, optimizers
from .common import Job, Program

PROGRAMS: dict[str, Program] = {}
for _family in (optimizers, features, leaves, language, calls, marked):
    if _twice := PROGRAMS.keys() & _family.PROGRAMS.keys():
        raise ValueError(f"programs of two families share names: {sorted(_twice)}")
    PROGRAMS.update(_family.PROGRAMS)

__all__ = ["PROGRAMS", "Job", "Program", "calls"]
