"""A loop of periods, in some of which something goes wrong; and whether all is as ever then."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from bits import differing

import gockpt_jax as gockpt
from gockpt_jax.storage.files import _compat as of_orbax

from .states import abstract, bits_of, stock_restore, stock_steps

INTERVAL = 4
TX = optax.adam(1e-2)
_BATCHES = 40


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


class Trouble(Protocol):
    """What goes wrong in a period."""

    def during(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls, and calls again where the loop would go on."""


class NoTrouble:
    """Nothing does."""

    def during(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls."""
        return call(*args, **kwargs)


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
            self.run(NoTrouble())
            self.manager.wait_until_finished()
        self._open_bytes = self.held_bytes  # the next window is open
        self._kind = self.assert_saved().kind  # a snapshot on CPUs with FMA

    def run(self, trouble: Trouble) -> None:
        """The save comes first: the next window has to be begun behind it."""
        for _ in range(INTERVAL):
            self._label += 1
            values = batch(self._label % _BATCHES)
            self._plain = train_step(self._plain, values)
            self._state = trouble.during(self._step, self._state, values)
            assert not differing(bits_of(self._state), bits_of(self._plain))
            if self._label % INTERVAL == 0:
                self._saved = {self._label: bits_of(self._plain)}
            args = gockpt.GoCkptSave(self._state)
            trouble.during(self.manager.save, self._label, args=args)
        trouble.during(self.manager.wait_until_finished)

    def end_threads(self) -> None:
        """Of the library, that take one task after another; the next one starts another."""
        self.manager._gockpt_session.resources.close()

    @property
    def held_bytes(self) -> dict[str, int]:
        """What saves have by now of each budget, when all has landed that has left."""
        resources = self.manager._gockpt_session.resources
        resources.worker.wait_until_idle()
        resources.watcher.wait_until_idle()
        return {"host": resources.host.used_bytes, "device": resources.device.used_bytes}

    def assert_saved(self) -> gockpt.SaveReport:
        """The last save is there, as it was at its label; its report."""
        ((label, true),) = self._saved.items()
        report = [r for r in self.manager.reports if r.step == label][-1]
        assert label in stock_steps(self._directory), report
        assert not differing(stock_restore(self._directory, label, self._target), true), report
        assert report.error is None
        return report

    def assert_saved_or_reported(self) -> gockpt.SaveReport:
        """The last save is there, or its report says why not, and nobody lists it; the report."""
        ((label, _),) = self._saved.items()
        report = [r for r in self.manager.reports if r.step == label][-1]
        if report.error is None:
            return self.assert_saved()
        assert label not in stock_steps(self._directory), report
        assert label not in self.manager.all_steps(), report
        return report

    def assert_as_ever(self) -> None:
        """The last save's window was as before anything went wrong, and no more is held."""
        report = self.assert_saved()
        # An update that was counted, and then repeated, moves the next save.
        is_early = "the save came" in str(report.reason)
        assert report.kind == self._kind or is_early, report
        held, most = self.held_bytes, self._open_bytes
        assert all(held[where] <= most[where] for where in most), (held, most)
        # What others save on this thread would not wait for its directory.
        assert of_orbax.operation() == contextvars.Context().run(of_orbax.operation)
