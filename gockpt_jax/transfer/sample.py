"""Samples: small boxes of live arrays, packed into fresh device buffers and pulled.

They are taken where the state is sealed, for the audit. Like staging, a sample is a copy made by a
program that donates nothing, so a later step may do with the arrays what it likes.
"""

import concurrent.futures
import dataclasses
import math
import threading
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from gockpt_jax.transfer.pull import Pull, owned_shards, start_pull
from gockpt_jax.transfer.staging import SUB_BYTE, is_typed_key

MIN_BOX_BYTES = 4096
"""Below this a sample costs what its dispatch costs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """A shard, cut into boxes of one size; each is a run of consecutive elements.

    Attributes:
      shape: Of the shard.
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
        """Where a box is among the shard's elements, row by row."""
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
    return not is_typed_key(array) and SUB_BYTE.match(str(array.dtype)) is None


Cut = tuple[jax.Array, Grid, int]
"""An array of one device, alive; how it is cut; which box is taken."""


class Sample:
    """Boxes on their way to the host."""

    def __init__(self, runs: list[tuple[list[int], list[int], Pull]]):
        self._runs = runs  # positions among those asked for, their lengths, their pull

    def result(self) -> list[np.ndarray]:
        """Waits for them, once; the elements of each, flat, in the order asked for."""
        found: dict[int, np.ndarray] = {}
        while self._runs:
            positions, lengths, pull = self._runs.pop()
            (packed,) = pull.result()
            parts = np.split(packed.data, np.cumsum(lengths)[:-1])
            found.update(zip(positions, parts, strict=True))
        return [found[i] for i in sorted(found)]


def sample_bytes(cuts: Sequence[Cut]) -> int:
    """Bytes of the boxes, on the device that holds the most of them."""
    by_device: dict[Any, int] = defaultdict(int)
    for shard, grid, _ in cuts:
        by_device[_device(shard)] += math.prod(grid.sizes) * shard.dtype.itemsize
    return max(by_device.values(), default=0)


def start_sample(cuts: Sequence[Cut]) -> Sample:
    """Copies boxes on their devices and starts the pulls; returns at once."""
    runs = []
    for positions in _together([shard for shard, _, _ in cuts]):
        shards, grids, boxes = zip(*(cuts[i] for i in positions), strict=True)
        starts = [n for grid, box in zip(grids, boxes, strict=True) for n in grid.start(box)]
        # Explicitly: the user's transfer guard may forbid what happens by itself.
        placed = jax.device_put(np.asarray(starts, np.int32), shards[0].sharding)
        packed = _program(shards, grids).result()(list(shards), placed)
        runs.append((positions, [math.prod(g.sizes) for g in grids], start_pull(packed)))
    return Sample(runs)


def compile_samples_ahead(arrays: Sequence[jax.Array], fraction: float) -> None:
    """Compiles what `start_sample` will need for these arrays, on a thread of its own.

    Args:
      arrays: Arrays like those that will be sampled together; only looked at before this returns.
      fraction: Of each shard.
    """
    shards = [s.data for a in arrays if can_be_sampled(a) for s in owned_shards(a)]
    grids = [grid_of(s.shape, s.dtype.itemsize, fraction) for s in shards]
    for positions in _together(shards):
        _program([shards[i] for i in positions], [grids[i] for i in positions])


# Compiled programs by what they take; kept for the process, like those of staging.
_programs: dict[Hashable, concurrent.futures.Future[Any]] = {}


def _program(arrays: Sequence[Any], grids: Sequence[Grid]) -> concurrent.futures.Future[Any]:
    """The program that packs a box of each array into one buffer; arrays or specifications."""
    key = _key(arrays, grids)
    if key not in _programs:
        _programs[key] = found = concurrent.futures.Future[Any]()
        specs = [_spec(a) for a in arrays]

        def compile_one() -> None:
            try:
                found.set_result(_compile(specs, grids))
            except BaseException as error:  # handed to whoever asks for the program
                found.set_exception(error)

        # Never on the trainer's thread: under its `set_mesh`, JAX refuses a single device.
        name = "gockpt-compile-samples"
        threading.Thread(target=compile_one, name=name, daemon=False).start()
    return _programs[key]


def _compile(arrays: list[jax.ShapeDtypeStruct], grids: Sequence[Grid]) -> Any:
    def pack(shards: Sequence[jax.Array], starts: jax.Array) -> jax.Array:
        boxes, at = [], 0
        for shard, grid in zip(shards, grids, strict=True):
            start = [starts[at + n] for n in range(shard.ndim)]
            at += shard.ndim
            box = lax.dynamic_slice(shard, start, grid.sizes)
            boxes.append(lax.reshape(box, (math.prod(grid.sizes),)))
        return lax.concatenate(boxes, 0)

    ndims = sum(a.ndim for a in arrays)
    starts = jax.ShapeDtypeStruct((ndims,), np.int32, sharding=arrays[0].sharding)
    return jax.jit(pack).lower(arrays, starts).compile()


def _key(arrays: Sequence[Any], grids: Sequence[Grid]) -> Hashable:
    return tuple(
        (a.shape, a.dtype, a.sharding, g.sizes) for a, g in zip(arrays, grids, strict=True)
    )


def _spec(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _device(shard: jax.Array) -> jax.Device:
    (device,) = shard.devices()
    return device


def _together(shards: Sequence[jax.Array]) -> list[list[int]]:
    """Positions of the shards that one program packs: of one device and one dtype."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, shard in enumerate(shards):
        groups[_device(shard), shard.dtype].append(i)
    return list(groups.values())
