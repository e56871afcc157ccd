"""One save is written at a time: how it begins, which one waits for it, and what became of it."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

from gockpt_jax import _compat
from gockpt_jax.errors import AuditError, ProcessError, ReplayError
from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.managing.arguments import as_they_are
from gockpt_jax.storage.managing.calls import Calls
from gockpt_jax.storage.managing.deleting import Deleter
from gockpt_jax.storage.managing.naming import Naming
from gockpt_jax.storage.managing.turn import Turn, told_of_turns
from gockpt_jax.storage.managing.waiting import WaitingRoom
from gockpt_jax.storage.saving.commit import with_word_of_commits
from gockpt_jax.storage.saving.handler import GoCkptHandler
from gockpt_jax.storage.saving.policies import arrange
from gockpt_jax.storage.saving.refused import refuse_save
from gockpt_jax.telemetry.report import SaveReport
from gockpt_jax.telemetry.save_record import PendingReport
from gockpt_jax.window.face import WindowFace
from gockpt_jax.window.failures import surface


class SavesInTurn(WindowFace, ocp.CheckpointManager):  # type: ignore[misc]  # Orbax is untyped.
    """A stock manager that tells how each of its saves ended, and in which one save may wait.

    Args:
      root: Of its checkpoints.
      options: The user's.
      handler: Of the states, whose windows end at the saves.
      naming: Of their items, by the registry of all handlers.
      **stock: Other arguments of `ocp.CheckpointManager`.
    """

    def __init__(
        self,
        root: Any,
        options: ocp.CheckpointManagerOptions,
        handler: GoCkptHandler,
        naming: Naming,
        **stock: Any,
    ):
        # Whether a save is being written, or has ended and nobody has asked yet how. It begins and
        # is asked at the same calls on every process.
        self._gockpt_unheard = False
        self._gockpt_was_dropped = False  # a step, by Orbax, when a wait for it was interrupted
        self._gockpt_handler = handler
        self._gockpt_naming = naming
        self._share_windows(handler)
        self._gockpt_waiting = waiting = WaitingRoom(handler, naming)
        self._gockpt_calls = Calls(self._gockpt_session.lock)
        self._gockpt_has_best = options.best_fn is not None
        session = self._gockpt_session
        session.predictor.sees_every_call = True
        session.host.directory = str(root)
        session.between_steps = self._hand_over
        self._gockpt_turn = Turn(session.processes)
        self._gockpt_commits_later = (
            bool(options.enable_async_checkpointing) and not options.read_only
        )
        options = arrange(options, session, lambda: waiting.occupant)
        if self._gockpt_commits_later:
            options, handler.votes = with_word_of_commits(
                options, session.processes, self._committed
            )
            if self._gockpt_window_options.on_busy == "newest":
                options = told_of_turns(options, self._gockpt_turn)
        with self._gockpt_calls.saving:
            super().__init__(root, options=options, handler_registry=naming.registry, **stock)
        self._gockpt_deleter = _compat.replace_deleter(
            self, lambda stock: Deleter(stock, self.directory, options)
        )

    def _save_in_turn(self, step: int, arguments: dict[str, Any], started_at: float) -> bool:
        """Saves now, or later, or not at all, as policy and `on_busy` say."""
        if self._may_raise_now and self._gockpt_unheard:
            self._hear_last_save()  # at once: that save may not have ended well
        self._hand_over()
        session, given = self._gockpt_session, arguments.get("args")
        # The policy is asked once, before anything is made for a save.
        if given is not None and not (arguments.get("force") or self.should_save(step)):
            session.predictor.observe(session.version, step, accepted=False)
            session.surface_failure()
            return False
        arguments = as_they_are(arguments | {"args": self._gockpt_naming.name(given)})
        if given is not None and not session.processes.several:
            # Beside other processes it fails at its commit, where all of them hear of it.
            refuse_save(arguments, self._look_at, metrics_are_written=self._gockpt_has_best)
        busy = self._why_busy(step, arguments)
        if busy is not None:
            return self._save_later(step, arguments, busy, started_at)
        before, accepted = self._gockpt_pending, False
        with self._attempt(step):  # the policy has been asked
            accepted = bool(super().save(step, **(arguments | {"force": True})))
            self._gockpt_unheard |= accepted
            pending = self._gockpt_pending
            if pending is not None and pending is not before:
                pending.returned(started_at)
                if not self._gockpt_commits_later:
                    pending.committed()
        session.predictor.observe(session.version, step, accepted)
        if accepted:
            self._gockpt_waiting.supersede(step)
        else:
            session.surface_failure()
        return accepted

    def _look_at(self, name: str, args: Any) -> None:
        """Refuses an item that cannot be stored, if our handler takes it."""
        if self._gockpt_naming.is_ours(name, args):
            self._gockpt_handler.leaves_to_save(args)

    @contextlib.contextmanager
    def _attempt(self, step: int) -> Iterator[None]:
        """While a save is begun. What the storage or a window is to blame for is surfaced."""
        with self._gockpt_session.lock:  # no step is made meanwhile, on another thread
            yield from self._attempted(step)

    def _attempted(self, step: int) -> Iterator[None]:
        before, begun = self._gockpt_pending, self._gockpt_handler.begun
        begun.wait_for_what_was_left()
        number = begun.number
        self._gockpt_deleter.make_way(step)
        self._gockpt_handler.label = step
        self._gockpt_turn.begin()
        try:
            yield
        except BaseException as error:
            pending = self._gockpt_pending
            if pending is not None and pending is not before:
                if self._is_with_orbax(step):  # which goes on, whatever has stopped `save`
                    self._gockpt_unheard = True
                    pending.returned(time.perf_counter())
                    raise
                pending.failed(error)
                begun.give_up(error)  # not the last one, in flight maybe
            if begun.number != number:
                begun.leave_directory()
            if self._gockpt_handler.votes is not None:
                self._gockpt_handler.votes.cancel()
            error = bucket.named(self.directory, step, error)
            if not isinstance(error, OSError | ReplayError | AuditError):
                raise  # no failure of the storage's: the caller's, or an interrupt
            surface(error, self._gockpt_window_options.on_save_error)
        finally:
            self._gockpt_session.end_save()  # a save that failed is tried again with a new seal

    def _is_with_orbax(self, step: int) -> bool:
        """Whether a save's commit has begun, as far as stock's manager tells."""
        return step in super().all_steps()

    # A save that finds the previous one still being written.

    def _why_busy(self, step: int, arguments: Mapping[str, Any]) -> str | None:
        """Why an accepted save is not made now; `None` if it is, or is not accepted."""
        if self._gockpt_window_options.on_busy == "wait" or arguments.get("args") is None:
            return None
        # Forced saves and those before a preemption wait for the previous one, as in stock.
        if arguments.get("force") or self.reached_preemption(step):
            return None
        busy, last = None, self._gockpt_pending
        if self._is_writing and last is not None:
            busy = f"the save of step {last.step} was still being written"
        # One process may have heard of its end before another: they skip together.
        busy = self._gockpt_session.processes.objection("busy", busy)
        if busy is None and (waiting := self._gockpt_waiting.occupant) is not None:
            self._begin_waiting()  # the one before has ended everywhere, just before its turn
            busy = f"the save of step {waiting.step}, which had waited, has just begun"
        return busy

    def _save_later(
        self, step: int, arguments: Mapping[str, Any], busy: str, started_at: float
    ) -> bool:
        """Has a save wait for its turn, if it may; leaves it out if not, and says so."""
        session, waits = self._gockpt_session, False
        if self._gockpt_window_options.on_busy == "newest":
            with self._attempt(step):
                why_not = self._gockpt_waiting.take(step, arguments)
                waits = why_not is None
                busy = busy if waits else f"{busy}, and {why_not}"
        session.predictor.observe(session.version, step, accepted=True)
        if waits:
            self._gockpt_waiting.occupied.pending.waits(started_at)
            return True
        session.abandon(f"its save was skipped: {busy}")
        secs = time.perf_counter() - started_at
        self._gockpt_log.add(
            SaveReport(
                step=step, kind="skipped", reason=busy, window_steps=1,
                stall_secs=secs, barrier_secs=secs,
            )
        )  # fmt: skip
        return False

    def _hand_over(self) -> None:
        """Gives the save that waits to Orbax if it has its turn; on every call of a step or `save`.

        Raises:
          StorageError: if the previous one has failed. The save that waits goes on waiting.
          ProcessError: if another process is gone. The save that waits is given up.
        """
        started_at, waiting = time.perf_counter(), self._gockpt_waiting.occupant
        try:
            has_come = self._gockpt_turn.has_come(anyone_waits=waiting is not None)
        except ProcessError as error:
            self._gockpt_waiting.give_up(error)
            surface(error, self._gockpt_window_options.on_save_error)
            return
        if waiting is None:
            return
        waiting.pending.waits(started_at)
        if self._gockpt_unheard and not has_come:
            return
        # Another thread that has it waits for that save too, and may have begun it.
        if self._gockpt_calls.saving.acquire(blocking=self._gockpt_session.processes.several):
            try:
                if self._gockpt_waiting.occupant is waiting:
                    self._begin_waiting()
            finally:
                self._gockpt_calls.saving.release()

    def _begin_waiting(self) -> None:
        """Hears how the last save ended, and begins the one that waits."""
        if self._gockpt_unheard:
            self._hear_last_save()
        if self._gockpt_waiting.occupant is not None:
            self._write_waiting()

    def _write_waiting(self) -> None:
        started_at = time.perf_counter()
        self._gockpt_session.planner.clock.pause()  # what follows is no step
        waiting, begun = self._gockpt_waiting.leave(), False
        try:
            with self._attempt(waiting.step):
                begun = bool(super().save(waiting.step, force=True, **waiting.arguments))
        except BaseException as error:
            begun = self._is_with_orbax(waiting.step)
            if not begun:
                waiting.pending.failed(error)
            raise
        finally:
            if not begun:
                waiting.release()
        self._gockpt_unheard = True
        waiting.pending.returned(started_at)

    def is_saving_in_progress(self) -> bool:
        """Whether a save is being written, or waits to be."""
        return self._is_writing or self._gockpt_waiting.occupant is not None

    @property
    def _is_writing(self) -> bool:
        """Whether a save is being written; Orbax goes on to say so after one that it refused."""
        return self._gockpt_unheard and bool(super().is_saving_in_progress())

    def latest_step(self) -> int | None:
        """The label of the newest save that has been accepted, as stock gives it."""
        latest: int | None = super().latest_step()
        waiting = self._gockpt_waiting.occupant
        return latest if waiting is None else max(waiting.step, latest or 0)

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Labels of all saves that have been accepted and not been deleted, as stock gives them."""
        waiting = self._gockpt_waiting.occupant
        steps = list(super().all_steps(read))
        return steps if waiting is None else sorted([*steps, waiting.step])

    def delete(self, step: int) -> None:
        """Deletes a checkpoint, as stock does; the save of it that is under way is waited for.

        So is one that waits behind another (`on_busy="newest"`), whichever is deleted.
        """
        self._gockpt_calls.refuse_inside(f"deletion of step {step}")
        is_being_written = self._gockpt_unheard and self._gockpt_handler.label == step
        if is_being_written or self._gockpt_waiting.occupant is not None:
            self._finish_saves()
        super().delete(step)

    # The end of saves.

    def wait_until_finished(self) -> None:
        """Waits until all accepted saves are visible; raises what went wrong with them.

        Raises:
          StorageError: if the storage refused one. Whatever went wrong with it, on another thread,
            is raised here or by the next call, or warned of as `on_save_error` says.
        """
        if self._gockpt_calls.is_inside:  # what is to be written next, and windows, have to wait
            self._hear_last_save()
            return
        self._finish_saves()
        self._gockpt_session.surface_failure()

    def _finish_saves(self) -> None:
        """Waits for the last save, and for the one that waits behind it, whatever became of it."""
        with self._gockpt_calls.saving:
            try:
                self._hear_last_save()
            except Exception:  # an interrupt is not made to wait for another save
                self._finish_waiting()
                raise
            self._finish_waiting()

    def _finish_waiting(self) -> None:
        if self._gockpt_waiting.occupant is not None:
            self._write_waiting()
            self._hear_last_save()

    def _hear_last_save(self) -> None:
        """Waits for the save that is being written, and raises what went wrong with it."""
        commit = _compat.commit_thread(self)
        try:
            super().wait_until_finished()
        except BaseException as error:
            if commit is None or error is not commit.exception:  # an interrupt: the save goes on
                self._gockpt_was_dropped = True
                raise
            self._gockpt_unheard = False
            pending, step = self._gockpt_pending, self._gockpt_handler.label
            if pending is not None:
                pending.failed(error)
                step = pending.step
            with contextlib.suppress(OSError):  # the directory may be gone
                self.reload()  # Orbax has dropped the steps that this save was to replace
            votes = self._gockpt_handler.votes
            if votes is not None and votes.failure not in (None, error):
                votes.failure.__cause__ = error
                error = votes.failure  # what the other processes raise
            if self._gockpt_session.processes.is_one_missing:
                self._gockpt_waiting.give_up(error)  # it would wait for that one too
            self._gockpt_handler.begun.give_back()
            error = bucket.named(self.directory, step, error)
            surface(error, self._gockpt_window_options.on_save_error)
        self._gockpt_unheard = False
        if self._gockpt_was_dropped:
            self.reload()
            self._gockpt_was_dropped = False
        self._committed()

    def _committed(self) -> None:
        """The last save is visible, if there is one and it has not failed."""
        if self._gockpt_pending is not None:
            self._gockpt_pending.committed()

    @property
    def _gockpt_pending(self) -> PendingReport | None:
        return self._gockpt_handler.pending

    @property
    def _may_raise_now(self) -> bool:
        """Whether the last save has ended, and may be asked how.

        Beside other processes it is asked where all of them do: in the next accepted save, or in a
        wait. One that raised alone would be waited for.
        """
        return not self._gockpt_session.processes.several and not self._is_writing
