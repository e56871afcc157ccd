"""A small training loop under a manager: what the manager's tests share."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from gockpt_jax import GoCkptManager, GoCkptSave, SaveReport, WindowOptions
from gockpt_jax.storage.saving.written import Written

WAIT_SECS = 200  # only ends a test that hangs
SIZE = 64
BATCH = jnp.linspace(-1.0, 1.0, SIZE)
STATE_BYTES = 3 * SIZE * 4 + 4
TX = optax.adam(1e-2)
Options = ocp.CheckpointManagerOptions


def fresh():
    params = {"w": jnp.ones(SIZE)}
    return {"opt": TX.init(params), "params": params}


@jax.jit
def update(state, batch):
    grads = jax.grad(lambda p: jnp.sum(jnp.cosh(p["w"] + batch)))(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"opt": opt, "params": optax.apply_updates(state["params"], updates)}


def to_host(tree):
    return jax.tree.map(np.array, tree)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(a), jax.tree.leaves(b))


def manage(directory, window: WindowOptions, **options: Any) -> GoCkptManager:
    """A manager; the other options are stock's."""
    return GoCkptManager(directory, options=Options(**options), window=window)


def kinds(manager: GoCkptManager) -> list[tuple[int, str, int]]:
    """Of its saves, with the steps of their windows."""
    return [(r.step, r.kind, r.window_steps) for r in manager.reports]


def assert_restores(manager: GoCkptManager, saved: dict[int, Any]) -> None:
    """What was saved, by label, bit for bit."""
    for label, state in saved.items():
        assert_same(manager.restore(label), state)


def train(manager, labels, *, save_args=None):
    """A loop that calls `save` at every label; returns the states that were saved, on the host."""
    step, state, saved = manager.wrap(update), fresh(), {}
    for label in labels:
        state = step(state, BATCH)
        if manager.save(
            label, **(save_args or (lambda s, _: {"args": GoCkptSave(s)}))(state, label)
        ):
            saved[label] = to_host(state)
    manager.wait_until_finished()
    return saved


class Loop:
    """Calls `save` at every label, of which every fourth is due, and knows what was accepted."""

    def __init__(
        self, directory: Path, *, window: dict[str, Any], step: Any = update, **options: Any
    ):
        self.manager = GoCkptManager(
            directory,
            options=Options(**{"save_interval_steps": 4, **options}),
            window=WindowOptions(**window),
        )
        self.session = self.manager._gockpt_session
        self.step, self.state = self.manager.wrap(step), jax.tree.map(jnp.array, fresh())
        self.label = 0
        self.given: dict[int, Any] = {}

    def update(self) -> None:
        """One update, without `save`."""
        self.state = self.step(self.state, BATCH)

    def train(self, last: int, **save: Any) -> bool:
        """Trains up to a label; returns whether that one was accepted."""
        accepted = False
        while self.label <= last:
            self.update()
            accepted = self.manager.save(self.label, **{"args": GoCkptSave(self.state), **save})
            if accepted:
                self.given[self.label] = to_host(self.state)
            self.label += 1
        return accepted

    def report(self, label: int) -> SaveReport:
        (found,) = [report for report in self.manager.reports if report.step == label]
        return found

    @property
    def kinds(self) -> dict[int, str]:
        return {report.step: report.kind for report in self.manager.reports}

    def settle(self) -> None:
        """The workers have done all that they were given."""
        self.session.resources.worker.wait_until_idle()

    def assert_saved(self, *labels: int) -> None:
        """These are there, bit for bit, and no others; and nothing is held any more."""
        assert sorted(self.manager.all_steps()) == sorted(labels)
        for label in labels:
            assert_same(self.manager.restore(label), self.given[label])
        self.settle()
        assert self.session.host.used_bytes == 0


class HoldingLoop(Loop):
    """The write of a label is held until it is let go."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, *held: int, **kwargs: Any):
        self.gates = {label: threading.Event() for label in held}
        self.written = {label: threading.Event() for label in held}
        result = Written.result

        def holding(written: Written, timeout: float | None = None) -> None:
            result(written, timeout)
            if (label := written._record.step) in self.gates:
                self.written[label].set()
                assert self.gates[label].wait(WAIT_SECS)

        monkeypatch.setattr(Written, "result", holding)
        super().__init__(directory, **kwargs)

    def train(self, last: int, **save: Any) -> bool:
        """Only what follows the first held one finds it busy."""
        if self.label <= 4 <= last:
            super().train(3, **save)
            self.manager.wait_until_finished()
        return super().train(last, **save)

    def assert_saved(self, *labels: int) -> None:
        """As soon as nothing holds them back any more."""
        self.finish()
        self.manager.wait_until_finished()
        super().assert_saved(*labels)

    def finish(self) -> None:
        """Orbax's thread has committed what it was given, or failed; nobody has heard of it."""
        for gate in self.gates.values():
            gate.set()
        for thread in threading.enumerate():
            if thread.name == "save_finalize":
                threading.Thread.join(thread, WAIT_SECS)
