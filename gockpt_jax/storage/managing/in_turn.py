"""One save is with Orbax at a time: which is begun now, which waits for it, which is left out."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import orbax.checkpoint as ocp

from gockpt_jax.errors import ProcessError
from gockpt_jax.storage.managing.arguments import as_they_are
from gockpt_jax.storage.managing.calls import Calls
from gockpt_jax.storage.managing.last_save import LastSave
from gockpt_jax.storage.managing.naming import Naming
from gockpt_jax.storage.managing.turn import Turn, told_of_turns
from gockpt_jax.storage.managing.waiting import WaitingRoom, WaitingSave
from gockpt_jax.storage.saving.commit import with_word_of_commits
from gockpt_jax.storage.saving.policies import arrange
from gockpt_jax.storage.saving.refused import refuse_save, refuse_unranked
from gockpt_jax.storage.saving.state_handler import StateHandler
from gockpt_jax.telemetry.report import SaveReport

_OTHER_LABELS = ("with different labels", "on")
_OTHER_VERSIONS = (
    "after different numbers of updates, so parts of several versions would have made one",
    "by",
)


class SavesInTurn:
    """The saves of one manager, from its `save` until it has been heard how they ended.

    Args:
      manager: Is asked for its policy.
      options: The user's.
      handler: Of the states, whose windows end at the saves.
      naming: Of items.

    Attributes:
      options: The user's, with which policies answer early, and saves tell how they go.
      calls: Who is in the middle of one.
      last: The save that is with Orbax.
    """

    def __init__(
        self, manager: Any, options: ocp.CheckpointManagerOptions, handler: StateHandler,
        naming: Naming,
    ):  # fmt: skip
        self._session = session = handler._gockpt_session
        self._manager = manager
        self._handler, self._log = handler, handler._gockpt_log
        self._naming = naming
        self._on_busy = session.options.on_busy
        self._answered = 0  # calls of `save` that have returned
        self._room = room = WaitingRoom(handler, naming, manager)
        self._turn = turn = Turn(session.processes)
        self.calls = Calls(session.lock)
        is_asynchronous = options.enable_async_checkpointing
        self.last = LastSave(manager, handler, turn, room, is_asynchronous=is_asynchronous)
        options = arrange(options, session, lambda: room.waiting, self._is_refused)
        if is_asynchronous and not options.read_only:
            options, handler.votes = with_word_of_commits(
                options, session.processes, handler.committed, self.calls.telling
            )
            if self._on_busy == "newest":
                options = told_of_turns(options, turn)
        self.options = options
        session.between_steps = self.give_turn
        session.after_steps = handler.begun.let_go

    def save(self, step: int, arguments: dict[str, Any], started_at: float) -> bool:
        """Saves now, or later, or not at all, as policy and `on_busy` say.

        Args:
          step: The label.
          arguments: Of `ocp.CheckpointManager.save`.
          started_at: When the trainer's call began, for the report.
        """
        accepted = self._save(step, arguments, started_at)
        self._answered += 1
        return accepted

    def _save(self, step: int, arguments: dict[str, Any], started_at: float) -> bool:
        session, last = self._session, self.last
        # Beside other processes the last save is asked how it ended where all of them do: in the
        # next accepted save, or in a wait. One that raised alone would be waited for.
        if last.is_unheard and not session.processes.several and not last.is_writing:
            last.hear()  # at once: that save may not have ended well
        self.give_turn(label=step)
        # The policy is asked once, before anything is made for a save.
        if not (arguments.get("force") or self._manager.should_save(step)):
            session.predictor.observe(session.version, step, accepted=False)
            session.surface_failure()
            return False
        self._agree_with_others(step)
        arguments = as_they_are(arguments | {"args": self._naming.name(arguments["args"])})
        ours = [item for item in arguments["args"].items() if self._naming.is_ours(*item)]
        session.predictor.takes_state = bool(ours)
        self._naming.refuse_ended_by_others(self._manager, [name for name, _ in ours])
        if not session.processes.several:
            # Beside other processes it fails at its commit, where all of them hear of it.
            self._refuse(arguments)
        busy = self._why_later(step, arguments)
        if busy is not None:
            return self._save_later(step, arguments, busy, started_at)
        accepted = last.begin(step, arguments, started_at)
        session.predictor.observe(session.version, step, accepted)
        if accepted:
            self._room.supersede(step)
        else:
            session.surface_failure()
        return accepted

    def _is_refused(self, label: int) -> bool:
        """Whether stock refuses a label without asking the policy: it is behind a newer save."""
        waiting = self.waiting
        accepted = (self.last.newest, None if waiting is None else waiting.step)
        return any(newest is not None and label <= newest for newest in accepted)

    def _agree_with_others(self, step: int) -> None:
        """Of several processes, one may ask alone whether a label would be saved.

        Raises:
          ProcessError: on all of them, if they save different labels, or after different updates.
        """
        predictor, processes = self._session.predictor, self._session.processes
        self._session.require_alike()
        if processes.several:
            version = self._session.version
            mine = predictor.found_by_asking(version, step)
            told = processes.gather("asked", f"{step} {version} {mine}")
            _require_one_save({index: text.split() for index, text in told.items()})
            predictor.agreed = mine if len(set(told.values())) == 1 else None

    def _refuse(self, arguments: Mapping[str, Any]) -> None:
        """Refuses a save that cannot be stored, or not be found again."""
        refuse_save(arguments, metrics_are_written=self.options.best_fn is not None)
        if len(self._manager.all_steps()) >= (self.options.max_to_keep or math.inf):
            refuse_unranked(arguments.get("metrics"), self.options)
        for name, args in arguments["args"].items():
            if self._naming.is_ours(name, args):
                self._handler.leaves_to_save(args)

    def _why_later(self, step: int, arguments: Mapping[str, Any]) -> str | None:
        """Why an accepted save is not made now; `None` if it is. One that waits goes before it."""
        if self._on_busy == "wait":
            return None
        # Forced saves and those before a preemption wait for the previous one, as in stock.
        if arguments.get("force") or self._manager.reached_preemption(step):
            return None
        busy = None
        if self.last.is_writing:
            busy = f"the save of step {self.last.step} was still being written"
        # One process may have heard of its end before another: they skip together.
        busy = self._session.processes.objection("busy", busy)
        if busy is None and (waiting := self.waiting) is not None:
            self._begin_next()  # the one before has ended everywhere, just before its turn
            busy = f"the save of step {waiting.step}, which had waited, has just begun"
        return busy

    def _save_later(
        self, step: int, arguments: Mapping[str, Any], busy: str, started_at: float
    ) -> bool:
        """Has a save wait for its turn, if it may; leaves it out if not, and says so."""
        session = self._session
        if self._on_busy == "newest":
            is_settled, why_not = False, None
            with self.last.attempt(step):
                why_not, is_settled = self._room.take(step, arguments), True
            if not is_settled:  # the attempt has failed, which is reported, and warned of
                session.predictor.observe(session.version, step, accepted=False)
                session.surface_failure()
                return False
            if why_not is None:
                session.predictor.observe(session.version, step, accepted=True)
                assert self.waiting is not None, "it has just been taken"
                self.waiting.pending.add_stall(started_at)
                return True
            busy = f"{busy}, and {why_not}"
        session.predictor.observe(session.version, step, accepted=True)
        session.abandon(f"its save was skipped: {busy}")
        secs = time.perf_counter() - started_at
        self._log.add(
            SaveReport(
                step=step, kind="skipped", reason=busy, window_steps=1,
                stall_secs=secs, barrier_secs=secs,
            )
        )  # fmt: skip
        return False

    # The save that waits.

    @property
    def waiting(self) -> WaitingSave | None:
        """An accepted save that Orbax does not know of yet."""
        return self._room.waiting

    def give_turn(self, label: int | None = None) -> None:
        """Gives the save that waits to Orbax if it has its turn; on every call of a step or `save`.

        Args:
          label: That `save` is called with; `None`: it is a step.

        Raises:
          StorageError: if the previous one has failed. The save that waits goes on waiting.
          ProcessError: if another process is gone. The save that waits is given up.
        """
        started_at, waiting = time.perf_counter(), self.waiting
        place = self._session.version, self._answered, label
        try:
            has_come = self._turn.has_come(place, anyone_waits=waiting is not None)
        except ProcessError as error:
            self._room.give_up(error)
            self.last.surface(error)
            return
        if waiting is None:
            return
        waiting.pending.add_stall(started_at)
        if self.last.is_unheard and not has_come:
            return
        # Another thread that has it waits for that save too, and may have begun it.
        if self.calls.saving.acquire(blocking=self._session.processes.several):
            try:
                if self.waiting is waiting:
                    self._begin_next()
            finally:
                self.calls.saving.release()

    def _begin_next(self) -> None:
        """Hears how the last save ended, and begins the one that waits."""
        if self.last.is_unheard:
            self.last.hear()
        if (waiting := self.waiting) is not None:
            self._begin(waiting)

    def _begin(self, waiting: WaitingSave) -> None:
        started_at, begun = time.perf_counter(), False
        self._session.known.clock.pause(self._session.version)  # what follows is no step
        try:
            self._room.leave(waiting)
            begun = self.last.begin(waiting.step, waiting.arguments, started_at)
        except BaseException as error:
            # An interrupt may have come before it left, or after Orbax had it.
            begun = self.waiting is waiting or self.last.is_with_orbax(waiting.step)
            if not begun:
                waiting.pending.failed(error)
            raise
        finally:
            self._room.leaving = None
            if not begun:
                waiting.release()

    @property
    def unlisted(self) -> list[int]:
        """Labels of accepted saves that stock may not list, if it is asked after this.

        Of the one that waits, and, but to Orbax itself, of the one that is given to it just now.
        """
        waiting = self.waiting
        leaving = None if self.calls.is_inside else self._room.leaving
        return [save.step for save in (waiting, leaving) if save is not None]

    @property
    def under_way(self) -> set[int]:
        """Labels of saves of which it has not been heard how they ended."""
        return {*self.unlisted, *([self.last.step] if self.last.is_unheard else [])}

    def is_to_be_finished(self, step: int) -> bool:
        """Whether the save of this label is under way, or one waits behind it."""
        return bool(self.unlisted) or self.last.is_with_orbax(step)

    def refuse_locked(self) -> None:
        """Refuses to wait where that would be for ever.

        Raises:
          RuntimeError: as `Calls.refuse_locked` says, if there is a save to wait for.
        """
        if self.unlisted or self.last.is_writing:
            self.calls.refuse_locked()

    def finish(self) -> None:
        """Waits for the last save, and for the one that waits behind it, whatever became of it.

        Raises:
          RuntimeError: if the user's own callback of that save waits.
        """
        self.calls.refuse_waiting()
        with self.calls.saving:
            try:
                self.last.hear()
            except Exception:  # an interrupt is not made to wait for another save
                self._finish_next()
                raise
            self._finish_next()

    def _finish_next(self) -> None:
        if (waiting := self.waiting) is not None:
            self._begin(waiting)
            self.last.hear()


def _require_one_save(told: Mapping[int, Sequence[str]]) -> None:
    """Refuses a save of which each process would write another part than the others think.

    Args:
      told: By each process: the label, and how many updates it has made.

    Raises:
      ProcessError: if they were not called with the same label, or not after the same update.
    """
    for n, (what, where) in enumerate((_OTHER_LABELS, _OTHER_VERSIONS)):
        if len({words[n] for words in told.values()}) > 1:
            said = ", ".join(f"{words[n]} {where} process {i}" for i, words in told.items())
            raise ProcessError(
                f"`save` was called {what}: {said}. Nothing was written, and earlier checkpoints "
                "are intact. All processes save the same label after the same update: look at what "
                "each of them counts, and from which checkpoint it has resumed."
            )
