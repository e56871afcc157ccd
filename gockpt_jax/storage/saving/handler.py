"""The handler for stock's managers: it finds out, and tells, what our manager would."""

import asyncio
import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

import orbax.checkpoint as ocp

from gockpt_jax.errors import StorageError
from gockpt_jax.options import WindowOptions
from gockpt_jax.storage.files.item_files import TEMPORARY
from gockpt_jax.storage.restoring.arguments import GoCkptRestore
from gockpt_jax.storage.saving.begun_item import BegunItem
from gockpt_jax.storage.saving.policies import labels_of_policy
from gockpt_jax.storage.saving.state_handler import StateHandler
from gockpt_jax.storage.saving.taken import TakenSave
from gockpt_jax.storage.saving.written import Reported

_NO_WORD = (
    "given up before its commit, as where its directory cannot be made or another item fails: the "
    "manager has raised why"
)


class GoCkptHandler(StateHandler):
    """Saves trees of arrays through a window; restores like `ocp.StandardCheckpointHandler`.

    For a stock manager: `ocp.CheckpointManager(directory, item_handlers={"state": handler})`, or
    the handler alone, and `handler.wrap(train_step)`. It hears of accepted saves only, so it
    foresees them by `expect_save`, by the policy given here, or by their period.

    Args:
      window: How the state leaves the device.
      save_decision_policy: The policy that the manager was given. If it goes by labels, and these
        count steps, uneven ones are foreseen, too, and saves behind a forced one.
      **options: Keywords of `ocp.PyTreeCheckpointHandler` (`use_ocdbt`, `use_zarr3`, ...).

    Raises:
      TypeError: if `window` is not a `WindowOptions`.
      ValueError: if its `on_busy` is not `"wait"`: a stock manager waits, whatever we say.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp
      >>> handler = GoCkptHandler()
      >>> with ocp.CheckpointManager(tempfile.mkdtemp(), item_handlers=handler) as manager:
      ...     step = handler.wrap(jax.jit(lambda state: {"w": state["w"] * 0.5}))
      ...     state = step({"w": jnp.ones(2)})
      ...     saved = manager.save(0, args=GoCkptSave(state))
      ...     restored = manager.restore(0, args=GoCkptRestore(state))
      >>> restored["w"].tolist(), handler.last_report.kind
      ([0.5, 0.5], 'snapshot')
    """

    _one_at_a_time = True  # a manager waits for its last save, and raises what went wrong with it

    def __init__(
        self,
        *,
        window: WindowOptions | None = None,
        save_decision_policy: Any = None,
        **options: Any,
    ):
        super().__init__(window=window, **options)
        on_busy = self._gockpt_session.options.on_busy
        if on_busy != "wait":
            raise ValueError(
                "`on_busy` must be 'wait' beside stock's manager or `Checkpointer`, got "
                f"{on_busy!r}: these wait for the previous save. `GoCkptManager` need not."
            )
        predictor = self._gockpt_session.predictor
        predictor.is_save_label = labels_of_policy(save_decision_policy, starts_windows=False)
        predictor.sees_every_call = False

    async def async_save(self, directory: Any, args: Any) -> Sequence[ocp.future.Future]:
        """Begins a save as under our manager, and tells what that would have told of it."""
        entered_at = time.perf_counter()
        try:
            futures = await super().async_save(directory, args)
        except Exception:
            if self._one_at_a_time:  # v1 may not have begun to make its directory
                await asyncio.to_thread(self.begun.left.wait_for_directory)
            raise
        session, begun = self._gockpt_session, self.begun.item(directory)
        assert begun is not None, "what has been taken has begun"
        session.predictor.observe(session.version, begun.label, accepted=True)
        begun.pending.returned(entered_at)
        return [Reported(written, begun.pending, begun.give_up) for written in futures]

    async def _begin_writing(
        self, directory: Any, taken: TakenSave, begun: BegunItem
    ) -> ocp.future.Future:
        try:
            return await super()._begin_writing(directory, taken, begun)
        except BaseException as error:
            taken.pending.failed(error)
            raise

    def _begin(self, directory: str) -> None:
        """Another save begins: its directory has its label. Others may still be written."""
        self.begun.give_up_before(StorageError(_NO_WORD), one_at_a_time=self._one_at_a_time)
        digits = re.findall(r"\d+", directory.rpartition("/")[2].partition(TEMPORARY)[0])
        self.begun.label = int(digits[-1]) if digits else -1
        self.begun.left.wait(self.begun.label)

    def finalize(self, directory: Any) -> None:
        """Completes an item; the save is visible then, but for the rename."""
        begun = self.begun.item(directory)
        pending = None if begun is None else begun.pending
        try:
            super().finalize(directory)
        except BaseException as error:
            if pending is not None:
                pending.failed(error)
            raise
        if pending is not None:
            pending.committed()

    def close(self) -> None:
        """Closes the stock handlers inside; drops an open window and ends the worker thread."""
        if self._one_at_a_time:
            self.begun.give_up_all(StorageError(_NO_WORD))
        self._gockpt_session.close()
        super().close()


@ocp.args.register_with_handler(GoCkptHandler, for_save=True)
@dataclasses.dataclass
class GoCkptSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to save: arguments of `GoCkptManager.save`, like `ocp.args.StandardSave`.

    Attributes:
      item: Any tree. Arrays that the last wrapped step returned leave through the window; all other
        leaves are saved as stock saves them.
      save_args: A tree of `ocp.SaveArgs`, as in `ocp.args.PyTreeSave`.
      custom_metadata: JSON to store beside the tree, as in `ocp.args.PyTreeSave`.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


ocp.args.register_with_handler(GoCkptHandler, for_restore=True)(GoCkptRestore)
