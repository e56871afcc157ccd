"""Reads arrays from plain files without TensorStore, inside Orbax's own restore."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gockpt_jax.storage import bucket, grid
from gockpt_jax.storage.aligned import aligned_empty, threads
from gockpt_jax.storage.plain_array import PlainArray, PlainReads
from gockpt_jax.storage.registry import RegistryView, look_up
from gockpt_jax.transfer.budget import ByteBudget

# Host memory for arrays on their way to the devices; an array larger than that goes alone.
LIMIT_BYTES = 2 * 2**30
_ARRAYS_AT_ONCE = 4  # that are being handed to the devices

_Array = np.ndarray[Any, Any]


def direct_reads(others: Any = None, limit_bytes: int = LIMIT_BYTES) -> Any:
    """Returns a registry view in which arrays are read by the handler below, where it can.

    Args:
      others: The registry for all other types; Orbax's global one by default.
      limit_bytes: The most bytes of arrays in host memory at one time, on their way to devices.

    Returns:
      `others` itself where arrays have another handler in it than stock's: its own way to read.
    """
    stock = look_up(others)("jax.Array")
    if type(stock) is not ocp.type_handlers.ArrayHandler:
        return others
    return RegistryView(jax.Array, PlainArrayReader(stock, limit_bytes), others, by_name=True)


class PlainArrayReader(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]  # Orbax is untyped.
    """Stock's handler of arrays, for all but those in plain files that are wanted as they are.

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


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """An array to be read, and where it shall lie."""

    stored: PlainArray
    sharding: jax.sharding.Sharding

    def boxes(self) -> dict[Any, grid.Box]:
        """What this process needs of it, once each, by the bounds."""
        shape = self.stored.shape
        boxes = {}
        for index in self.sharding.addressable_devices_indices_map(shape).values():
            box = grid.explicit(index, shape)
            boxes[_bounds(box)] = box
        return boxes


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
    with threads(_ARRAYS_AT_ONCE, "gockpt_look") as pool:
        found = pool.map(_wanted, infos, args)
        return {i: wanted for i, wanted in enumerate(found) if wanted is not None}


def _wanted(info: Any, args: Any) -> _Wanted | None:
    """None for what is stored in another way, or not wanted as it is stored."""
    folder = info.parent_dir.as_posix()
    if info.is_ocdbt_checkpoint or info.use_zarr3 or bucket.is_bucket(folder):
        return None
    if not info.raise_array_data_missing_error:  # an older Orbax wrote no files of zeros
        return None
    sharding = getattr(args, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding) or getattr(args, "mesh", None) is not None:
        return None
    stored = PlainArray.found_in(f"{folder}/{info.name}")
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
    """Reads arrays, one after the other, while earlier ones go to the devices."""
    budget = ByteBudget(limit_bytes)
    reads = PlainReads(past_cache=jax.process_count() == 1)
    pool = threads(_ARRAYS_AT_ONCE, "gockpt_arrays")
    try:
        made: list[concurrent.futures.Future[jax.Array]] = []
        for one in wanted:
            made.append(_start(one, budget, reads, pool))
            for future in made:
                if future.done():
                    future.result()  # nothing more is read where one has failed
        return [future.result() for future in made]
    finally:
        reads.close()
        pool.shutdown()


def _start(
    wanted: _Wanted,
    budget: ByteBudget,
    reads: PlainReads,
    pool: concurrent.futures.ThreadPoolExecutor,
) -> concurrent.futures.Future[jax.Array]:
    """Starts reading an array when there is room for it."""
    stored, boxes = wanted.stored, wanted.boxes()
    shapes = {key: grid.shape_of(box) for key, box in boxes.items()}
    nbytes = sum(math.prod(shape) for shape in shapes.values()) * stored.dtype.itemsize
    budget.acquire(nbytes)
    values = {key: _empty(shape, stored.dtype) for key, shape in shapes.items()}
    pieces = reads.start(stored, [(box, values[key]) for key, box in boxes.items()])

    def finish() -> jax.Array:
        try:
            for piece in pieces:
                piece.result()
            array: jax.Array = jax.block_until_ready(_on_devices(wanted, values.__getitem__))
            return array
        finally:
            budget.release(nbytes)

    return pool.submit(finish)


def _on_devices(wanted: _Wanted, values: Callable[[Any], _Array]) -> jax.Array:
    shape = wanted.stored.shape
    return jax.make_array_from_callback(
        shape,
        wanted.sharding,
        lambda index: values(_bounds(grid.explicit(index, shape))),
        dtype=wanted.stored.dtype,
    )


def _empty(shape: Sequence[int], dtype: np.dtype[Any]) -> _Array:
    memory = aligned_empty(math.prod(shape) * dtype.itemsize)
    values: _Array = np.ndarray(tuple(shape), dtype, memory)  # type: ignore[arg-type]
    return values


def _bounds(box: grid.Box) -> tuple[tuple[int, int], ...]:
    return tuple((s.start, s.stop) for s in box)
