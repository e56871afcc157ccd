"""Restores checkpoints in a process that has Orbax and no gockpt_jax; run as a script.

    python stock_reader.py DIRECTORY STEP PROGRAM OUT WHAT...

WHAT is `manager` or `item` (no target: as it was saved, by the manager, or by a
`StandardCheckpointer` on the item's directory), or `mesh` or `single` (into the program's own plain
state, on a mesh that the checkpoint does not know, or on one device). OUT/WHAT.npz gets the
leaves by path.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding


class Blocker:
    """As if gockpt_jax had been uninstalled."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "gockpt_jax":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def target_of(program, what):
    """The program's abstract state, on another mesh or on one device."""
    from programs import PROGRAMS

    mesh = None if what == "single" else jax.make_mesh((2, 4), ("rows", "columns"))

    def sharding(x):
        if mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        axes = [None] * x.ndim
        for axis, size in (("columns", 4), ("rows", 2)):
            for i, dim in enumerate(x.shape):
                if axes[i] is None and dim % size == 0 and axis not in axes:
                    axes[i] = axis
        return NamedSharding(mesh, PartitionSpec(*axes))

    state = PROGRAMS[program].build(1).state
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), state
    )


def main():
    """Restores and writes what came."""
    sys.meta_path.insert(0, Blocker())
    try:
        import gockpt_jax  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError("gockpt_jax can be imported; this test proves nothing")

    from faults import states

    directory, step, program, out, *ways = sys.argv[1:]
    for what in ways:
        restored = states.bits_of(restore(Path(directory).absolute(), step, program, what))
        bits = {path: np.frombuffer(x.tobytes(), np.uint8) for path, x in restored.items()}
        np.savez(Path(out) / f"{what}.npz", **bits)
    assert "gockpt_jax" not in sys.modules


def restore(directory, step, program, what):
    """Restores in one of the ways."""
    if what == "item":
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(directory / step / "state")
    with ocp.CheckpointManager(directory) as manager:
        if what == "manager":
            return manager.restore(int(step))["state"]
        target = target_of(program, what)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        restored = manager.restore(int(step), args=args)["state"]
    assert jax.tree.structure(restored) == jax.tree.structure(target)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(target), strict=True):
        assert got.sharding == want.sharding
    return restored


if __name__ == "__main__":
    main()
