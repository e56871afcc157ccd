"""Writes host arrays exactly where and how stock Orbax would write the `jax.Array`s.

Only the source of the bytes differs: they come shard by shard, through futures. What lies on disk
(keys, values, `_METADATA`, `_sharding`, `array_metadatas`) is what stock would have written, so
stock restores it; see `spec.py` for the layout.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from gockpt_jax.storage import spec as spec_lib
from gockpt_jax.storage.host_array import HostArray, HostShard, ShardFuture
from gockpt_jax.storage.write_budget import DEFAULT_WRITE_LIMIT_BYTES, WriteBudget, WriteStats

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """One leaf of a save, with all that Orbax says about it."""

    array: HostArray
    info: ocp.type_handlers.ParamInfo
    args: ocp.SaveArgs


class HostArrayHandler(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]  # Orbax is untyped.
    """Orbax's type handler for `HostArray`: stock's for `jax.Array` with another `serialize`.

    It answers to the same type name, "jax.Array", so `_METADATA` names a type that stock knows.

    Args:
        write_limit_bytes: The most bytes with TensorStore at one time (its copies and compressed
            chunks come on top). A shard larger than this is written alone.
        primary_host: The process that writes what is common to all; None if every one has its own
            storage. As in `ocp.options.MultiprocessingOptions`.
        replica_layout: How replicated shards are cut into chunks; by default as stock would here.

    Raises:
        ValueError: `write_limit_bytes` is not positive.
    """

    def __init__(
        self,
        *,
        write_limit_bytes: int = DEFAULT_WRITE_LIMIT_BYTES,
        primary_host: int | None = 0,
        replica_layout: spec_lib.ReplicaLayout | None = None,
    ) -> None:
        super().__init__(primary_host=primary_host)
        if write_limit_bytes <= 0:
            raise ValueError(f"`write_limit_bytes`: expected at least 1, got {write_limit_bytes}.")
        self._write_limit_bytes = write_limit_bytes
        self.primary_host = primary_host
        self.is_primary = primary_host is None or jax.process_index() == primary_host
        self._replica_layout = replica_layout or spec_lib.ReplicaLayout()
        self._stats = WriteStats()

    def take_stats(self) -> WriteStats:
        """Returns the statistics of the save begun since the last call; zeros if there was none.

        Call it as soon as `async_save` has returned; the object is filled while the save runs.
        """
        stats, self._stats = self._stats, WriteStats()
        return stats

    def memory_size(self, values: Sequence[HostArray]) -> list[tuple[int, int]]:
        """Returns the bytes to write and to read per value, which Orbax before 0.12.2 asks for."""
        sizes = [math.prod(v.sharding.shard_shape(v.shape)) * v.dtype.itemsize for v in values]
        return [(nbytes, nbytes) for nbytes in sizes]

    async def serialize(
        self,
        values: Sequence[HostArray],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[ocp.future.Future]:
        """Starts writing `values` on a thread of Orbax's; the future resolves when all is written.

        The future raises what the first failing shard or write raised, with the leaf's name added
        as a note. Whatever happens, every shard has been released when it resolves.

        Raises:
            ValueError: A leaf is empty or local to this process: stock refuses to save those too.
        """
        args = args or [ocp.SaveArgs()] * len(values)
        leaves = [_Leaf(*leaf) for leaf in zip(values, infos, args, strict=True)]
        _check_savable(leaves)
        self._stats = WriteStats()
        # The directory may not exist yet. This future waits for Orbax's word that it does.
        future = ocp.future.CommitFutureAwaitingContractedSignals(
            self._write_all(leaves, self._stats), name="gockpt_host_array_write"
        )
        return [future]

    async def _write_all(self, leaves: Sequence[_Leaf], stats: WriteStats) -> None:
        budget = WriteBudget(self._write_limit_bytes, stats)
        try:
            for leaf in leaves:
                await _directory_exists(leaf.info)
            async with _first_error_alone(), asyncio.TaskGroup() as group:
                layouts = [
                    spec_lib.array_layout(leaf.array, leaf.info, leaf.args, self._replica_layout)
                    for leaf in leaves
                ]
                _write_array_metadatas(leaves[0].info, layouts)
                if self.is_primary:
                    group.create_task(_write_shardings(leaves))
                for leaf, layout in zip(leaves, layouts, strict=True):
                    group.create_task(self._write_leaf(leaf, layout, budget, group))
        finally:
            # Tasks that were cancelled before they began have released nothing.
            for leaf in leaves:
                for shard in leaf.array.shards:
                    shard.release()

    async def _write_leaf(
        self,
        leaf: _Leaf,
        layout: spec_lib.ArrayLayout,
        budget: WriteBudget,
        group: asyncio.TaskGroup,
    ) -> None:
        """Opens the leaf's array and starts one task per shard."""
        spec = spec_lib.array_spec(leaf.info, layout, leaf.array.shape, jax.process_index())
        # Sharing the save's context with stock's handlers makes them share one OCDBT database too.
        context = leaf.info.ts_context or ocp.type_handlers.get_ts_context(
            use_ocdbt=bool(leaf.info.is_ocdbt_checkpoint)
        )
        with _named_in_errors(leaf.info.name):
            if self.is_primary:
                await _open(spec, context, create=True, open=True)
            store = await _open(spec, context, open=True, assume_metadata=True)
        for shard in leaf.array.shards:
            group.create_task(_write_shard(store, leaf, shard, budget))


