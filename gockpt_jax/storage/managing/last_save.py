"""The save that Orbax was given last: how it begins, whether it is being written, how it ended."""

import collections
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import orbax.checkpoint as ocp

from gockpt_jax import locks
from gockpt_jax.errors import AuditError, DeviceMemoryError, ReplayError, warn
from gockpt_jax.storage.files import _compat as of_orbax
from gockpt_jax.storage.files import storage_errors
from gockpt_jax.storage.managing.deleting import Deleter
from gockpt_jax.storage.managing.turn import Turn
from gockpt_jax.storage.managing.waiting import WaitingRoom
from gockpt_jax.storage.saving.state_handler import StateHandler
from gockpt_jax.telemetry.save_record import PendingReport
from gockpt_jax.window.failures import named, surface

_log = logging.getLogger("gockpt_jax")

Stock = ocp.CheckpointManager
"""`Stock.save(manager)` is what stock does, whatever that manager's own `save` adds to it."""

_FAILURES = OSError | ReplayError | AuditError | DeviceMemoryError
"""Of a save itself: of the storage, of a window, of what the device has room for."""

_attempts: collections.Counter[str] = collections.Counter()


class LastSave:
    """One save is with Orbax at a time; whoever calls holds `Calls.saving`, or is inside.

    Args:
      manager: Of the saves.
      handler: Of their states; knows what has begun of a save that goes to Orbax.
      turn: Is told that one begins.
      room: Who waits there cannot be written any more where a process is gone.
      is_asynchronous: Whether saves are written when `save` has returned.

    Attributes:
      step: Its label.
      is_unheard: Whether it is being written, or has ended and nobody has asked yet how. It begins
        and is asked at the same calls on every process.
      deleter: Of the manager's checkpoints, once the manager is there.
    """

    deleter: Deleter

    def __init__(
        self, manager: Any, handler: StateHandler, turn: Turn, room: WaitingRoom, *,
        is_asynchronous: bool,
    ):  # fmt: skip
        self.step = -1
        self.is_unheard = False
        self._pending: PendingReport | None = None  # of its tree of arrays, if it has one
        self._was_dropped = False  # a step, by Orbax, when a wait for it was interrupted
        self._manager = manager
        self._handler = handler
        self._turn = turn
        self._room = room
        self._session, self._log = handler._gockpt_session, handler._gockpt_log
        self._is_asynchronous = is_asynchronous

    @property
    def is_writing(self) -> bool:
        """Whether it is being written, whatever an interrupted wait has Orbax say of it.

        Orbax's thread that ends it runs then, and hears what has failed of the writes.
        """
        commit = of_orbax.commit_thread(self._manager)
        return commit is not None and locks.is_running(commit)

    @property
    def newest(self) -> int | None:
        """The newest label that Orbax knows a save of."""
        newest: int | None = Stock.latest_step(self._manager)
        return newest

    def begin(self, step: int, arguments: Mapping[str, Any], started_at: float) -> bool:
        """Has Orbax save; the policy has been asked.

        Args:
          step: The label.
          arguments: Of `ocp.CheckpointManager.save`.
          started_at: When the trainer's call began, for the report.

        Returns:
          Whether it does; `False` where it failed, which is warned of.
        """
        before, begun = self._log.pending, False
        with self.attempt(step):
            with self._handler.begun.held_back(self._is_asynchronous):
                begun = bool(Stock.save(self._manager, step, **{**arguments, "force": True}))
            if self._session.version == 0:  # no step follows
                self._handler.begun.let_go()
            if (pending := self._now_with_orbax(step, before)) is not None:
                pending.returned(started_at)
                if not self._is_asynchronous:
                    pending.committed()
        return begun

    def _now_with_orbax(self, step: int, before: PendingReport | None) -> PendingReport | None:
        """Orbax has this save now; its report is the log's, if that is no more the one before."""
        self.step, self.is_unheard = step, True
        self._pending = None if self._log.pending is before else self._log.pending
        return self._pending

    @contextlib.contextmanager
    def attempt(self, step: int) -> Iterator[None]:
        """While a save is begun. What the storage or a window is to blame for is surfaced."""
        # No step is made meanwhile on another thread; another manager's save may be.
        with self._session.lock, of_orbax.own_operation(self._new_operation()):
            before, begun = self._log.pending, self._handler.begun
            begun.expect(step)
            begun.left.wait(step)
            self.deleter.make_way(step)
            self._turn.saving_here()
            commit = self._commit()
            was_listed = step in Stock.all_steps(self._manager)
            try:
                yield
            except BaseException as error:
                if self._goes_on(step, commit, was_listed=was_listed):
                    begun.let_go()
                    pending = self._now_with_orbax(step, before)  # whatever has stopped `save`
                    if pending is not None:
                        pending.returned(time.perf_counter())
                    raise
                pending = None if self._log.pending is before else self._log.pending
                try:
                    self._give_up(error, pending)
                finally:
                    if not was_listed:
                        self._unlist(step)
                found = self._named(step, error)
                if not isinstance(found, _FAILURES):
                    raise  # the caller's, or an interrupt
                self.surface(found)
            finally:
                self._session.end_save()  # a save that failed is tried again with a new seal

    def _new_operation(self) -> str:
        """Named alike on all that write its directory: attempts are made on all of them."""
        together = self._handler.writers
        _attempts[together] += 1
        return f"{together}_{_attempts[together]}"

    def is_with_orbax(self, step: int) -> bool:
        """Whether this is the save that Orbax has, and nobody has asked yet how it ended."""
        return self.is_unheard and self.step == step

    def _goes_on(self, step: int, commit_before: Any, *, was_listed: bool) -> bool:
        """Whether Orbax brings a save to its end: somebody waits for what is written."""
        if self._is_asynchronous:
            return of_orbax.commit_thread(self._manager) is not commit_before
        return not was_listed and step in Stock.all_steps(self._manager)

    def _commit(self) -> Any | None:
        """Orbax's thread that ends the last save: one for which it can wait, or that has ended."""
        commit = of_orbax.commit_thread(self._manager)
        if commit is not None:
            locks.wait_where_join_does_not(commit)
        return commit

    def _unlist(self, step: int) -> None:
        """Of a save that Orbax had listed already, and that nobody would have ended."""
        # Several processes list alike: their job is over, where one of them was interrupted.
        if not self._session.processes.several and step in Stock.all_steps(self._manager):
            with contextlib.suppress(OSError):
                self._manager.reload()

    def _give_up(self, error: BaseException, pending: PendingReport | None) -> None:
        """The save that was attempted does not begin; its directory is being made, maybe.

        Args:
          error: Why.
          pending: Its report; `None` if its state has not been taken.
        """
        begun, votes = self._handler.begun, self._handler.votes
        is_alone = self._is_asynchronous and not self._session.processes.several
        wait = self._wait_for_writes if is_alone and not self.is_writing else None
        with begun.left.leaving_writes(wait, error):
            try:
                if pending is not None:
                    pending.failed(error)
                    begun.give_up(error)  # not the last one, in flight maybe
                begun.left.leave_directory(error)
                if votes is not None:
                    votes.cancel()
            finally:
                begun.let_go()

    def _wait_for_writes(self) -> None:
        """Waits for what Orbax writes, and raises why it failed; where nobody else hears of it."""
        if (writes := of_orbax.writes_thread(self._manager)) is not None:
            locks.wait_where_join_does_not(writes)
        of_orbax.wait_for_writes(self._manager)

    def hear(self) -> None:
        """Waits for it if it is being written, and raises what went wrong with it."""
        self._handler.begun.let_go()
        commit = self._commit()
        try:
            Stock.wait_until_finished(self._manager)
        except BaseException as error:
            if commit is None or error is not commit.exception:  # an interrupt: the save goes on
                self._was_dropped = True
                raise
            self.is_unheard = False
            self._has_failed(error)
        self.is_unheard = False
        if self._was_dropped:
            self._manager.reload()
            self._was_dropped = False
        self._handler.committed()
        self._tell_of_deletions()

    def _tell_of_deletions(self) -> None:
        """Warns of old checkpoints that this save's commit was to delete, and are not gone."""
        failure, self.deleter.failure = self.deleter.failure, None
        if failure is None:
            return
        told = (
            f"the save of step {self.step} is complete, but not all checkpoints that are not to be "
            f"kept could be deleted: {failure!r}. Look at the storage, and delete what is left of "
            f"them in {self._manager.directory} yourself, while no save is under way."
        )
        if self._session.processes.several:  # no error, whatever the user makes of warnings
            _log.warning("%s", told)
            return
        with contextlib.suppress(OSError):  # what is still listed goes with the next save
            self._manager.reload()
        warn(told, UserWarning)

    def _has_failed(self, error: BaseException) -> None:
        if self._pending is not None:
            self._pending.failed(error)
        with contextlib.suppress(OSError):  # the directory may be gone
            self._manager.reload()  # Orbax has dropped the steps that this save was to replace
        if (votes := self._handler.votes) is not None:
            # What the other processes raise; the next save may be one that nobody votes on.
            failure, votes.failure = votes.failure, None
            if failure not in (None, error):
                failure.__cause__ = error
                error = failure
        if self._session.processes.is_one_missing:
            self._room.give_up(error)  # it would wait for that one too
        self._handler.begun.give_up(error)
        self.surface(self._named(self.step, error))

    def _named(self, step: int, error: BaseException) -> BaseException:
        """The error to raise for a failed save: whose failure it is, and what to do."""
        return named(step, storage_errors.named(self._manager.directory, step, error))

    def surface(self, error: BaseException) -> None:
        """Raises what went wrong with a save, or warns of it, as the user has chosen."""
        surface(error, self._session.options.on_save_error)
