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

import orbax.checkpoint as ocp
import pytest
from bits import differing
from campaigns import seeds
from signals import Signals

import gockpt_jax as gockpt

from .periods import INTERVAL, NoTrouble, Periods, batch, fresh, train_step
from .states import abstract, bits_of, stock_restore, stock_steps

LABELS = 40
MEAN_PLACES = 5_000  # between two interrupts; a life passes some 40,000
LIVES = seeds("INTERRUPTS") or range(4)
PLACES = seeds("PLACES") or range(1, 4_000, 97)  # of some 3,300 in a period
PARTS = 3
MODES = ("wait", "newest", "skip")
CASES = [
    # Here each place is tried in one of the modes.
    (mode, part)
    for mode in MODES
    for part in range(PARTS)
    if seeds("PLACES") or part == MODES.index(mode)
]


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
    assert signals.came_at, "nothing was tried"
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


@pytest.mark.filterwarnings("ignore::gockpt_jax.SnapshotOnlyWarning")  # on CPUs with FMA
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax's coroutines
@pytest.mark.parametrize(("on_busy", "part"), CASES)
def test_interrupted_at_each_place(tmp_path: Path, on_busy: str, part: int) -> None:
    """Of a period, one after another; here some of them, in `make interrupts` all."""
    periods = Periods(tmp_path, on_busy)
    with periods.manager:
        for place in PLACES[part::PARTS]:
            signals = Signals([place])
            try:
                periods.run(signals)
                periods.assert_saved()
                periods.run(NoTrouble())
                periods.assert_as_ever()
            except BaseException as error:
                error.add_note(f"interrupted at place {place}: {signals.came_at}")
                raise
            if not signals.came_at:  # the period has no more
                assert place != PLACES[part], "nothing was tried"
                break
    assert periods.held_bytes == {"host": 0, "device": 0}
