"""What the hooks around a wrapped step take of the trainer's thread, and what of it is JAX's."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from gockpt_jax import GoCkptManager
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.stand_in import StandIn
from gockpt_jax.transfer import block, pull

NOTES = (
    "hook_idle_us, hook_window_ms: per step, outside and in windows, what our hooks before and "
    "after it take on the trainer's thread while no save is written; hook_opening_ms: in the steps "
    "that open a window; hook_window_cpu_ms: in windows, the processor time of the thread, without "
    "other work on the machine.",
    "hook_jax_ms: of hook_window_ms, calls of JAX (programs that copy, transfers that start): its "
    "bound. On the CPU backend such a call also makes the copy, if it is small.",
    "hook_window_writing_ms: in windows beside the writing of the save before, which is not in "
    "the figures above: after each call of JAX the trainer may wait for the thread that writes, "
    "5 ms at a time (the interpreter's switch interval).",
    "step_call_ms: the call of the user's jitted step outside windows; armed_call_ms: that of the "
    "armed one in them, which looks whether the call is as it was, and puts the result together; "
    "armed_dispatch_ms: of it, the executable itself: its bound.",
)

_WARM_UP = 2  # windows, in which something may still be compiled


class _Laps:
    """Seconds by name, of one step.

    Attributes:
      wall: On the clock.
      cpu: Of the thread's own processor time.
    """

    def __init__(self) -> None:
        self.wall: collections.Counter[str] = collections.Counter()
        self.cpu: collections.Counter[str] = collections.Counter()

    def reset(self) -> None:
        """A step begins."""
        self.wall.clear()
        self.cpu.clear()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; what it takes is added up under a name."""

        def lap(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.wall[name] += time.perf_counter() - wall
                self.cpu[name] += time.thread_time() - cpu

        return lap


class _Timed(StandIn):
    """The user's jitted step, timed under the name `step`."""

    def __init__(self, step: Callable[..., Any], laps: _Laps):
        super().__init__(step)
        self._lap = laps.timed("step", step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._lap(*args, **kwargs)


class Hooks:
    """Times the hooks of a manager's wrapped step.

    Args:
      manager: With no step wrapped yet.

    Attributes:
      samples: By figure, in its unit; of a step that runs beside the writing of an earlier save in
        figures of their own, for whoever writes takes the interpreter from the trainer.
    """

    def __init__(self, manager: GoCkptManager):
        self.samples: dict[str, list[float]] = collections.defaultdict(list)
        self._manager = manager
        self._laps = _Laps()
        self._windows = 0
        self._is_writing = self._opens = False

    def wrap(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The manager's `wrap`."""
        return self._manager.wrap(_Timed(step, self._laps))

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Times from now on."""
        laps, session = self._laps, self._manager._gockpt_session
        before = laps.timed("hook", session.before_update)
        after = laps.timed("hook", session.after_update)
        executable = StepProgram.executable

        def before_update(*args: Any) -> Any:
            laps.reset()
            self._is_writing = self._manager.is_saving_in_progress()
            self._opens = session.window_status == "idle"
            return before(*args)

        def after_update(step: Any, armed: Any) -> None:
            after(step, armed)
            self._take(in_window=armed is not None)

        with contextlib.ExitStack() as patched:
            for owner, name, new in (
                (session, "before_update", before_update),
                (session, "after_update", after_update),
                (block, "_copied", laps.timed("jax", block._copied)),
                (pull, "start_buffer", laps.timed("jax", pull.start_buffer)),
                (StepProgram, "call", laps.timed("armed", StepProgram.call)),
                (StepProgram, "executable", lambda p: laps.timed("dispatch", executable(p))),
            ):
                patched.enter_context(mock.patch.object(owner, name, new))
            yield

    def _take(self, *, in_window: bool) -> None:
        """A step has ended."""
        wall, cpu, opens = self._laps.wall, self._laps.cpu, in_window and self._opens
        self._windows += opens
        if self._windows <= _WARM_UP:
            return
        if self._is_writing:
            figures = {"hook_window_writing_ms": wall["hook"]} if in_window else {}
        elif in_window:
            figures = {
                "hook_window_ms": wall["hook"],
                "hook_window_cpu_ms": cpu["hook"],
                "hook_jax_ms": wall["jax"],
                "armed_call_ms": wall["armed"],
                "armed_dispatch_ms": wall["dispatch"],
            } | ({"hook_opening_ms": wall["hook"]} if opens else {})
        else:
            figures = {"hook_idle_us": wall["hook"], "step_call_ms": wall["step"]}
        for name, secs in figures.items():
            self.samples[name].append(secs * (1e6 if name.endswith("_us") else 1e3))
