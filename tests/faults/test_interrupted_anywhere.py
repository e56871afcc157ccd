"""Ctrl-C at random lines of the library, on the trainer's thread: what is listed is right.

A loop that catches the interrupt goes on from the state it has, and tries again. Saves that were
accepted are there, or their reports say why not; nothing hangs, and the next step and the next save
are as ever. `make interrupts` runs more of it.
"""

from __future__ import annotations

import ast
import functools
import os
import random
import sys
from collections.abc import Callable
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

import gockpt_jax as gockpt

from .states import abstract, bits_of, stock_restore, stock_steps

LIBRARY = os.path.dirname(gockpt.__file__)
LABELS, INTERVAL = 40, 4
MEAN_LINES = 30_000  # between two interrupts; a life executes some 200,000
TX = optax.adam(1e-2)
LIVES = seeds("INTERRUPTS") or range(4)


@functools.cache
def lines_of_with(path: str) -> frozenset[int]:
    """Where a trace can raise and a signal cannot: as a block is left, before its `__exit__`.

    Nor can it at a `try`, which the block that is around it does not protect.
    """
    tree = ast.parse(Path(path).read_text())
    found = [n for n in ast.walk(tree) if isinstance(n, ast.With | ast.Try)]
    return frozenset(line for n in found for line in range(n.lineno, n.body[0].lineno))


class Interrupts:
    """Raises `KeyboardInterrupt` at some line of the library, now and then."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._lines_left = int(rng.expovariate(1 / MEAN_LINES))
        self.came_at: list[str] = []

    def during(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls, again and again, until it is not interrupted.

        Of a save that was, Orbax may still be making the directory when the next one of its label
        comes: that one fails then, and says so.
        """
        while True:
            sys.settrace(self._enter)
            try:
                return call(*args, **kwargs)
            except KeyboardInterrupt:
                self._lines_left = int(self._rng.expovariate(1 / MEAN_LINES))
            except gockpt.StorageError:
                assert self.came_at
            finally:
                sys.settrace(None)

    def _enter(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(LIBRARY) else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        if event == "line" and frame.f_lineno not in lines_of_with(path):
            self._lines_left -= 1
            if self._lines_left < 0:
                self.came_at.append(f"{os.path.basename(path)}:{frame.f_lineno}")
                raise KeyboardInterrupt
        return self._line


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
    accepted, interrupts = set(), Interrupts(rng)
    with gockpt.GoCkptManager(
        tmp_path,
        options=ocp.CheckpointManagerOptions(save_interval_steps=INTERVAL),
        window=gockpt.WindowOptions(steps=rng.choice([2, 3, 4]), on_busy=on_busy),
    ) as manager:
        step, state = manager.wrap(train_step), fresh()
        for label in range(LABELS):
            state = interrupts.during(step, state, batch(label))
            assert not differing(bits_of(state), undisturbed()[label]), interrupts.came_at
            if interrupts.during(manager.save, label, args=gockpt.GoCkptSave(state)):
                accepted.add(label)
            if rng.random() < 0.1:
                interrupts.during(manager.wait_until_finished)
        interrupts.during(manager.wait_until_finished)
        reports = {report.step: report for report in manager.reports}  # of the last try
    told = (interrupts.came_at, reports)
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
