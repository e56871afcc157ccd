"""Samples: small boxes of live arrays, copied into fresh device buffers and pulled.

They are taken where the state is sealed, for the audit. Like staging, a sample is a copy made by a
program that donates nothing, so a later step may do with the arrays what it likes.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from gockpt_jax import _compat
from gockpt_jax.compiling import Programs, unwatched
from gockpt_jax.transfer.chunks import is_key_type
from gockpt_jax.transfer.pull import Pull
from gockpt_jax.transfer.replicas import Piece, Replicas

MIN_BOX_BYTES = 4096
"""Below this a sample costs what its dispatch costs."""

FEW_BOXES = 16
"""How many boxes a sample has at most, unless its fraction demands more. Each is a program, and a
device has room for 32 in flight: more would hold the trainer's thread until the steps before them
have run. Shards that are more than this take turns, with larger boxes."""


def share_out(shards: int, fraction: float) -> tuple[int, float]:
    """How many of the shards give a box to one sample, and which part of its shard a box is.

    Example:
      >>> share_out(10, 1 / 64), share_out(640, 1 / 64), share_out(640, 0.5)
      ((10, 0.015625), (16, 0.625), (320, 1.0))
    """
    boxes = min(shards, max(FEW_BOXES, math.ceil(shards * fraction)))
    return boxes, min(1.0, fraction * shards / max(1, boxes))


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """A piece of an array, cut into boxes of one size; each is a run of consecutive elements.

    Attributes:
      shape: Of the piece.
      sizes: Of a box.
      axis: The dimension that is cut: sizes are 1 before it and whole after it.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    axis: int

    @property
    def count(self) -> int:
        """How many boxes there are; the last of a row overlaps the one before it."""
        return math.prod(self.shape[: self.axis]) * self._per_row

    @property
    def _per_row(self) -> int:
        return -(-self.shape[self.axis] // self.sizes[self.axis]) if self.shape else 1

    def start(self, box: int) -> tuple[int, ...]:
        """Where a box starts, in each dimension."""
        if not self.shape:
            return ()
        row, at = divmod(box, self._per_row)
        first = min(at * self.sizes[self.axis], self.shape[self.axis] - self.sizes[self.axis])
        lead = np.unravel_index(row, self.shape[: self.axis]) if self.axis else ()
        rest = (0,) * (len(self.shape) - self.axis - 1)
        return (*map(int, lead), first, *rest)

    def run(self, box: int) -> slice:
        """Where a box is among the piece's elements, row by row."""
        start = int(np.ravel_multi_index(self.start(box), self.shape)) if self.shape else 0
        return slice(start, start + math.prod(self.sizes))


def grid_of(shape: tuple[int, ...], itemsize: int, fraction: float) -> Grid:
    """Cuts a shard into boxes of about a fraction of it, at least `MIN_BOX_BYTES`.

    Example:
      >>> grid_of((3, 64, 512), 4, 1 / 64)
      Grid(shape=(3, 64, 512), sizes=(1, 3, 512), axis=1)
    """
    wanted = max(MIN_BOX_BYTES, math.prod(shape) * itemsize * fraction)
    for axis, length in enumerate(shape):
        row_bytes = math.prod(shape[axis + 1 :]) * itemsize
        if row_bytes <= wanted:
            number = min(length, math.ceil(wanted / row_bytes))
            return Grid(shape, (1,) * axis + (number,) + shape[axis + 1 :], axis)
    return Grid(shape, shape, 0)  # a scalar


def can_be_sampled(array: jax.Array) -> bool:
    """Whether an array has elements of whole bytes: no typed keys, no packed numbers."""
    return not (_compat.is_packed(array.dtype) or is_key_type(array.dtype))


Probe = tuple[Piece, Grid, int]
"""What is written as one, alive; how it is cut; which box is taken."""


def sample_bytes(probes: Sequence[Probe]) -> int:
    """Bytes of the boxes, on the device that holds the most of them."""
    by_device: dict[Any, int] = defaultdict(int)
    for piece, grid, _ in probes:
        by_device[_device(piece.shard)] += math.prod(grid.sizes) * piece.shard.dtype.itemsize
    return max(by_device.values(), default=0)


def start_sample(probes: Sequence[Probe]) -> Pull[list[np.ndarray]]:
    """Copies boxes on their devices and starts moving them to the host; returns at once.

    Returns:
      The transfer: of the elements of each, flat, in the order asked for.
    """
    starts = [np.add(p.start, grid.start(box)).astype(np.int32) for p, grid, box in probes]
    with unwatched():
        # Where a box starts goes to the device with the call: a `device_put` of all took longer.
        boxes = [
            _programs.needed(*_program(p.shard, grid))(p.shard, start)
            for (p, grid, _), start in zip(probes, starts, strict=True)
        ]
        return Pull.start(boxes, list)


def compile_samples_ahead(arrays: Sequence[jax.Array], fraction: float, replicas: Replicas) -> None:
    """Compiles what `start_sample` will need for these arrays, on a thread of its own.

    Args:
      arrays: Arrays like those that will be sampled together; only looked at before this returns.
        If another step has donated them, their programs are compiled when they are needed.
      fraction: Of all their bytes.
      replicas: How they share the arrays.
    """
    if any(a.is_deleted() for a in arrays):
        return
    pieces = [p for a in arrays if can_be_sampled(a) for p in replicas.pieces(a)]
    _, part = share_out(len(pieces), fraction)
    for piece in pieces:
        grid = grid_of(piece.shape, piece.shard.dtype.itemsize, part)
        _programs.wanted(*_program(piece.shard, grid))


# Leaves of one shape share a program. One for many boxes would take seconds to compile: 26 ms per
# box on the CPU backend.
_programs = Programs("gockpt-compile-samples")


def _program(shard: jax.Array, grid: Grid) -> tuple[Any, Any]:
    """The program that copies a box of an array like this one: its key, and how it is made."""
    spec = _spec(shard)
    key = (spec.shape, spec.dtype, spec.format, grid.sizes)
    return key, functools.partial(_compile, spec, grid)


def _compile(shard: jax.ShapeDtypeStruct, grid: Grid) -> Any:
    def cut(x: jax.Array, start: jax.Array) -> jax.Array:
        box = lax.dynamic_slice(x, [start[n] for n in range(x.ndim)], grid.sizes)
        return lax.reshape(box, (math.prod(grid.sizes),))

    start = jax.ShapeDtypeStruct((len(grid.shape),), np.int32, sharding=_beside(shard))
    with _compat.wide_numbers([shard.dtype]):
        return jax.jit(cut).lower(shard, start).compile()


def _spec(array: Any) -> jax.ShapeDtypeStruct:
    """Of its shape, on its device, and there as the user has it lie (`Format`)."""
    placed = Format(array.format.layout, _beside(array))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed)


def _device(shard: jax.Array) -> jax.Device:
    (device,) = shard.devices()
    return device


def _beside(shard: Any) -> SingleDeviceSharding:
    """Its device alone. A shard on a mesh of one device is the array itself, sharding and all."""
    (device,) = shard.sharding.device_set
    return SingleDeviceSharding(device)
