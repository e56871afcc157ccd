"""Reads arrays without TensorStore, inside Orbax's own restore."""

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gockpt_jax.compiling import unwatched
from gockpt_jax.storage.files import bucket, grid
from gockpt_jax.storage.files.aligned import BLOCK_BYTES, PIECE_BYTES, aligned_empty
from gockpt_jax.storage.files.plain_array import PlainArray, PlainArrays
from gockpt_jax.storage.files.plain_reads import PlainReads
from gockpt_jax.storage.writing.registry import RegistryView, look_up
from gockpt_jax.transfer.budget import ByteBudget, batches

# Host memory for arrays on their way to the devices; an array larger than that goes alone.
LIMIT_BYTES = 2 * 2**30
_AT_ONCE = 4  # arrays, or batches of them, that are being handed to the devices

_Array = np.ndarray[Any, Any]
_Bounds = tuple[tuple[int, int], ...]


def direct_reads(others: Any, limit_bytes: int) -> Any:
    """Returns a registry view in which arrays are read by the handler below, where it can.

    Args:
      others: The registry for all other types; `None`: Orbax's global one.
      limit_bytes: The most bytes of arrays in host memory at one time, on their way to devices.

    Returns:
      `others` itself where arrays have another handler in it than stock's: its own way to read.
    """
    stock = look_up(others)("jax.Array")
    if type(stock) is not ocp.type_handlers.ArrayHandler:
        return others
    return RegistryView(jax.Array, PlainArrayReader(stock, limit_bytes), others, by_name=True)


class PlainArrayReader(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]  # Orbax is untyped.
    """Stock's handler of arrays, for all but those that are stored as they are, and so wanted.

    Args:
      others: Stock's handler.
      limit_bytes: As in `direct_reads`.
    """

    def __init__(self, others: ocp.type_handlers.ArrayHandler, limit_bytes: int) -> None:
        super().__init__()
        self._others = others
        self._limit_bytes = limit_bytes

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        """Reads arrays; the results are in the order of `infos`."""
        args = list(args or [ocp.RestoreArgs()] * len(infos))
        made = ((i, _elsewhere(x)) for i, x in enumerate(args))
        arrays: dict[int, jax.Array] = {i: array for i, array in made if array is not None}
        found = await asyncio.to_thread(_look_for_plain, infos, args)
        rest = [i for i in range(len(infos)) if i not in found and i not in arrays]
        if rest:
            read = await self._others.deserialize([infos[i] for i in rest], [args[i] for i in rest])
            arrays.update(zip(rest, read, strict=True))
        if found:
            read = await asyncio.to_thread(_read_all, list(found.values()), self._limit_bytes)
            arrays.update(zip(found, read, strict=True))
        return [arrays[i] for i in range(len(infos))]

    def memory_size(self, values: Sequence[jax.Array]) -> list[tuple[int, int]]:
        """Returns the bytes to write and to read per value, which Orbax before 0.12.2 asks for.

        Stock's own fails at an array of which nothing is here.
        """
        sizes = (sum(s.data.nbytes for s in v.addressable_shards) for v in values)
        return [(nbytes, nbytes) for nbytes in sizes]


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """An array to be read, and where it shall lie."""

    stored: PlainArray
    sharding: jax.sharding.Sharding

    @functools.cached_property
    def boxes(self) -> dict[_Bounds, grid.Box]:
        """What this process needs of it, once each, by the bounds."""
        shape = self.stored.shape
        boxes = {}
        for index in self.sharding.addressable_devices_indices_map(shape).values():
            box = grid.explicit(index, shape)
            boxes[_bounds(box)] = box
        return boxes

    @functools.cached_property
    def nbytes(self) -> int:
        """Of memory for that."""
        itemsize = self.stored.dtype.itemsize
        shapes = map(grid.shape_of, self.boxes.values())
        return sum(_in_blocks(math.prod(shape) * itemsize) for shape in shapes)


def _elsewhere(args: Any) -> jax.Array | None:
    """An array on devices of other processes alone: nothing is read here, and stock makes none."""
    sharding, shape, dtype = (
        getattr(args, name, None) for name in ("sharding", "global_shape", "dtype")
    )
    if not isinstance(sharding, jax.sharding.Sharding) or sharding.addressable_devices:
        return None
    if shape is None or dtype is None or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return None
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


