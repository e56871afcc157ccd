"""Ctrl-C wherever Python gives a signal a chance in the library, on the trainer's thread.

A loop that catches the interrupt goes on from the state it has, and tries again. What is listed is
right; saves that were accepted are there, or their reports say why not; nothing hangs or is held
for ever, and the next step and the next save are as ever. `make interrupts` runs more of it.
"""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from bits import differing
from campaigns import seeds
from signals import Signals

import gockpt_jax as gockpt

from .states import abstract, bits_of, stock_restore, stock_steps

LABELS, INTERVAL = 40, 4
MEAN_PLACES = 5_000  # between two interrupts; a life passes some 40,000
TX = optax.adam(1e-2)
LIVES = seeds("INTERRUPTS") or range(4)
PLACES = seeds("PLACES") or range(1, 4_000, 149)  # of some 3,300 in a period
PARTS = 4


def fresh() -> Any:
    params = {f"w{n}": jax.random.normal(jax.random.key(n), (32, 32)) for n in range(3)}
    return {"params": params, "opt": TX.init(params)}


@jax.jit  # not donated: whoever is interrupted behind the step's dispatch still has its arguments
def train_step(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> Any:
        x = batch
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    updates, opt = TX.update(jax.grad(loss)(state["params"]), state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}


def batch(label: int) -> np.ndarray:
    return np.random.default_rng(label).standard_normal((8, 32)).astype(np.float32)


@functools.cache
def undisturbed() -> list[Any]:
    """The state under each label."""
    state, found = fresh(), []
    for label in range(LABELS):
        state = train_step(state, batch(label))
        found.append(bits_of(state))
    return found


@pytest.mark.filterwarnings("ignore::gockpt_jax.SnapshotOnlyWarning")  # on CPUs with FMA
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's coroutines
@pytest.mark.parametrize("seed", LIVES)
def test_interrupted_anywhere(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    on_busy: Any = ("wait", "newest", "skip")[seed % 3]
    signals = Signals(1 + int(rng.expovariate(1 / MEAN_PLACES)) for _ in itertools.count())
    accepted = set()
    with gockpt.GoCkptManager(
        tmp_path,
        options=ocp.CheckpointManagerOptions(save_interval_steps=INTERVAL),
        window=gockpt.WindowOptions(steps=rng.choice([2, 3, 4]), on_busy=on_busy),
    ) as manager:
        step, state = manager.wrap(train_step), fresh()
        for label in range(LABELS):
            state = signals.during(step, state, batch(label))
            assert not differing(bits_of(state), undisturbed()[label]), signals.came_at
            if signals.during(manager.save, label, args=gockpt.GoCkptSave(state)):
                accepted.add(label)
            if rng.random() < 0.1:
                signals.during(manager.wait_until_finished)
        signals.during(manager.wait_until_finished)
        reports = {report.step: report for report in manager.reports}  # of the last try
    told = (signals.came_at, reports)
    listed, target = stock_steps(tmp_path), abstract(fresh())
    for label in listed:
        assert label % INTERVAL == 0
        found = stock_restore(tmp_path, label, target)
        assert not differing(found, undisturbed()[label]), (label, told)
        assert label in reports, (label, told)
    missing = [n for n in accepted if n not in listed and reports[n].kind != "superseded"]
    assert all(reports[n].error for n in missing), (missing, told)
    written = {r.step for r in reports.values() if r.kind in ("window", "snapshot") and not r.error}
    assert written <= set(listed), told


class Periods:
    """A loop of periods: some steps, the last of which are a window's, and the save.

    Args:
      directory: Of the checkpoints.
      on_busy: As in `WindowOptions`.
    """

    def __init__(self, directory: Path, on_busy: Any):
        self._directory = directory
        self._target = abstract(fresh())
        self.manager = gockpt.GoCkptManager(
            directory,
            options=ocp.CheckpointManagerOptions(save_interval_steps=INTERVAL, max_to_keep=2),
            window=gockpt.WindowOptions(steps=3, on_busy=on_busy),
        )
        self._step = self.manager.wrap(train_step)
        self._state, self._plain = fresh(), fresh()
        self._label, self._saved = -1, {-1: bits_of(self._plain)}
        for _ in range(3):  # until all is compiled
            self.run(Signals([]))
            self.manager.wait_until_finished()
        self._open_bytes = self._held_bytes  # the next window is open
        self._kind = self.assert_saved().kind  # a snapshot on CPUs with FMA

    def run(self, signals: Signals) -> None:
        """The save comes first: the next window has to be begun behind it."""
        for _ in range(INTERVAL):
            self._label += 1
            values = batch(self._label % LABELS)
            self._plain = train_step(self._plain, values)
            self._state = signals.during(self._step, self._state, values)
            assert not differing(bits_of(self._state), bits_of(self._plain))
            if self._label % INTERVAL == 0:
                self._saved = {self._label: bits_of(self._plain)}
            args = gockpt.GoCkptSave(self._state)
            signals.during(self.manager.save, self._label, args=args)
        signals.during(self.manager.wait_until_finished)

    @property
    def _held_bytes(self) -> int:
        session = self.manager._gockpt_session
        session.resources.worker.wait_until_idle()  # all has landed that has left by now
        return session.host.used_bytes

    def assert_saved(self) -> gockpt.SaveReport:
        """The last save is there, as it was at its label; its report."""
        ((label, true),) = self._saved.items()
        report = [r for r in self.manager.reports if r.step == label][-1]
        assert label in stock_steps(self._directory), report
        assert not differing(stock_restore(self._directory, label, self._target), true), report
        assert report.error is None
        return report

    def assert_as_ever(self) -> None:
        """The last save's window was as before any interrupt, and no more is held."""
        report = self.assert_saved()
        # An update that was counted, and then repeated, moves the next save.
        is_early = "steps early" in str(report.reason)
        assert report.kind == self._kind or is_early, report
        assert self._held_bytes <= self._open_bytes


@pytest.mark.filterwarnings("ignore::gockpt_jax.SnapshotOnlyWarning")  # on CPUs with FMA
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's coroutines
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("on_busy", ["wait", "newest", "skip"])
def test_interrupted_at_each_place(tmp_path: Path, on_busy: str, part: int) -> None:
    """Of a period, one after another; here some of them, in `make interrupts` all."""
    periods = Periods(tmp_path, on_busy)
    with periods.manager:
        for place in PLACES[part::PARTS]:
            signals = Signals([place])
            try:
                periods.run(signals)
                periods.assert_saved()
                periods.run(Signals([]))
                periods.assert_as_ever()
            except BaseException as error:
                error.add_note(f"interrupted at place {place}: {signals.came_at}")
                raise
            if not signals.came_at:  # the period has no more
                break
    assert periods.manager._gockpt_session.host.used_bytes == 0
