"""Fully sharded data parallelism in three small rules.

The batch is split over the devices, and so is every large leaf of the parameters and of the
optimizer's state. The mesh axis is `Auto`: the compiler gathers weights where they are needed and
scatters gradients back; the model's code does not change.
"""

from typing import TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXIS = "data"
MIN_SHARDED_ELEMENTS = 4096  # Below this, gathering a leaf costs more than keeping it everywhere.

Tree = TypeVar("Tree")


def local_mesh() -> Mesh:
    """Return a one-dimensional mesh of this process's devices."""
    devices = jax.local_devices()
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def shard_batch(x: jax.Array) -> jax.Array:
    """Split the first axis of `x` over the ambient mesh (`jax.set_mesh`)."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(AXIS))


def fsdp_spec(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """Split the largest axis that the devices divide; leave small leaves replicated."""
    elements = 1
    for size in shape:
        elements *= size
    divisible = [axis for axis, size in enumerate(shape) if size % devices == 0]
    if elements < MIN_SHARDED_ELEMENTS or not divisible:
        return PartitionSpec()
    largest = max(divisible, key=lambda axis: shape[axis])
    return PartitionSpec(*(AXIS if axis == largest else None for axis in range(len(shape))))


def with_fsdp(tree: Tree, mesh: Mesh) -> Tree:
    """Give each `jax.ShapeDtypeStruct` of `tree` its sharding.

    The result says all there is to know about a state before any memory is spent on it: it is
    the target of a restore, and its shardings are those of a fresh state.
    """

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, fsdp_spec(leaf.shape, mesh.size))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree)
