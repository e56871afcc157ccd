"""How long a step takes, learned from when the steps are called."""

import collections
import statistics

_STRETCH_STEPS = 16
_MIN_STRETCHES, _MAX_STRETCHES = 3, 9


class StepClock:
    """The median, over stretches of steps, of the mean time from call to call.

    Nothing waits for a device. The trainer runs ahead, and then is held back by the device's queue
    or by a value that it reads, so over a stretch calls come as fast as steps are done; one call by
    itself tells nothing (a loop that reads its loss now and then makes many short ones and a long
    one). The median leaves out stretches with an evaluation or a wait for data. Where saves come
    often, a stretch has parts, with saves and windows between them.

    Example:
      >>> clock = StepClock()
      >>> for n in range(49):
      ...     clock.tick(0.25 * n)
      >>> clock.secs
      0.25
    """

    def __init__(self) -> None:
        self._means: collections.deque[float] = collections.deque(maxlen=_MAX_STRETCHES)
        self._last: float | None = None  # call, if no window or save has come since
        self._secs, self._steps = 0.0, 0  # of the stretch so far

    def tick(self, now: float) -> None:
        """A step outside a window is called."""
        if self._last is not None:
            self._secs += now - self._last
            self._steps += 1
        self._last = now
        if self._steps == _STRETCH_STEPS:
            self._means.append(self._secs / _STRETCH_STEPS)
            self._secs, self._steps = 0.0, 0

    def pause(self) -> None:
        """The time to the next step is not a step's: a window or a save lies between."""
        self._last = None

    @property
    def secs(self) -> float | None:
        """Time of a step; `None` until enough of them have been seen."""
        if len(self._means) < _MIN_STRETCHES:
            return None
        return statistics.median(self._means)
