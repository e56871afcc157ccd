"""The window that is open, if one is, and the ways for it to end.

It is *sealed* if its save comes: that takes what has left. It is *abandoned* if its save is not to
come, or not of these steps. It is *given up* if something fails in it: alone, that is to abandon
it; beside other processes they go on, this one runs the armed steps with them, and takes a snapshot
at the seal.

What has failed on a worker thread is told at the next call, whichever way it has ended. Beside
other processes nothing is raised between two saves, for they would wait in vain: the window's save
fails, on all of them, and if that does not come, it is only logged.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence

import jax

from gockpt_jax.checks import counted
from gockpt_jax.errors import ProcessError, is_out_of_memory
from gockpt_jax.options import WindowOptions
from gockpt_jax.telemetry import events
from gockpt_jax.window.failures import surface, window_failed
from gockpt_jax.window.open_window import OpenWindow
from gockpt_jax.window.processes import Processes

_log = logging.getLogger("gockpt_jax")

_MOST_DOUBLINGS = 6
"""Of the saves without a window for which a device had no room again and again: 63 at the most."""

_NONE: tuple[int, OpenWindow | None, Sequence[jax.Array]] = (-1, None, ())


class CurrentWindow:
    """One window is open at a time, or none; whoever changes that holds the session's lock.

    Args:
      options: The user's.
      processes: Those that open it together.

    Attributes:
      window: The one that is open; a signal handler may close it between any two lines.
      why_none: Why the next save has none; `None`: it has not been foreseen.
      sealed_version: Of the last save. None opens at it: K is at most the distance between saves.
      failure: What has failed in one that has ended, and nobody has been told of.
    """

    def __init__(self, options: WindowOptions, processes: Processes):
        self.window: OpenWindow | None = None
        self.why_none: str | None = None
        self.sealed_version = -1
        self.failure: BaseException | None = None
        self._in_vain = _NONE  # of the first call in vain, with what the step before had returned
        self._several = processes.several
        self._none_for = -1  # the version of the last save that is to have none for want of room
        self._why_none_for = ""
        self._without_room = 0  # windows in a row for which a device had none
        self._left_out = 0  # saves that come before the next window is tried
        self._on_save_error = options.on_save_error

    def open(self, found: OpenWindow | str | None) -> None:
        """Takes what the opener has found: a window, or why there is none, if it is near."""
        if isinstance(found, str):
            self.why_none = found
        else:
            self.window = found

    @property
    def in_my_step(self) -> OpenWindow | None:
        """The open window, if this thread's update is under way in it."""
        window = self.window
        here = window is not None and window.stepping == threading.get_ident()
        return window if here else None

    def is_due(self, version: int) -> bool:
        """Whether a save of this version is made from it."""
        window = self.window
        return window is not None and window.target == version and window.is_sound

    # Its ends.

    def to_seal(self, version: int) -> OpenWindow | None:
        """The window that a save ends; one that is not for this version, or not sound, is over.

        It stays open until somebody has it: call `sealed` then.

        Raises:
          ReplayError: beside other processes, if it is this save's and has failed here.
        """
        self.sealed_version = version
        self._in_vain = _NONE  # the others' is over, too
        window = self.window
        if window is None or self.is_due(version):
            return window
        steps = window.target - version
        early = f"the save came {counted(steps, 'step')} early"
        self.abandon(window.given_up or early)
        if self._several and steps == 0 and window.error is not None:
            surface(window_failed(window.error), self._on_save_error)
        return None

    def sealed(self) -> None:
        """A save has the window now."""
        if self.window is not None:
            self._without_room = 0
        self.window = None

    def abandon(self, reason: str) -> None:
        """Closes it without a checkpoint; earlier ones are untouched."""
        self._in_vain = _NONE
        window = self.window
        if window is None:
            return
        window.drop()
        if window.error is not None:
            reason = f"it failed: {window.error!r}"
            self.failure = None if self._several else window.error
        self.window = None
        _tell(window, "abandoned", reason)
        self.why_none = f"its window was abandoned: {reason}"

    def had_no_room(self, target: int) -> None:
        """A device had no room for the window of that version's save. Alone; others' stay open.

        The first such is tried again at the next save, with a smaller budget; but trying takes long
        where an allocator waits before it fails. So behind each more there are twice as many saves
        without.
        """
        self._none_for, self._why_none_for = target, "a device had no room for its window"
        self._left_out = 2**self._without_room - 1
        self._without_room = min(self._without_room + 1, _MOST_DOUBLINGS)

    def leaves_out(self, target: int) -> bool:
        """Whether that version's save has no window, for want of room; counts such saves."""
        if target != self._none_for:
            if self._left_out == 0:
                return False
            left_out = counted(self._left_out, "save")
            self._none_for, self._left_out = target, self._left_out - 1
            self.why_none = self._why_none_for = (
                f"a device had no room for the last {self._without_room} windows, so the next one "
                f"is tried after {left_out} without; give saves less of it (`device_budget_bytes`)"
            )
        self.why_none = self.why_none or self._why_none_for  # a save before it took the reason
        return True

    def abandon_in_vain(self, reason: str, version: int) -> None:
        """Closes it for a call that may come to nothing: beside others, it is made again there.

        Args:
          reason: Why.
          version: Of the state that the call was made with.
        """
        window, in_vain = self.window, self._in_vain
        state = () if window is None else window.state
        self.abandon(reason)
        if self._several and window is not None:
            self._in_vain = in_vain if in_vain[0] == version else (version, window, state)

    def take_up_again(self, version: int) -> None:
        """Goes on beside the others where a call has come to nothing here: they are in the window.

        Of what was made for it nothing is left, so this process's part is given up.
        """
        made_with, window, state = self._in_vain
        if made_with != version:
            self._in_vain = _NONE  # nothing holds that state any more
            return
        if self.window is not None or window is None:
            return
        window.stepping = None
        window.state = state  # whether the loop has replaced some of it is seen as elsewhere
        if window.given_up is None:
            window.give_up("a call of the step came to nothing")
        self.window = window

    def abandon_interrupted(self) -> None:
        """Closes it if the step before did not come to its end.

        Or that is another thread's: of two updates at once nobody can tell which follows which.
        """
        if self.window is not None and self.window.stepping is not None:
            self.abandon("a step was interrupted")

    def give_up(self, reason: str) -> None:
        """This process's part of it is over; so is the window, unless others go on."""
        window = self.window
        if window is None:  # a signal handler's `close` came first
            return
        if not self._several:
            self.abandon(reason)
            return
        _tell(window, "given up in part", reason)
        window.give_up(reason)

    @contextlib.contextmanager
    def giving_up_on_errors(self, what: str) -> Iterator[None]:
        """Gives it up if the trainer's own part in it fails: the step must run all the same.

        After its dispatch the old state is donated, and the caller must get the new one.

        Args:
          what: Has happened then.

        Raises:
          ProcessError: beside other processes, if they wait in a program that did not begin here.
        """
        try:
            yield
        except Exception as error:
            if self.window is not None and self._several and self.window.others_wait:
                raise ProcessError(
                    "this process could not begin a program in which the others wait for it "
                    f"({what}): {error!r}. They would wait for ever, so this one ends. "
                    "Earlier checkpoints are intact. For want of memory give saves less of the "
                    "device (`device_budget_bytes`)."
                ) from error
            if self.window is not None and not self._several and is_out_of_memory(error):
                self.had_no_room(self.window.target)
            told = "a window was given up, training is not affected: %r"
            events.tell(_log.warning, told, error)
            self.give_up(f"{what}: {error!r}")

    # What has failed on a worker thread.

    @property
    def has_failed(self) -> bool:
        """Whether something has failed in it on a worker thread, and it has not been given up."""
        window = self.window
        return window is not None and window.error is not None and window.given_up is None

    def give_up_if_failed(self) -> None:
        """Gives it up, if something has failed in it."""
        if self.window is not None and self.has_failed:
            self.give_up(f"it failed: {self.window.error!r}")

    def raise_failure(self) -> None:
        """Raises what has failed in one that is over, once.

        Raises:
          ReplayError: from the original error.
        """
        failure, self.failure = self.failure, None
        if failure is not None:
            surface(window_failed(failure), self._on_save_error)


def _tell(window: OpenWindow, what: str, reason: str) -> None:
    level = logging.DEBUG if window.error is None else logging.WARNING
    events.tell(_log.log, level, "window for version %d %s: %s", window.target, what, reason)
    events.tell(jax.monitoring.record_event, events.WINDOW_ABANDONED)
