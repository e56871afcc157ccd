"""How long a step takes, learned from when steps have run."""

import dataclasses
import functools
import logging
import statistics
import time
from collections.abc import Callable

import jax

from gockpt_jax.window.worker import Worker

_log = logging.getLogger("gockpt_jax")

_STRETCH_STEPS = 16
_MIN_STRETCHES, _MAX_STRETCHES = 3, 9


@dataclasses.dataclass(slots=True)
class _Mark:
    """The end of an update, by its version, and when it was reached; `None`: not yet, or never."""

    version: int
    reached_at: float | None = None


class StepClock:
    """The median, over stretches of steps, of the mean time from one step's end to the next's.

    Calls say nothing of it: a loop that reads no value runs dozens of steps ahead of the device,
    and after a save that has waited for it, it does so anew. So a stretch is timed where it begins
    and where it ends, by a probe that another thread waits for (docs/decisions/0031). The median
    leaves out stretches with an evaluation or a wait for data. Where saves come often, a stretch
    has parts, with saves and windows between them.

    Args:
      watcher: Waits for the probes.
      probe: Gives something that is ready when all steps so far have run; `None` if nothing can be.
    """

    def __init__(self, watcher: Worker, probe: Callable[[], jax.Array | None]):
        self._watcher = watcher
        self._probe = probe
        self._began: _Mark | None = None  # the part, if it has; the trainer's
        self._next = 0  # the version at which one may begin: not long before, none could
        # The watcher's: of the stretch so far.
        self._stretch_secs, self._stretch_steps = 0.0, 0
        self._means: tuple[float, ...] = ()  # of the last stretches

    def tick(self, version: int) -> None:
        """A step outside a window is about to be called, after so many updates."""
        if self._began is None:
            if version >= self._next:
                self._began = self._mark(version)
                self._next = 0 if self._began is not None else version + _STRETCH_STEPS
        elif version - self._began.version >= _STRETCH_STEPS:
            self._began = self._ended(self._began, version)

    def pause(self, version: int) -> None:
        """The time to the next step is not a step's: a window or a save lies between."""
        began, self._began = self._began, None
        if began is not None and version > began.version:
            self._ended(began, version)

    def _ended(self, began: _Mark, version: int) -> _Mark | None:
        """A part ends; gives its last mark."""
        mark = self._mark(version)
        if mark is not None:
            self._watcher.submit(functools.partial(self._count, began, mark))
        return mark

    def _mark(self, version: int) -> _Mark | None:
        try:
            found = self._probe()
        except Exception as error:  # the state may have been donated, or the device be full
            _log.debug("the time of steps is not measured: %r", error)
            found = None
        if found is None:
            return None
        mark, waited_for = _Mark(version), [found]

        def wait() -> None:
            try:
                jax.block_until_ready(waited_for.pop())
            except Exception:  # that of a step is the trainer's
                return
            mark.reached_at = time.perf_counter()

        self._watcher.submit(wait)
        return mark

    def _count(self, began: _Mark, ended: _Mark) -> None:
        """On the watcher's thread, behind both marks."""
        if began.reached_at is None or ended.reached_at is None:
            return
        self._stretch_secs += ended.reached_at - began.reached_at
        self._stretch_steps += ended.version - began.version
        if self._stretch_steps >= _STRETCH_STEPS:
            mean = self._stretch_secs / self._stretch_steps
            self._means = (*self._means, mean)[-_MAX_STRETCHES:]
            self._stretch_secs, self._stretch_steps = 0.0, 0

    @property
    def secs(self) -> float | None:
        """Time of a step; `None` until enough of them have been seen."""
        means = self._means
        return statistics.median(means) if len(means) >= _MIN_STRETCHES else None