async def _open(spec: dict[str, Any], context: ts.Context | None, **mode: Any) -> ts.TensorStore:
    return await _to_the_end(ts.open(ts.Spec(spec), context=context, **mode))


async def _write_shard(
    store: ts.TensorStore, leaf: _Leaf, shard: HostShard, budget: WriteBudget
) -> None:
    """Waits for one shard's bytes, writes them and gives them back."""
    box = shard.box(leaf.array.shape)
    data: np.ndarray[Any, Any] | None = None
    with _named_in_errors(leaf.info.name, box):
        try:
            data = await _arrival(shard.data)
            _check_data(data, box, leaf.array.dtype)
            async with budget.admit(data.nbytes):
                await budget.stats.checksums.add(leaf.info.name, box, data, leaf.args.dtype)
                # No copy into TensorStore's cache: the bytes stay as they are until released.
                await _to_the_end(
                    store[box].write(data, can_reference_source_data_indefinitely=True)
                )
        finally:
            data = None  # An exception's traceback would keep the bytes alive.
            shard.release()


async def _to_the_end(operation: Awaitable[_T]) -> _T:
    """Waits for an operation of TensorStore until it has ended, even when cancelled.

    TensorStore does not stop: it goes on reading the bytes, and its call back into an event loop
    that has been closed meanwhile would fail.
    """
    task = asyncio.ensure_future(operation)
    del operation  # The traceback of a failed write would keep it, and with it the bytes.
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        task.exception()  # The save has failed already; without this asyncio would log it.
        raise


async def _arrival(future: ShardFuture) -> np.ndarray[Any, Any]:
    """Waits for a future that another thread resolves.

    Unlike `asyncio.wrap_future` it never cancels the future when this save fails: the worker that
    resolves it would trip over that.
    """
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()

    def wake(_: ShardFuture) -> None:
        # The loop is closed when the save has failed meanwhile: then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(arrived.set)

    future.add_done_callback(wake)
    await arrived.wait()
    try:
        return future.result()
    except concurrent.futures.CancelledError as error:
        # Orbax would take a CancelledError for its own cancellation and lose the reason.
        raise RuntimeError("The save was given up before the bytes of a shard arrived.") from error


def _check_savable(leaves: Sequence[_Leaf]) -> None:
    """Raises for leaves that stock refuses, naming all of them at once."""
    empty = [leaf.info.name for leaf in leaves if not leaf.array.size]
    if empty:
        raise ValueError(f"Cannot save arrays with zero size (nor can stock Orbax): {empty}.")
    if jax.process_count() == 1:
        return
    local = [leaf.info.name for leaf in leaves if leaf.array.sharding.is_fully_addressable]
    if local:
        raise ValueError(
            f"Cannot save arrays that live in one of several processes only: {local}. Make global"
            " arrays of them, for example with `jax.make_array_from_process_local_data`."
        )


def _check_data(data: Any, box: tuple[slice, ...], dtype: np.dtype[Any]) -> None:
    """TensorStore would broadcast or convert other data without a word."""
    shape = tuple(s.stop - s.start for s in box)
    if not isinstance(data, np.ndarray) or data.shape != shape or data.dtype != dtype:
        got = f"{getattr(data, 'dtype', type(data).__name__)}{getattr(data, 'shape', '')}"
        raise ValueError(f"Expected an ndarray {dtype}{shape}, got {got}.")


async def _directory_exists(info: ocp.type_handlers.ParamInfo) -> None:
    """Waits for the save's directory; older Orbax creates it before it calls us."""
    if hasattr(info, "await_path_creation"):
        await info.await_path_creation()


def _write_array_metadatas(
    info: ocp.type_handlers.ParamInfo, layouts: Sequence[spec_lib.ArrayLayout]
) -> None:
    """Writes the file from which Orbax takes write shapes and PRNG implementations."""
    folder = info.parent_dir / "array_metadatas"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"array_metadatas": [layout.metadata() for layout in layouts]})
    (folder / f"process_{jax.process_index()}").write_text(text)


async def _write_shardings(leaves: Sequence[_Leaf]) -> None:
    """Writes the `_sharding` file, by which stock restores without a target."""
    transaction = ts.Transaction()
    for leaf in leaves:
        text = spec_lib.sharding_text(leaf.array.sharding)
        if text is not None:
            spec = spec_lib.sharding_spec(leaf.info)
            store = await _open(spec, leaf.info.ts_context, open=True)
            await _to_the_end(store.with_transaction(transaction).write(text))
    await _to_the_end(transaction.commit_async())


@contextlib.contextmanager
def _named_in_errors(name: str, box: tuple[slice, ...] | None = None) -> Iterator[None]:
    """Adds a note to an error that says which leaf it befell; its type and text stay."""
    try:
        yield
    except Exception as error:
        if not getattr(error, "__notes__", ()):  # one that all chunks share would be named by each
            where = f"`{name}`" if box is None else f"`{name}`, box {box}"
            error.add_note(f"gockpt_jax: while saving {where}.")
        raise


@contextlib.asynccontextmanager
async def _first_error_alone() -> AsyncIterator[None]:
    """Unwraps a task group's error: the user shall see the one that came first, as it was."""
    first: BaseException | None = None
    try:
        yield
    except BaseExceptionGroup as group:
        first = group.exceptions[0]
    if first is not None:
        raise first
