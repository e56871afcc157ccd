"""A training loop that remembers what it gave to `save`."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp
from bits import Bits
from programs import PROGRAMS

import gockpt_jax as gockpt

from .states import abstract, assert_checkpoints, assert_only_whole_steps, bits_of

PROGRAM, DEVICES = "one_layer", 2
INTERVAL, WINDOW_STEPS = 4, 3  # The window of save 8 is open from the update of label 7 on.
# Nothing here takes a tenth of it: it only ends a test that hangs, and leaves room for a machine
# that is busy. Less than the 300 s for which Orbax waits for a directory.
LIMIT_SECS = 200


class Trainer:
    """One training loop with a manager; `label` is the label of the next update.

    Args:
        directory: Of the checkpoints.
        window: By default of three steps.
        program: Of `programs`.
        devices: It trains on.
        pytree_options: Of the manager.
        **options: Of `ocp.CheckpointManagerOptions`; every fourth label is saved by default.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        *,
        window: gockpt.WindowOptions | None = None,
        program: str = PROGRAM,
        devices: int = DEVICES,
        pytree_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.directory = directory
        self.interval = options.setdefault("save_interval_steps", INTERVAL)
        self.manager = gockpt.GoCkptManager(
            directory,
            options=ocp.CheckpointManagerOptions(**options),
            window=window or gockpt.WindowOptions(steps=WINDOW_STEPS),
            pytree_options=pytree_options,
        )
        self._job = PROGRAMS[program].build(devices)
        self.step = self.manager.wrap(self._job.step, **self._job.wrap_kwargs)
        self.state = self._job.state
        self.label = 0
        self.given: dict[int, Bits] = {}  # The states of all saves that were accepted.

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: Any) -> None:
        self.manager.close()

    @property
    def target(self) -> Any:
        """What to restore into."""
        return abstract(self.state)

    def update(self) -> None:
        """Makes one update. If it raises, the state is the old one and the label too."""
        old = self.state
        self.state = self._job.advance(self.step, old, self.label)
        # Not if somebody has looked at it by NumPy: then no fault could show in what was saved.
        assert any(leaf.is_deleted() for leaf in jax.tree.leaves(old)), "nothing was donated"
        self.label += 1

    def save(self, **kwargs: Any) -> bool:
        """Calls `save` for the last update."""
        given = bits_of(self.state)
        args = kwargs.pop("args", None) or gockpt.GoCkptSave(self.state)
        accepted = self.manager.save(self.label - 1, args=args, **kwargs)
        if accepted:
            self.given[self.label - 1] = given
        return accepted

    def run(self, last: int) -> None:
        """Updates and saves up to a label, which is the last one."""
        while self.label <= last:
            self.update()
            self.save()

    def run_past_next_window(self) -> None:
        """Runs until a save has come from a window, the second from here at the latest."""
        first = -(-self.label // self.interval) * self.interval
        self.run(first + self.interval)
        self.manager.wait_until_finished()
        kinds = {report.step: report.kind for report in self.manager.reports if not report.error}
        assert kinds[first + self.interval] == "window", self.manager.reports

    def run_undisturbed(self, last: int) -> None:
        """Runs up to a label and waits for all that is under way: faults shall hit what follows."""
        self.run(last)
        self.manager.wait_until_finished()
        self.settle()

    def settle(self) -> None:
        """Waits until the worker thread has done all that it was given."""
        self.manager._gockpt_session.resources.worker.wait_until_idle()

    def bytes_in_flight(self) -> tuple[int, int]:
        """What the library believes to hold on the host and, staged or retained, on a device."""
        session = self.manager._gockpt_session
        return session.host.used_bytes, session.resources.device.used_bytes

    def report(self, label: int) -> gockpt.SaveReport:
        """The report of a label's save."""
        (found,) = [report for report in self.manager.reports if report.step == label]
        return found

    def assert_intact(self) -> None:
        """Every accepted save is there, bit for bit, and nothing else, for stock and for us."""
        self.manager.wait_until_finished()
        assert_only_whole_steps(self.directory, self.given)
        assert_checkpoints(self.directory, self.given, self.target)
        assert sorted(self.manager.all_steps()) == sorted(self.given)
        assert self.manager.latest_step() == max(self.given, default=None)


def finish_save() -> None:
    """Waits until Orbax's thread has committed the last save, or failed, and raises nothing."""
    for thread in threading.enumerate():
        if thread.name == "save_finalize":
            threading.Thread.join(thread, LIMIT_SECS)
            assert not thread.is_alive()


def within_limit(
    call: Callable[[], Any], meanwhile: Callable[[], Any] | None = None
) -> BaseException | None:
    """Runs a call on a thread and fails if it does not end; returns what it raised.

    Args:
        call: What must end.
        meanwhile: Called once the thread runs.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    # A daemon: one that hangs fails its test and must not hang the test run as well.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    if meanwhile is not None:
        meanwhile()
    thread.join(LIMIT_SECS)
    assert not thread.is_alive(), f"it still waits after {LIMIT_SECS} s"
    return raised[0] if raised else None


def chain_of(error: BaseException) -> list[BaseException]:
    """An error with all that caused it, the last one first."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return chain
