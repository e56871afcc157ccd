"""Random lives of a training run: what a loop may do between two steps, in any order.

Leaves are edited, copied, swapped or taken to the host, the data loader fails, saves are forced,
announced or deleted, and the run goes back to a checkpoint, before, inside and after windows of
random length. Every checkpoint must be the state given to `save`, byte for byte, none may be lost,
and training must be that of the user's own step, led the same life.

`make lives` plays many over all programs; `make test` a few.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from bits import differing, to_host
from programs import PROGRAMS, Job

import gockpt_jax as gockpt

from .harness import restore_with_stock

restored = functools.partial(restore_with_stock, to_devices=False)
STEPS = 16
LIVES = int(os.environ.get("GOCKPT_LIVES", "0"))
# Arrays without elements cannot be saved.
NAMES = sorted(PROGRAMS.keys() - {"zero_size"})
CASES = [(seed, NAMES[seed % len(NAMES)], (1, 8)[seed // len(NAMES) % 2]) for seed in range(LIVES)]
CASES = CASES or [(7, "adamw", 1), (8, "adamw", 1)]  # leaves are edited behind those that left


def _host(tree: Any) -> dict[str, np.ndarray]:
    return _with_one_nan(to_host(tree))


def _with_one_nan(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A life may lead to NaN, of which IEEE 754 does not say which (docs/guarantees.md)."""
    return {path: np.where(x == x, x, np.array(np.nan, x.dtype)) if x.dtype.kind == "f" else x
            for path, x in arrays.items()}  # fmt: skip


def _edited(x: jax.Array) -> jax.Array:
    changed = x.reshape(-1).at[::3].set(jnp.ones((), x.dtype)).reshape(x.shape)
    return jax.device_put(changed, x.sharding) if x.committed else changed


def _is_plain(x: Any) -> bool:
    return isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


EDITS: dict[str, Callable[[jax.Array], Any]] = {
    "edited": _edited, "copied": jnp.copy, "to_host": np.asarray,
}  # fmt: skip
EVENTS = (
    *("nothing",) * 6, *("edited",) * 3, "copied", "to_host", "swapped", "swapped",
    "loader_fails", "forced", "expected", "deleted", "restored",
)  # fmt: skip


@dataclasses.dataclass
class Life:
    """One run of a program through the events of a seed.

    Attributes:
      seed: Of the events.
      manager: `None` for the user's own step, which is led the same life.
      saved: Each checkpoint that must be there, on the host.
      went_back: The states that the run has gone back to, by the step before which it did.
    """

    seed: int
    manager: gockpt.GoCkptManager | None
    went_back: dict[int, Any]
    saved: dict[int, dict[str, np.ndarray]] = dataclasses.field(default_factory=dict)

    def lead(self, job: Job) -> Any:
        """Trains, with an event before each step; returns the last state."""
        rng, state = random.Random(self.seed), job.state
        step = self.manager.wrap(job.step, **job.wrap_kwargs) if self.manager else job.step
        for n in range(STEPS):
            event = rng.choice(EVENTS)
            state = self._changed(event, n, state, random.Random(rng.random()))
            if event == "loader_fails":  # the loop catches it, and takes the next batch
                continue
            state = job.advance(step, state, n)
            if self.manager is not None and self.manager.save(
                n, args=gockpt.GoCkptSave(state), force=event == "forced"
            ):
                self.saved[n] = _host(state)
        return state

    def _changed(self, event: str, n: int, state: Any, rng: random.Random) -> Any:
        leaves, tree = jax.tree.flatten(state)
        plain = [i for i, x in enumerate(leaves) if _is_plain(x)]
        i = rng.choice(plain)
        if event in EDITS:
            for j in rng.sample(plain, 1 + len(plain) // 3):
                leaves[j] = EDITS[event](leaves[j])
        elif event == "swapped":
            like = (leaves[i].shape, leaves[i].dtype)
            j = rng.choice([j for j in plain if (leaves[j].shape, leaves[j].dtype) == like])
            leaves[i], leaves[j] = leaves[j], leaves[i]
        elif event == "restored":
            return self._back(n, state)
        elif self.manager is not None and event == "expected":
            self.manager.expect_save(in_steps=rng.randint(1, 5))
        elif self.manager is not None and event == "deleted" and self.saved:
            self.manager.wait_until_finished()  # what is being written cannot be deleted
            self.manager.delete(label := rng.choice(sorted(self.saved)))
            del self.saved[label]
        return jax.tree.unflatten(tree, leaves)

    def _back(self, n: int, state: Any) -> Any:
        """To the newest checkpoint, if there is one."""
        if self.manager is not None and self.saved:
            args = gockpt.GoCkptRestore(jax.tree.map(_in_place, state))
            found = self.manager.restore(max(self.saved), args=args)
            assert not differing(_host(found), self.saved[max(self.saved)])
            self.went_back[n] = found
            return jax.tree.map(jnp.copy, found)  # the step donates it
        return jax.tree.map(jnp.copy, self.went_back[n]) if n in self.went_back else state


def _in_place(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize(("seed", "name", "devices"), CASES)
def test_a_life_leaves_true_checkpoints_and_the_users_training(
    tmp_path: Path, seed: int, name: str, devices: int
) -> None:
    rng, went_back = random.Random(seed), {}
    options = ocp.CheckpointManagerOptions(save_interval_steps=rng.choice([4, 5, 6]))
    window = gockpt.WindowOptions(
        steps=rng.choice([2, 4, 5, 6]),
        arm=rng.choice(["window", "window", "always"]),
        device_budget_bytes=rng.choice([None, 1 << 14]),
        audit=gockpt.Audit(fraction=1.0),
    )
    with gockpt.GoCkptManager(tmp_path, options=options, window=window) as manager:
        life = Life(seed, manager, went_back)
        state = life.lead(PROGRAMS[name].build(devices))
        manager.wait_until_finished()
        assert sorted(manager.all_steps(read=True)) == sorted(life.saved)
        assert [report.error for report in manager.reports if report.error] == []
    torn = {
        label: differing(_with_one_nan(restored(tmp_path, label, state)), want)
        for label, want in life.saved.items()
    }
    assert not any(torn.values()), torn
    alone = Life(seed, None, went_back).lead(PROGRAMS[name].build(devices))
    assert not differing(_host(state), _host(alone))
    if not LIVES:  # of a random life nothing is known beforehand
        assert any(report.early_bytes for report in manager.reports)
