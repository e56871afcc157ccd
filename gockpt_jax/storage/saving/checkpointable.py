"""The face for Orbax's v1: a checkpointable whose saves leave the device through windows."""

import asyncio
import functools
from collections.abc import Awaitable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import v1

from gockpt_jax.options import WindowOptions
from gockpt_jax.storage.saving.commit import agree
from gockpt_jax.storage.saving.handler import GoCkptHandler, GoCkptRestore, GoCkptSave
from gockpt_jax.window.face import WindowFace
from gockpt_jax.window.processes import attempted


class GoCkptCheckpointable(WindowFace):
    """A state that `orbax.checkpoint.v1.training.Checkpointer` saves through windows.

    One for the whole run, under one name. Call it with the tree to save, or with the target to load
    into. It hears of accepted saves only, so it foresees them by `expect_save`, by the policy given
    here, or by their period. What it writes, v1 and v0 load without us.

    Args:
      window: How the state leaves the device.
      save_decision_policy: The policy that the `Checkpointer` was given.
      **options: Keywords of `ocp.PyTreeCheckpointHandler` (`use_ocdbt`, `use_zarr3`, ...).

    Attributes:
      item: The tree of the last call; what was loaded, after a load.

    Raises:
      TypeError: if `window` is not a `WindowOptions`.
      ValueError: if its `on_busy` is not `"wait"`.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp
      >>> from orbax.checkpoint import v1
      >>> with (
      ...     v1.training.Checkpointer(tempfile.mkdtemp()) as checkpointer,
      ...     GoCkptCheckpointable() as windows,
      ... ):
      ...     step = windows.wrap(jax.jit(lambda state: {"w": state["w"] * 0.5}))
      ...     state = step({"w": jnp.ones(2)})
      ...     saved = checkpointer.save_checkpointables(0, {"state": windows(state)})
      ...     loaded = checkpointer.load_checkpointables(0, {"state": windows(state)})
      >>> loaded["state"].item["w"].tolist(), windows.last_report.kind
      ([0.5, 0.5], 'snapshot')
    """

    def __init__(
        self,
        *,
        window: WindowOptions | None = None,
        save_decision_policy: Any = None,
        **options: Any,
    ):
        self._handler = _SavesMayOverlap(
            window=window, save_decision_policy=save_decision_policy, **options
        )
        self._gockpt_share_session(self._handler)
        self.item: Any = None

    def __call__(self, item: Any) -> "GoCkptCheckpointable":
        """Takes the tree to save, or the target to load into (`jax.ShapeDtypeStruct`s will do)."""
        self.item = item
        return self

    async def save(self, directory: Any) -> Awaitable[None]:
        """Seals the window (or takes a snapshot); what it returns waits until all is written.

        Args:
          directory: Of the checkpointable; it may not exist yet.
        """
        futures = await self._handler.async_save(directory.path, GoCkptSave(self.item))
        # v1 may begin the next save before this one has ended.
        begun = self._handler.begun.item(directory.path)
        assert begun is not None, "what has been taken has begun"

        async def write() -> None:
            try:
                await self._write(directory, futures, begun.label)
            except BaseException as error:
                begun.failed(error)
                raise

        return write()

    async def _write(self, directory: Any, futures: Sequence[Any], label: int) -> None:
        """Waits until all is written, and finalizes it: v1 asks nobody to."""
        await directory.await_creation()
        for future in futures:
            await asyncio.to_thread(future.result)
        error = None
        if ocp.multihost.is_primary_host(self._handler.primary_host):
            finalize = functools.partial(self._handler.finalize, directory.path)
            _, error = await asyncio.to_thread(attempted, finalize)
        processes = self._gockpt_session.processes
        await asyncio.to_thread(agree, processes, "finalized", label, error)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Loads into the target, or as it was saved if there is none."""
        self._gockpt_session.abandon("a checkpoint was loaded")
        target = jax.tree.map(_as_target, self.item)
        self.item = self._handler.restore(directory, GoCkptRestore(target))

        async def nothing_left() -> None:
            pass

        return nothing_left()

    def close(self) -> None:
        """Drops an open window and ends the worker thread. Close the `Checkpointer` first."""
        self._handler.close()

    def __enter__(self) -> "GoCkptCheckpointable":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _SavesMayOverlap(GoCkptHandler):
    """v1 may begin the next save before the last one has ended."""

    _one_at_a_time = False


@v1.handlers.register_handler
class _NamedAsStock(v1.handlers.PyTreeHandler):  # type: ignore[misc]  # untyped
    """Saves and loads our checkpointables, in the name of stock's handler of trees.

    v1 notes in a checkpoint which handler has written an item, by the name of its class, and goes
    by that where it is given no target. The one that it takes for objects that save themselves
    loads nothing without such an object, and tells no metadata; what we have written is a tree as
    stock would write it. Only an item named `state` is a tree by its name.
    """

    async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
        writing: Awaitable[None] = await checkpointable.save(directory)
        return writing

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        if not isinstance(abstract_checkpointable, GoCkptCheckpointable):
            loading: Awaitable[Any] = await super().load(directory, abstract_checkpointable)
            return loading
        rest = await abstract_checkpointable.load(directory)

        async def load() -> Any:
            await rest
            return abstract_checkpointable

        return load()

    def is_handleable(self, checkpointable: Any) -> bool:
        return isinstance(checkpointable, GoCkptCheckpointable)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        return isinstance(abstract_checkpointable, GoCkptCheckpointable)


_NamedAsStock.__module__ = v1.handlers.PyTreeHandler.__module__
_NamedAsStock.__qualname__ = v1.handlers.PyTreeHandler.__qualname__


def _as_target(leaf: Any) -> Any:
    """A leaf of a v1 target in v0's words: v1 takes types of scalars, and arrays by protocol."""
    if isinstance(leaf, type):
        return leaf()
    if isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return leaf
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    if getattr(leaf, "sharding", None) is None:  # NumPy's
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    return v1.arrays.to_shape_dtype_struct(leaf)
