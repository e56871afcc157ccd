"""How a training state lies on the devices that a step is compiled for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

Shardings: TypeAlias = list[jax.sharding.Sharding]
_AXIS = "data"


def _single(devices: Sequence[Any], params: Sequence[Any], others: Sequence[Any]) -> Shardings:
    return [SingleDeviceSharding(devices[0])] * (len(params) + len(others) + 1)


def _fsdp(devices: Sequence[Any], params: Sequence[Any], others: Sequence[Any]) -> Shardings:
    mesh = _mesh(devices)
    return [*(_split(x, mesh) for x in (*params, *others)), _batch(mesh)]


def _zero1(devices: Sequence[Any], params: Sequence[Any], others: Sequence[Any]) -> Shardings:
    mesh = _mesh(devices)
    replicated = NamedSharding(mesh, PartitionSpec())
    return [*(replicated for _ in params), *(_split(x, mesh) for x in others), _batch(mesh)]


def _mesh(devices: Sequence[Any]) -> Mesh:
    return Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))


def _batch(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(_AXIS))


def _split(leaf: Any, mesh: Mesh) -> NamedSharding:
    """Of its largest axis that the devices divide, a part on each; small ones are not spared."""
    divisible = [axis for axis, size in enumerate(leaf.shape) if size % mesh.size == 0]
    spec: list[Any] = [None] * len(leaf.shape)
    if divisible:
        spec[max(divisible, key=lambda axis: leaf.shape[axis])] = _AXIS
    return NamedSharding(mesh, PartitionSpec(*spec))


LAYOUTS: Mapping[str, Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], Shardings]] = {
    "single": _single,
    "fsdp": _fsdp,
    "zero1": _zero1,
}
"""Makes of devices, of the parameters and of the state's other leaves where they and the batch lie:

on one of the devices; all split over them, and the batch too; or the parameters replicated, the
rest of the state split (ZeRO's first stage).
"""
