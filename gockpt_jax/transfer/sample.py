"""Samples: small boxes of live arrays, copied into fresh device buffers and pulled.

They are taken where the state is sealed, for the audit. Like staging, a sample is a copy made by a
program that donates nothing, so a later step may do with the arrays what it likes.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from gockpt_jax import _compat
from gockpt_jax.compiling import Programs, unwatched
from gockpt_jax.transfer.budget import batches
from gockpt_jax.transfer.chunks import is_key_type
from gockpt_jax.transfer.packing import as_bits, joined, to_be_cut
from gockpt_jax.transfer.pull import Pull
from gockpt_jax.transfer.replicas import Piece, Replicas
from gockpt_jax.transfer.turns import FEW_BOXES, Turn, Turns

MIN_BOX_BYTES = 4096
"""Below this a sample costs what its dispatch costs."""

_MOST_BYTES = 2**30  # of what one program copies, so that its array has not too many elements


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


LiveBox = tuple[Piece, Grid, int]
"""A box that is taken: of what is written as one, alive; how that is cut; the box's number."""


def kind_of(piece: Piece) -> tuple[int, Any]:
    """On which device a piece is, and what the program that copies a box of it is made from."""
    spec = _spec(piece.shard)
    return _device(piece.shard).id, (spec.shape, spec.dtype, spec.format, piece.shape)


def grid_at(piece: Piece, turn: Turn) -> Grid:
    """How a piece is cut at its turn."""
    return grid_of(piece.shape, piece.shard.dtype.itemsize, turn.part)


def sample_bytes(boxes: Sequence[LiveBox]) -> int:
    """Bytes of the boxes, on the device that holds the most of them."""
    return max((sum(_box_bytes(boxes[n]) for n in on) for on in _by_device(boxes)), default=0)


def _box_bytes(box: LiveBox) -> int:
    piece, grid, _ = box
    return math.prod(grid.sizes) * int(piece.shard.dtype.itemsize)


def in_batches(boxes: Sequence[LiveBox], limit_bytes: int | None) -> list[list[LiveBox]]:
    """All at once, unless the device budget is smaller than that: then device by device."""
    if limit_bytes is None or sample_bytes(boxes) <= limit_bytes:
        return [[*boxes]] if boxes else []
    return [
        batch
        for on in _by_device(boxes)
        for batch in batches([boxes[n] for n in on], _box_bytes, limit_bytes)
    ]


def start_sample(boxes: Sequence[LiveBox]) -> Pull[list[np.ndarray]]:
    """Copies boxes on their devices and starts moving them to the host; returns at once.

    One program copies those of a device, and they travel as one array of each dtype: a GPU's driver
    holds the trainer's thread where too much waits for the step before (docs/decisions/0034).

    Returns:
      The transfer: of the elements of each, flat, in the order asked for.
    """
    together = _together(boxes)
    sizes = [(p.shard.dtype, math.prod(grid.sizes)) for p, grid, _ in boxes]
    with unwatched():
        sent = [x for numbers in together for x in _copied([boxes[n] for n in numbers])]
        return Pull(sent, functools.partial(_taken_apart, together, sizes))


def compile_samples_ahead(
    arrays: Sequence[jax.Array], fraction: float, replicas: Replicas, limit_bytes: int | None
) -> bool:
    """Compiles what `start_sample` will need for these arrays, on a thread of its own.

    Args:
      arrays: Arrays like those that will be sampled together; only looked at before this returns.
      fraction: Of all their bytes.
      replicas: How they share the arrays.
      limit_bytes: The device budget.

    Returns:
      Whether it does; not if a step has donated them, maybe this moment on another thread.
    """
    try:
        found = [replicas.pieces(a) for a in arrays if can_be_sampled(a)]
    except RuntimeError:
        if any(a.is_deleted() for a in arrays):
            return False
        raise
    leaves = [pieces for pieces in found if pieces]
    turns = Turns([[kind_of(piece) for piece in pieces] for pieces in leaves], fraction)
    for cast in turns.casts():
        looked_at = [(leaves[turn.leaf][turn.piece], turn) for turn in cast]
        boxes = [(piece, grid_at(piece, turn), 0) for piece, turn in looked_at]
        for batch in in_batches(boxes, limit_bytes):
            for numbers in _together(batch):
                _programs.wanted(_box_specs([batch[n] for n in numbers]))
    return True