def _look_for_plain(infos: Sequence[Any], args: Sequence[Any]) -> dict[int, _Wanted]:
    """What is ours to read, by its place among the infos; all are of one directory, says Orbax."""
    folder = infos[0].parent_dir.as_posix() if infos else ""
    if bucket.is_bucket(folder):
        return {}
    # Not in another format, nor by an older Orbax, which wrote no files of zeros.
    ours = [i for i, x in enumerate(infos) if not x.use_zarr3 and x.raise_array_data_missing_error]
    stored = PlainArrays(folder, any(infos[i].is_ocdbt_checkpoint for i in ours))

    def look(some: Sequence[int]) -> list[tuple[int, _Wanted | None]]:
        return [(i, _wanted(stored, infos[i].name, args[i])) for i in some]

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "gockpt_look") as pool:
        looks = pool.map(look, (ours[n::_AT_ONCE] for n in range(_AT_ONCE)))
        found = dict(itertools.chain.from_iterable(looks))
    return {i: wanted for i in ours if (wanted := found[i]) is not None}


def _wanted(arrays: PlainArrays, name: str, args: Any) -> _Wanted | None:
    """None for what is stored in another way, or not wanted as it is stored."""
    sharding = getattr(args, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding) or getattr(args, "mesh", None) is not None:
        return None
    stored = arrays.find(name)
    if stored is None or not math.prod(stored.shape) or not sharding.addressable_devices:
        return None
    # Integers of 32 bits without a sign may be the data of typed PRNG keys; stock knows which are.
    is_wanted = (
        _is_dtype(args.dtype, stored.dtype)
        and stored.dtype != np.uint32
        and jax.dtypes.canonicalize_dtype(stored.dtype) == stored.dtype
        and getattr(args, "global_shape", None) in (None, stored.shape)
    )
    return _Wanted(stored, sharding) if is_wanted else None


def _is_dtype(wanted: Any, stored: np.dtype[Any]) -> bool:
    try:
        return wanted is None or np.dtype(wanted) == stored
    except TypeError:  # one of JAX's own: typed PRNG keys
        return False


def _read_all(wanted: Sequence[_Wanted], limit_bytes: int) -> list[jax.Array]:
    """Reads arrays, a few at once where they are small, while earlier ones go to the devices."""
    budget = ByteBudget(limit_bytes)
    reads = PlainReads(past_cache=jax.process_count() == 1)
    pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, "gockpt_arrays")
    arrays: list[jax.Array] = []
    try:
        made: collections.deque[concurrent.futures.Future[list[jax.Array]]] = collections.deque()
        for batch in batches(wanted, lambda one: one.nbytes, min(PIECE_BYTES, limit_bytes)):
            made.append(_start(batch, budget, reads, pool))
            while made and made[0].done():  # nothing more is read where one has failed
                arrays += made.popleft().result()
        for future in made:
            arrays += future.result()
        return arrays
    finally:
        reads.close()
        pool.shutdown()


def _start(
    batch: Sequence[_Wanted],
    budget: ByteBudget,
    reads: PlainReads,
    pool: concurrent.futures.ThreadPoolExecutor,
) -> concurrent.futures.Future[list[jax.Array]]:
    """Starts reading arrays when there is room for them."""
    nbytes = sum(one.nbytes for one in batch)
    budget.acquire(nbytes)
    values = _memory(batch, nbytes)
    pieces = reads.start(
        (one.stored, [(box, of[key]) for key, box in one.boxes.items()])
        for one, of in zip(batch, values, strict=True)
    )

    def finish() -> list[jax.Array]:
        try:
            for piece in pieces:
                piece.result()
            made = [_on_devices(one, of) for one, of in zip(batch, values, strict=True)]
            arrays: list[jax.Array] = jax.block_until_ready(made)
            return arrays
        finally:
            budget.release(nbytes)

    return pool.submit(finish)


def _memory(batch: Sequence[_Wanted], nbytes: int) -> list[dict[_Bounds, _Array]]:
    """Memory for the boxes of arrays, by their bounds.

    One mapping for all of them: it takes as long as to read a small array, and Linux allows a
    process 65,530. Where a backend takes host memory as it is, the arrays share it.
    """
    memory, start, values = aligned_empty(nbytes), 0, []
    for one in batch:
        of: dict[_Bounds, _Array] = {}
        for key, box in one.boxes.items():
            shape, dtype = grid.shape_of(box), one.stored.dtype
            of[key] = np.ndarray(shape, dtype, memory, start)  # type: ignore[arg-type]
            start += _in_blocks(of[key].nbytes)
        values.append(of)
    return values


def _on_devices(wanted: _Wanted, values: Mapping[_Bounds, _Array]) -> jax.Array:
    shape = wanted.stored.shape
    with unwatched():
        return jax.make_array_from_callback(
            shape,
            wanted.sharding,
            lambda index: values[_bounds(grid.explicit(index, shape))],
            dtype=wanted.stored.dtype,
        )


def _in_blocks(nbytes: int) -> int:
    """Where the next array may begin, so that the disk can write to it."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def _bounds(box: grid.Box) -> _Bounds:
    return tuple((s.start, s.stop) for s in box)
