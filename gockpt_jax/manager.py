"""`GoCkptManager`: an `ocp.CheckpointManager` whose saves leave the device over several steps."""

import functools
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

from gockpt_jax import _compat
from gockpt_jax.errors import NoCheckpointError
from gockpt_jax.options import WindowOptions
from gockpt_jax.storage.files import _compat as of_orbax
from gockpt_jax.storage.managing import arguments, naming, resume
from gockpt_jax.storage.managing.deleting import Deleter
from gockpt_jax.storage.managing.in_turn import SavesInTurn
from gockpt_jax.storage.managing.places import root_of, step_path
from gockpt_jax.storage.managing.restores import Restores
from gockpt_jax.storage.restoring.together import Together
from gockpt_jax.storage.saving.commit import never_draining
from gockpt_jax.storage.saving.state_handler import StateHandler
from gockpt_jax.storage.writing.tree_handler import default_layout
from gockpt_jax.window.face import WindowFace
from gockpt_jax.window.processes import Processes

_log = logging.getLogger("gockpt_jax")


class GoCkptManager(WindowFace, ocp.CheckpointManager):  # type: ignore[misc]  # Orbax is untyped.
    """A checkpoint manager that takes the state over the K steps that end at the save step.

    A stock manager in every other respect: retention, metrics, `Composite` arguments, stock save
    and restore arguments, preemption. What it writes is an ordinary Orbax checkpoint, whose item is
    named `state` unless the user names it.

    Args:
      directory: Where the checkpoints are; `~` is the user's own.
      *by_position: Nothing: everything else comes by name.
      options: As in `ocp.CheckpointManager`.
      window: How the state leaves the device.
      metadata: As in `ocp.CheckpointManager`.
      logger: As in `ocp.CheckpointManager`.
      handler_registry: Handlers of further items, as in `ocp.CheckpointManager`.
      item_names: Items may have any name without it; with it, a restore without arguments gives a
        `Composite`, unless items were left unnamed.
      item_handlers: Handlers of further items by name, or the one of a bare item that is no tree
        of arrays, as in `ocp.CheckpointManager`.
      pytree_options: Keywords of `ocp.PyTreeCheckpointHandler` for the state (`use_ocdbt`, ...) and
        of the library's writer (`chunk_byte_size`). The layout is stock's, one database, but on a
        local disk without compression, which is fastest there; give `{"use_compression": True}`
        for stock's everywhere.

    Raises:
      TypeError: if an argument is of another kind, such as a `window` that is no `WindowOptions`.
      ValueError: if a handler in `item_handlers` has no arguments registered, `directory` is "" or
        has a backslash in it, or a `step_prefix` what Orbax takes for a pattern.
      NotADirectoryError: if a file is there.

    Warns:
      SnapshotOnlyWarning: if a handler was given for a tree of arrays: it knows nothing of windows.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp
      >>> from gockpt_jax import GoCkptManager, GoCkptSave
      >>> @jax.jit
      ... def train_step(state):
      ...     return {"w": state["w"] * 0.5}
      >>> with GoCkptManager(tempfile.mkdtemp()) as manager:
      ...     step = manager.wrap(train_step)
      ...     state = step({"w": jnp.ones(2)})
      ...     saved = manager.save(0, args=GoCkptSave(state))
      ...     restored = manager.restore(0)
      >>> saved, restored["w"].tolist()
      (True, [0.5, 0.5])
    """

    def __init__(
        self,
        directory: Any,
        *by_position: Any,
        options: ocp.CheckpointManagerOptions | None = None,
        window: WindowOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        logger: Any = None,
        handler_registry: Any = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        pytree_options: Mapping[str, Any] | None = None,
    ):
        arguments.check_all(
            by_position, options=options, metadata=metadata, logger=logger,
            pytree_options=pytree_options,
        )  # fmt: skip
        root = root_of(directory)
        options = ocp.CheckpointManagerOptions() if options is None else options
        self._gockpt_options = options
        self._gockpt_closed = False
        self._gockpt_looked = False  # into a directory that has no step of ours
        processes = Processes(options.multiprocessing_options.active_processes)
        options = never_draining(root, options, processes)
        together = options.multiprocessing_options
        layout = {**default_layout(root), "multiprocessing_options": together}
        handler = StateHandler(
            window=window, processes=processes, **{**layout, **(pytree_options or {})}
        )
        names = naming.Naming(handler, handler_registry, item_names, item_handlers)
        self._gockpt_handler, self._gockpt_naming = handler, names
        self._gockpt_share_session(handler)
        self._gockpt_session.host.directory = str(root)
        self._gockpt_saves = saves = SavesInTurn(self, options, handler, names)
        self._gockpt_restores = Restores(self, self._gockpt_options, handler, names, saves)
        with saves.calls.saving:  # stock takes neither names nor handlers beside a registry
            super().__init__(
                root, options=saves.options, handler_registry=names.registry,
                metadata=metadata, logger=logger,
            )  # fmt: skip
        of_orbax.items_have_names(self)
        handler.wait_for_metadata = of_orbax.wait_for_metadata(self)
        if processes.several and together.active_processes is not None:
            meet = functools.partial(of_orbax.meet_behind_restore, together)
            handler.together = Together(processes, meet)
        saves.last.deleter = of_orbax.replace_deleter(
            self, lambda stock: Deleter(stock, self.directory, options)
        )
        _compat.before_shutdown(functools.partial(_finish_saves, weakref.ref(self)))

    # Saving and restoring.

    def save(
        self, step: int, *by_position: Any, args: Any = None, metrics: Any = None,
        force: bool | None = False, custom_metadata: dict[str, Any] | None = None,
        items: None = None, save_kwargs: None = None,
    ) -> bool:  # fmt: skip
        """Saves if the policy says so, as `ocp.CheckpointManager.save` does.

        Args:
          step: The label.
          *by_position: Nothing: everything else comes by name.
          args: What to save. A bare `GoCkptSave(state)` is saved as item `state`; what is no tree
            of arrays, as stock names it.
          metrics: As in `ocp.CheckpointManager`, like all that follow.
          force: Whether to save whatever the policy says.
          custom_metadata: JSON, beside that of the step.
          items: Nothing, as `save_kwargs`: Orbax's old form is refused.
          save_kwargs: Likewise.

        Returns:
          Whether there will be a checkpoint of it.

        Raises:
          DeviceMemoryError: if a device has no memory for the copies of the state.
          HostBudgetError: if the host budget cannot hold the state.
          ProcessError: if other processes save another label, or after another update, or are gone.
          StorageError: if the storage refuses this save, or has refused the one before.
          RuntimeError: if the manager is closed, a signal handler calls in the middle of a step or
            of another call, or the user's own callback of the last save does.
          TypeError: if the state is not given as `args`, the label is no integer, or what `best_fn`
            returns cannot be compared.
          ValueError: if the label is negative, there are no `args`, or the state has been donated
            to a later step.
        """
        started_at = time.perf_counter()
        step = arguments.as_label(step)
        arguments.refuse_unnamed("save", "state", by_position, items, save_kwargs)
        if args is None:
            raise ValueError("Must provide `args`, as in `save(step, args=GoCkptSave(state))`.")
        self._gockpt_saves.calls.refuse_inside(f"save of step {step}")
        self._gockpt_saves.calls.refuse_waiting()
        with self._gockpt_saves.calls.saving:
            if self._gockpt_closed:
                raise RuntimeError(
                    f"save of step {step}: the manager is closed. Save before `close`."
                )
            self._gockpt_naming.note(args)
            asked = dict(args=args, metrics=metrics, force=force, custom_metadata=custom_metadata)
            return self._gockpt_saves.save(step, asked, started_at)

    def should_save(self, step: int) -> bool:
        """Whether the policy would save this label now, as stock says it.

        A loop that asks at every step, and calls `save` if the answer is yes, has its saves
        foreseen as if it called `save` at every step. One of several processes may ask alone, and
        the others would foresee something else: where the policy goes by labels, they tell each
        other at every save whether all have asked, and foresee the next from then on.
        """
        answer: bool = super().should_save(step)
        session = self._gockpt_session
        if not self._gockpt_saves.calls.is_inside:  # Orbax asks, too
            session.predictor.asked(session.version, step, answer)
        return answer

    def restore(
        self, step: int | None, *by_position: Any, args: Any = None, directory: Any = None,
        verify: bool = False, items: None = None, restore_kwargs: None = None,
    ) -> Any:  # fmt: skip
        """Restores a step, as `ocp.CheckpointManager.restore` does.

        A bare `args=GoCkptRestore(target)`, or none, gives the item `state` itself; none gives a
        `Composite` where this manager was used with names of items alone. A checkpoint that a stock
        manager wrote without naming its item restores too.

        Args:
          step: The label; `None`: the newest one.
          *by_position: Nothing: everything else comes by name.
          args: What to restore, and as what.
          directory: Of other checkpoints than this manager's, as in `ocp.CheckpointManager`.
          verify: Whether to re-read all trees of the step first, and compare them with the
            checksums made before they were written.
          items: Nothing, as `restore_kwargs`: Orbax's old form is refused.
          restore_kwargs: Likewise.

        Raises:
          NoCheckpointError: if there is no such step or item; says what there is.
          ProcessError: if another process has failed to restore its part, or restores another step.
          TargetError: if checkpoint and target do not fit together; names all leaves.
          TypeError: if the target is not given as `args`, or the label is no integer.
          VerifyError: if `verify` and the checkpoint is not what was written.
        """
        step = None if step is None else arguments.as_asked_label(step)
        arguments.refuse_unnamed("restore", "target", by_position, items, restore_kwargs)
        self._gockpt_saves.calls.refuse_inside("restore")
        self._gockpt_session.state_replaced()
        return self._gockpt_restores.restore(step, args, directory, verify=verify)

    def latest_step(self) -> int | None:
        """The newest accepted save's label, as stock gives it; `None` where there is none yet.

        Raises:
          NoCheckpointError: if the directory holds checkpoints, but none of this manager: a loop
            would start anew beside them. Saves that never ended are only logged.
        """
        unlisted = self._gockpt_saves.unlisted
        latest: int | None = super().latest_step()
        if unlisted:
            return max([*unlisted, latest or 0])
        if latest is None and not self._gockpt_saves.calls.is_inside and not self._gockpt_looked:
            try:
                resume.refuse_fresh_start(self.directory)
            except NoCheckpointError:
                with self._gockpt_saves.calls.saving:
                    self.reload()  # another manager may have saved since this one was made
                    latest = super().latest_step()
                if latest is None:
                    raise
            self._gockpt_looked = True  # what this manager saves later is no surprise
        return latest

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Labels of all saves that have been accepted and not been deleted, as stock gives them."""
        unlisted = self._gockpt_saves.unlisted
        return sorted({*super().all_steps(read), *unlisted})

    def is_saving_in_progress(self) -> bool:
        """Whether a save is being written, or waits to be."""
        saves = self._gockpt_saves
        return bool(saves.unlisted) or saves.last.is_writing

    def metadata(self, step: int | None = None) -> Any:
        """What is known of a step, or of the whole directory (`None`), as stock gives it.

        Raises:
          NoCheckpointError: if there is no such step, or its save is under way.
          TypeError: if the label is no integer.
        """
        if step is None:
            return super().metadata()
        return self._gockpt_restores.metadata(arguments.as_asked_label(step))

    def item_metadata(self, step: int) -> Any:
        """Shapes and dtypes of a step's items, as stock gives them."""
        return self.metadata(step).item_metadata

    def delete(self, step: int) -> None:
        """Deletes a checkpoint, as stock does; the save of it that is under way is waited for.

        So is one that waits behind another (`on_busy="newest"`), whichever is deleted.

        Raises:
          NoCheckpointError: if there is no such step.
          TypeError: if the label is no integer.
        """
        step = arguments.as_asked_label(step)
        self._gockpt_saves.calls.refuse_inside(f"deletion of step {step}")
        if self._gockpt_saves.is_to_be_finished(step):
            self._gockpt_saves.finish()
        try:
            super().delete(step)
        except FileNotFoundError as error:
            path = step_path(self.directory, step, self._gockpt_options)
            raise resume.no_step(self.directory, path.name) from error

    def wait_until_finished(self) -> None:
        """Waits until all accepted saves are visible; raises what went wrong with them.

        Raises:
          StorageError: if the storage refused one. Whatever went wrong with it, on another thread,
            is raised here or by the next call, or warned of as `on_save_error` says.
          RuntimeError: if the user's own callback of that save waits, or a signal handler that has
            interrupted who holds a lock which the save needs.
        """
        saves = self._gockpt_saves
        saves.refuse_locked()
        if saves.calls.is_inside:  # what is to be written next, and windows, have to wait
            saves.last.hear()
            return
        saves.finish()
        self._gockpt_session.surface_failure()

    def close(self) -> None:
        """Waits for all accepted saves, drops an open window and ends the worker thread.

        From a signal handler in the middle of a step's hook or of a save it waits for the save
        before, and no save is taken any more; the rest is for another call, or for the end of the
        script.
        """
        self._gockpt_saves.calls.refuse_waiting()
        self._gockpt_saves.refuse_locked()
        self._gockpt_closed = True
        if self._gockpt_saves.calls.is_inside:  # Orbax's threads could not end what was interrupted
            self._gockpt_saves.last.hear()
            return
        try:
            self._gockpt_saves.finish()
        finally:
            with self._gockpt_saves.calls.saving:
                self._gockpt_handler.begun.left.wait()
                try:
                    super().close()
                finally:
                    self._gockpt_session.close()


def _finish_saves(manager: "weakref.ref[GoCkptManager]") -> None:
    """The script ended without `close()`: its saves are committed all the same."""
    alive = manager()
    if alive is not None:
        try:
            alive.wait_until_finished()
        except Exception:
            _log.exception(
                "the last save in %s failed; earlier checkpoints are intact", alive.directory
            )
