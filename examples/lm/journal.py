"""What a run leaves beside its checkpoints: settings, losses, the crash, the report."""

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import jax

SETTINGS, LOSSES, CRASH = "settings.json", "losses.jsonl", "crash.json"


class Journal:
    """Appends the loss of every step to `losses.jsonl`, one step late.

    Reading a loss waits for its step. Reading the PREVIOUS one lets the device work on the
    current step meanwhile, so its queue never runs empty because of us. Each line is flushed: the
    curve survives a kill. A resumed run appends; where a step occurs twice, the later line counts.
    """

    def __init__(self, directory: Path, on_loss: Callable[[int, float], None]) -> None:
        """Open the journal of the run in `directory`; `on_loss(step, loss)` hears each loss."""
        self._file = (directory / LOSSES).open("a", encoding="utf-8")
        self._on_loss = on_loss
        self._pending: tuple[int, jax.Array] | None = None
        self.losses: dict[int, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            # After an error the last loss may be an array that raises it again, and hides it.
            if error is None:
                self.settle()
        finally:
            self._file.close()

    def record(self, step: int, loss: jax.Array) -> None:
        """Take the loss of `step` (not read yet), and write that of the step before."""
        self.settle()
        self._pending = (step, loss)

    def settle(self) -> None:
        """Write the loss that is still on its way."""
        if self._pending is None:
            return
        step, loss = self._pending[0], float(self._pending[1])
        self._pending = None
        self.losses[step] = loss
        # One write, then flush: a killed process leaves whole lines.
        self._file.write(json.dumps({"step": step, "loss": loss}) + "\n")
        self._file.flush()
        self._on_loss(step, loss)


def read_losses(directory: Path) -> list[tuple[int, float]]:
    """Return all recorded `(step, loss)` of a run, in the order of writing."""
    lines = (directory / LOSSES).read_text(encoding="utf-8").splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, lines)]


def claim(directory: Path, settings: dict[str, Any]) -> None:
    """Make `directory` that of a run with these settings.

    Raises:
      ValueError: if the directory holds a run whose losses these settings would not continue.

    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / SETTINGS
    if not path.exists():
        # Renamed when it is whole: a kill must not leave half of it for all later runs to read.
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(settings, indent=2), encoding="utf-8")
        partial.replace(path)
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    differing = [
        f"`{name}`: expected {earlier.get(name)}, got {value}"
        for name, value in settings.items()
        if earlier.get(name) != value
    ]
    if differing:
        raise ValueError(
            f"`{directory}` holds another run; use its settings, or another directory:\n  "
            + "\n  ".join(differing)
        )


def crash(directory: Path, step: int, window: str) -> NoReturn:
    """Note where we are, then die as under a power cut: no handlers, no flushing, no clean-up."""
    record = {"step": step, "window": window}
    (directory / CRASH).write_text(json.dumps(record), encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL returned")


def write_report(
    path: Path,
    *,
    resumed_from: int | None,
    losses: dict[int, float],
    saves: Iterable[Any],
    **facts: Any,
) -> None:
    """Write what this process did: its losses and the report of each save (dataclasses)."""
    report = {
        **facts,
        "resumed_from": resumed_from,
        "losses": [{"step": step, "loss": loss} for step, loss in losses.items()],
        "saves": [dataclasses.asdict(save) for save in saves],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, default=str), encoding="utf-8")
