"""`GoCkptManager`: an `ocp.CheckpointManager` whose saves leave the device over several steps."""

import contextlib
import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax import _compat
from gockpt_jax.errors import AuditError, ReplayError
from gockpt_jax.options import WindowOptions
from gockpt_jax.storage import arguments, bucket, resume
from gockpt_jax.storage.commit import CommitVotes, make_root, never_draining
from gockpt_jax.storage.handler import GoCkptHandler
from gockpt_jax.storage.layout import default_layout
from gockpt_jax.storage.policies import arrange
from gockpt_jax.storage.restore import GoCkptRestore
from gockpt_jax.telemetry.report import PendingReport, SaveReport
from gockpt_jax.window.face import WindowFace
from gockpt_jax.window.failures import surface
from gockpt_jax.window.processes import Processes

_log = logging.getLogger("gockpt_jax")


class GoCkptManager(WindowFace, ocp.CheckpointManager):  # type: ignore[misc]  # Orbax is untyped.
    """A checkpoint manager that takes the state over the K steps that end at the save step.

    A stock manager in every other respect: retention, metrics, `Composite` arguments, stock save
    and restore arguments, preemption. What it writes is an ordinary Orbax checkpoint, whose item is
    named `state` unless the user names it.

    Args:
      directory: Where the checkpoints are.
      options: As in `ocp.CheckpointManager`.
      window: How the state leaves the device.
      metadata: As in `ocp.CheckpointManager`.
      logger: As in `ocp.CheckpointManager`.
      handler_registry: Handlers of further items, as in `ocp.CheckpointManager`.
      item_names: Taken for the sake of loops that give it; items may have any name without it.
      pytree_options: Keywords of `ocp.PyTreeCheckpointHandler` for the state (`use_ocdbt`, ...) and
        of the library's writer (`chunk_byte_size`). On a local disk the state is written as plain
        files without compression, which is fastest there, and elsewhere as stock does; give
        `{"use_ocdbt": True, "use_compression": True}` for stock's layout everywhere.

    Raises:
      TypeError: if `window` is not a `WindowOptions`.

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
        *,
        options: ocp.CheckpointManagerOptions | None = None,
        window: WindowOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        logger: Any = None,
        handler_registry: Any = None,
        item_names: Sequence[str] | None = None,
        pytree_options: Mapping[str, Any] | None = None,
    ):
        del item_names  # stock and a registry do not go together with it
        bucket.prepare(directory)
        options = ocp.CheckpointManagerOptions() if options is None else options
        self._gockpt_options = options
        self._gockpt_closed = False
        self._gockpt_unheard = False  # whether nobody has asked yet how the last save ended
        self._gockpt_looked = False  # into a directory that has no step of ours
        # Inside `__init__`, `save` and `close`, where a window's failure waits.
        self._gockpt_quiet = True
        processes = Processes(options.multiprocessing_options.active_processes)
        if processes.several and not options.read_only:
            options = never_draining(options, processes)
            make_root(arguments.absolute(directory), self._gockpt_options, options, processes)
        handler = GoCkptHandler(
            window=window,
            processes=processes,
            **{
                **default_layout(str(directory)),
                "multiprocessing_options": options.multiprocessing_options,
                **(pytree_options or {}),
            },
        )
        self._gockpt_handler = handler
        self._share_windows(handler)
        self._gockpt_session.predictor.sees_every_call = True
        self._gockpt_session.host.directory = str(arguments.absolute(directory))
        handler.has_manager = True
        self._gockpt_commits_later = (
            bool(options.enable_async_checkpointing) and not options.read_only
        )
        super().__init__(
            arguments.absolute(directory),
            options=self._at_commits(arrange(options, self._gockpt_session)),
            metadata=metadata,
            logger=logger,
            handler_registry=arguments.registry(handler_registry, self._gockpt_handler),
        )
        self._gockpt_quiet = False
        _compat.before_shutdown(functools.partial(_finish_last_save, weakref.ref(self)))

    # Saving and restoring.

    def save(self, step: int, *args: Any, **kwargs: Any) -> bool:
        """Saves if the policy says so; arguments and result are those of `ocp.CheckpointManager`.

        A bare `args=GoCkptSave(state)` is saved as item `state`.

        Raises:
          HostBudgetError: if the host budget cannot hold the state.
          StorageError: if the storage refuses this save, or has refused the one before.
          RuntimeError: if the manager is closed.
          TypeError: if the state is not given as `args`, or the label is no integer.
          ValueError: if the label is negative, or the state has been donated to a later step.
        """
        started_at = time.perf_counter()
        step = arguments.as_label(step)
        if args or "items" in kwargs:
            raise TypeError(
                "`save` takes the state by name, as in `save(step, args=GoCkptSave(state))`; got "
                f"a `{type(args[0] if args else kwargs['items']).__name__}` by position."
            )
        if self._gockpt_closed:
            raise RuntimeError(f"save of step {step}: the manager is closed. Save before `close`.")
        if "args" in kwargs:
            kwargs["args"] = arguments.as_composite(kwargs["args"])
        self._gockpt_handler.label = step
        before = self._gockpt_pending
        if self._may_raise_now and self._gockpt_unheard:
            self.wait_until_finished()  # at once: that save may not have ended well
        if not kwargs.get("force") and self._skips(step, started_at):
            return False
        self._gockpt_quiet = True
        try:
            accepted = bool(super().save(step, **kwargs))
        except BaseException as error:
            pending = self._gockpt_pending
            if pending is not None and pending is not before:
                pending.failed(error)
            if self._gockpt_handler.votes is not None:
                self._gockpt_handler.votes.cancel()
            error = bucket.named(self.directory, step, error)
            if not isinstance(error, OSError | ReplayError | AuditError):
                raise  # no failure of the storage's: the caller's, or an interrupt
            self._surface(error)
            accepted = False
        finally:
            self._gockpt_session.end_save()  # a save that failed is tried again with a new seal
            self._gockpt_quiet = False
        self._gockpt_session.predictor.observe(self._gockpt_session.version, step, accepted)
        pending = self._gockpt_pending
        if pending is not None and pending is not before:
            self._gockpt_unheard = True
            pending.returned(started_at)
            if not self._gockpt_commits_later:
                pending.committed()
        if not accepted:
            self._gockpt_session.surface_failure()
        return accepted

    def restore(self, step: int | None, *args: Any, verify: bool = False, **kwargs: Any) -> Any:
        """Restores a step; arguments and result are those of `ocp.CheckpointManager`.

        A bare `args=GoCkptRestore(target)`, or none, gives the item `state` itself. A checkpoint
        that a stock manager wrote without naming its item restores too.

        Args:
          step: The label; `None`: the newest one.
          *args: As in `ocp.CheckpointManager`.
          verify: Whether to re-read all trees of the step first, and compare them with the
            checksums made before they were written.
          **kwargs: As in `ocp.CheckpointManager`.

        Raises:
          NoCheckpointError: if there is no such step or item; says what there is.
          TargetError: if checkpoint and target do not fit together; names all leaves.
          VerifyError: if `verify` and the checkpoint is not what was written.
        """
        self._gockpt_session.abandon("a checkpoint was restored")
        self._wait_for_last_save()
        wanted = kwargs.get("args")
        root = epath.Path(kwargs.get("directory") or self.directory)
        if step is None and not kwargs.get("directory"):
            step = super().latest_step()
        if step is None and not kwargs.get("directory"):
            raise resume.nothing_in(root)
        if step is not None:
            path = arguments.step_path(root, step, self._gockpt_options)
            items = resume.items_of(path, root)
            if verify:
                resume.require_whole_step(path)
            if isinstance(wanted, ocp.args.Composite):
                return super().restore(step, *args, **kwargs)
            if "default" in items:
                return self._restore_unnamed(root, step, wanted)
            if wanted is not None and arguments.ITEM not in items:
                raise resume.no_item(path, arguments.ITEM, items)
        if wanted is not None:
            kwargs["args"] = arguments.as_composite(wanted)
        restored = super().restore(step, *args, **kwargs)
        return arguments.only_item(restored, asked_for=wanted is not None)

    def _wait_for_last_save(self) -> None:
        """As stock does before it restores; a window's failure is no matter of this save."""
        quiet, self._gockpt_quiet = self._gockpt_quiet, True
        try:
            self.wait_until_finished()
        finally:
            self._gockpt_quiet = quiet

    def latest_step(self) -> int | None:
        """The newest whole checkpoint's label; `None` where training has not saved one yet.

        Raises:
          NoCheckpointError: if the directory holds checkpoints, but none of this manager: a loop
            would start anew beside them. Saves that never ended are only logged.
        """
        latest: int | None = super().latest_step()
        if latest is None and not self._gockpt_quiet and not self._gockpt_looked:
            resume.refuse_fresh_start(self.directory)
            self._gockpt_looked = True  # what this manager saves later is no surprise
        return latest

    def _restore_unnamed(self, root: Any, step: int, wanted: Any) -> Any:
        """Restores what a stock manager saved without a name, with a stock manager.

        A manager is bound to named or to unnamed items by the first it sees, so this one must not
        see it.
        """
        options = dataclasses.replace(
            self._gockpt_options, read_only=True, async_options=None, create=False
        )
        with ocp.CheckpointManager(root, options=options) as stock:
            args = wanted.as_stock() if isinstance(wanted, GoCkptRestore) else wanted
            return stock.restore(step, args=args)

    def item_metadata(self, step: int) -> Any:
        """Shapes and dtypes of a step, as stock gives them for the same arguments."""
        return arguments.only_item(super().item_metadata(step), asked_for=False)

    def wait_until_finished(self) -> None:
        """Waits until the last save is visible; raises what went wrong with it.

        Raises:
          StorageError: if the storage refused it. Whatever went wrong with it, on another thread,
            is raised here or by the next call, or warned of as `on_save_error` says.
        """
        self._gockpt_unheard = False
        try:
            super().wait_until_finished()
        except BaseException as error:
            if self._gockpt_pending is not None:
                self._gockpt_pending.failed(error)
            with contextlib.suppress(OSError):  # the directory may be gone
                self.reload()  # Orbax has dropped the steps that this save was to replace
            votes = self._gockpt_handler.votes
            if votes is not None and votes.failure not in (None, error):
                votes.failure.__cause__ = error
                error = votes.failure  # what the other processes raise
            self._surface(error)
        if self._gockpt_pending is not None:
            self._gockpt_pending.committed()
        if not self._gockpt_quiet:
            self._gockpt_session.surface_failure()

    def close(self) -> None:
        """Waits for the last save, drops an open window and ends the worker thread."""
        self._gockpt_quiet = self._gockpt_closed = True
        try:
            super().close()
        finally:
            self._gockpt_session.close()

    def _surface(self, error: BaseException) -> None:
        """Raises a failed save's error under its name, or warns of it."""
        self._gockpt_handler.give_back()
        error = bucket.named(self.directory, self._gockpt_handler.label, error)
        surface(error, self._gockpt_window_options.on_save_error)

    @property
    def _gockpt_pending(self) -> PendingReport | None:
        return self._gockpt_handler.pending

    def _skips(self, step: int, started_at: float) -> bool:
        """Whether a save is left out, for the previous one is still being written."""
        if self._gockpt_window_options.on_busy != "skip" or self._gockpt_closed:
            return False
        session, last = self._gockpt_session, self._gockpt_pending
        if not self.should_save(step) or self.reached_preemption(step):
            return False
        busy = None
        if self.is_saving_in_progress() and last is not None:
            busy = f"the save of step {last.step} was still being written"
        # One process may have heard of its end before another: they skip together.
        busy = session.processes.objection("busy", busy)
        if busy is None:
            return False
        session.abandon(f"its save was skipped: {busy}")
        session.predictor.observe(session.version, step, accepted=True)
        secs = time.perf_counter() - started_at
        self._gockpt_log.add(
            SaveReport(
                step=step, kind="skipped", reason=busy, window_steps=1,
                stall_secs=secs, barrier_secs=secs,
            )
        )  # fmt: skip
        return True

    @property
    def _may_raise_now(self) -> bool:
        """Whether the last save has ended, and may be asked how.

        Beside other processes it is asked where all of them do: in the next accepted save, or in a
        wait. One that raised alone would be waited for.
        """
        return not self._gockpt_session.processes.several and not self.is_saving_in_progress()

    def _at_commits(self, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManagerOptions:
        """The user's options, with a word to us after each commit, and a vote before it."""
        if not self._gockpt_commits_later:
            return options
        async_options = options.async_options or ocp.options.AsyncOptions()
        users = async_options.post_finalization_callback

        def committed() -> None:
            if self._gockpt_pending is not None:
                self._gockpt_pending.committed()

        def finalized() -> None:  # on the primary process alone
            committed()
            if users is not None:
                users()

        told = dataclasses.replace(async_options, post_finalization_callback=finalized)
        processes = self._gockpt_session.processes
        if processes.several and async_options.barrier_sync_fn is None:
            self._gockpt_handler.votes = CommitVotes(processes, committed)
            told = dataclasses.replace(told, barrier_sync_fn=self._gockpt_handler.votes)
        return dataclasses.replace(options, async_options=told)


def _finish_last_save(manager: "weakref.ref[GoCkptManager]") -> None:
    """The script ended without `close()`: its last save is committed all the same."""
    alive = manager()
    if alive is not None:
        try:
            alive.wait_until_finished()
        except Exception:
            _log.exception("the last save failed")