def _by_device(boxes: Sequence[LiveBox]) -> list[list[int]]:
    """Positions of those on each device."""
    return [*_alike(_device(piece.shard) for piece, _, _ in boxes).values()]


def _together(boxes: Sequence[LiveBox]) -> list[list[int]]:
    """Positions of those that one program copies: of one device, and few."""
    return [
        few
        for on in _by_device(boxes)
        for few in batches(on, lambda n: _box_bytes(boxes[n]), _MOST_BYTES, FEW_BOXES)
    ]


def _copied(boxes: Sequence[LiveBox]) -> list[jax.Array]:
    """Boxes of one device, one after another in an array for each dtype."""
    shards = [piece.shard for piece, _, _ in boxes]
    starts = np.zeros((len(boxes), max(x.ndim for x in shards)), np.int32)
    for row, (piece, grid, box) in zip(starts, boxes, strict=True):
        row[: len(piece.start)] = np.add(piece.start, grid.start(box))
    # Where boxes start goes to the device with the call: by a `device_put` it would take longer.
    return list(_programs.needed(_box_specs(boxes))(starts, *shards))


def _taken_apart(
    together: Sequence[Sequence[int]], sizes: Sequence[tuple[Any, int]], found: list[np.ndarray]
) -> list[np.ndarray]:
    """What has arrived, box by box."""
    boxes, arrived = {}, iter(found)
    for numbers in together:
        for of_dtype in _alike([sizes[n][0] for n in numbers]).values():
            flat, start = next(arrived), 0
            for n in of_dtype:
                stop = start + sizes[numbers[n]][1]
                boxes[numbers[n]], start = flat[start:stop], stop
    return [boxes[n] for n in range(len(sizes))]


def _alike(kinds: Iterable[Any]) -> dict[Any, list[int]]:
    """Positions of each kind: of each dtype, the boxes in one array that a program returns."""
    found: dict[Any, list[int]] = defaultdict(list)
    for n, kind in enumerate(kinds):
        found[kind].append(n)
    return found


_BoxSpec = tuple[jax.ShapeDtypeStruct, tuple[int, ...]]  # a shard, and the sizes of a box of it


def _box_specs(boxes: Sequence[LiveBox]) -> tuple[_BoxSpec, ...]:
    """What the program is made from that copies such boxes of such arrays."""
    return tuple((_spec(piece.shard), grid.sizes) for piece, grid, _ in boxes)


def _compile(wanted: Sequence[_BoxSpec]) -> Any:
    specs = [spec for spec, _ in wanted]
    platform = _device(specs[0]).platform

    def cut(starts: jax.Array, *shards: jax.Array) -> list[jax.Array]:
        boxes = []
        for n, (x, (_, sizes)) in enumerate(zip(shards, wanted, strict=True)):
            start = [starts[n, axis] for axis in range(x.ndim)]
            box = lax.dynamic_slice(to_be_cut(x, platform), start, sizes)
            boxes.append(as_bits(box.reshape(-1), platform))
        together = _alike([spec.dtype for spec in specs])
        return [joined([boxes[n] for n in of], dtype, platform) for dtype, of in together.items()]

    shape = (len(specs), max(len(spec.shape) for spec in specs))
    starts = jax.ShapeDtypeStruct(shape, np.int32, sharding=_alone(specs[0]))
    with _compat.wide_numbers(spec.dtype for spec in specs):
        return jax.jit(cut).lower(starts, *specs).compile()


# One for hundreds of boxes would take seconds to compile: some 10 ms for each on the CPU backend.
_programs = Programs("gockpt-compile-samples", _compile)


def _spec(array: Any) -> jax.ShapeDtypeStruct:
    """Of its shape, on its device, and there as the user has it lie (`Format`)."""
    placed = Format(array.format.layout, _alone(array))
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=placed)


def _device(shard: Any) -> jax.Device:
    device: jax.Device
    (device,) = shard.sharding.device_set
    return device


def _alone(shard: Any) -> SingleDeviceSharding:
    """Its device alone. A shard on a mesh of one device is the array itself, sharding and all."""
    return SingleDeviceSharding(_device(shard))
