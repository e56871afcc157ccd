"""SIGTERM: what schedulers send some time before they kill a process."""

import signal

EXIT_STOPPED = 128 + signal.SIGTERM  # Not 0: the scheduler is to start the run again.


class Preemption:
    """Notes that the process is to end; the loop looks between two steps.

    A handler that saved by itself might interrupt a save, or find a state that is half donated. A
    job of several processes asks `manager.reached_preemption(step)` instead: all of them have to
    stop behind the same step.
    """

    def __init__(self) -> None:
        """Listen from now on."""
        self.is_asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.is_asked = True
