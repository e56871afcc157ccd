"""Progress for people (a bar) and for log files (plain lines)."""

import collections
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_INTERVAL_STEPS = 10
RATE_OVER_STEPS = 20


class Throughput:
    """Tokens per second over the last few steps."""

    def __init__(self, tokens_per_step: int) -> None:
        """Start without any step seen."""
        self._tokens_per_step = tokens_per_step
        self._times: collections.deque[float] = collections.deque(maxlen=RATE_OVER_STEPS + 1)

    def tick(self) -> float:
        """Count a finished step; return the current rate (0 until two steps were seen)."""
        self._times.append(time.perf_counter())
        elapsed_secs = self._times[-1] - self._times[0]
        steps = len(self._times) - 1
        return steps * self._tokens_per_step / elapsed_secs if steps else 0.0


class Display:
    """Shows loss, speed and the state of the checkpoint window while a run goes on."""

    def __init__(self, *, steps: int, start: int, tokens_per_step: int) -> None:
        """Prepare for steps `start` to `steps - 1`."""
        self._console = Console(highlight=False)
        self._steps = steps
        self._throughput = Throughput(tokens_per_step)
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss [bold]{task.fields[loss]}"),
            TextColumn("[dim]{task.fields[rate]} tokens/s"),
            TextColumn("[cyan]{task.fields[window]}"),
            TimeRemainingColumn(),
            console=self._console,
            # A bar that redraws itself is noise in a log file.
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(
            "train", total=steps, completed=start, loss="-", rate="-", window=""
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, soft_wrap=True)

    def update(self, step: int, loss: float, window: str) -> None:
        """Show that `step` is finished."""
        rate = self._throughput.tick()
        if self._console.is_terminal:
            self._progress.update(
                self._task,
                completed=step + 1,
                loss=f"{loss:.4f}",
                rate=f"{rate:,.0f}",
                window=window,
            )
        elif step % PLAIN_INTERVAL_STEPS == 0 or step == self._steps - 1:
            self.say(f"step {step:5d}  loss {loss:.4f}  {rate:9,.0f} tokens/s  {window}")
