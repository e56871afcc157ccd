"""Lives of training runs: what a loop may do between two steps, in any order.

Leaves are edited, copied, swapped or taken to the host, the data loader fails, the step is called
wrongly or for another state, saves are left out, forced, announced or deleted, or are of another
state than the newest, and the run goes back to a checkpoint. Every checkpoint must be the state
given to `save`, byte for byte, none may be lost, and training must be that of the user's own step,
led the same life.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import Bits, differing, to_host
from programs import Job

import gockpt_jax as gockpt

from .harness import restore_with_stock

STEPS = 16


def host(tree: Any) -> Bits:
    """Copies on the host, with one NaN."""
    return _with_one_nan(to_host(tree))


def _with_one_nan(arrays: Bits) -> Bits:
    """A life may lead to NaN, of which IEEE 754 does not say which (docs/guarantees.md)."""
    return {path: np.where(x == x, x, np.array(np.nan, x.dtype)) if _rounds(x) else x
            for path, x in arrays.items()}  # fmt: skip


def _rounds(x: np.ndarray) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _edited(x: jax.Array) -> jax.Array:
    changed = np.array(jnp.copy(x))
    changed.reshape(-1)[::3] = 1
    return jax.device_put(changed, x.sharding) if x.committed else jnp.array(changed)


def _is_plain(x: Any) -> bool:
    return isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _alike(x: jax.Array, y: jax.Array) -> bool:
    return (x.shape, x.dtype) == (y.shape, y.dtype)


def _elsewhere(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.devices()[-1])


EDITS: dict[str, Callable[[jax.Array], Any]] = {
    "edited": _edited, "copied": jnp.copy, "to_host": np.asarray,
}  # fmt: skip
# What is given to `save` in place of some leaves of the state.
SAVED_INSTEAD: dict[str, Callable[[jax.Array], Any]] = {
    "saved_edited": _edited, "saved_elsewhere": _elsewhere, "saved_from_host": np.asarray,
}  # fmt: skip
EVENTS = (
    *("nothing",) * 6, *("edited",) * 3, "copied", "to_host", "swapped", "swapped",
    "loader_fails", "forced", "expected", "deleted", "restored",
)  # fmt: skip
MORE_EVENTS = (
    *("nothing",) * 14, *EVENTS, "unsaved", "wrongly_called", "other_state", "saved_before",
    "waited", "saved_twice", *SAVED_INSTEAD,
)  # fmt: skip


@dataclasses.dataclass
class Life:
    """One run of a program through the events of a seed.

    Attributes:
      seed: Of the events.
      manager: `None` for the user's own step, which is led the same life.
      went_back: The states that the run has gone back to, by the step before which it did.
      events: To draw from.
      save_args: Makes the arguments of `save` from the state.
      saved: Each checkpoint that must be there, on the host.
    """

    seed: int
    manager: gockpt.GoCkptManager | None
    went_back: dict[int, Any]
    events: tuple[str, ...] = EVENTS
    save_args: Callable[[Any], Any] = gockpt.GoCkptSave
    saved: dict[int, Bits] = dataclasses.field(default_factory=dict)

    def lead(self, job: Job) -> Any:
        """Trains, with an event before each step; returns the last state."""
        rng, state = random.Random(self.seed), job.state
        step = self.manager.wrap(job.step, **job.wrap_kwargs) if self.manager else job.step
        for n in range(STEPS):
            event, chance = rng.choice(self.events), random.Random(rng.random())
            state = self._changed(event, n, state, chance)
            if event == "loader_fails":  # the loop catches it, and takes the next batch
                continue
            if event == "wrongly_called":
                with pytest.raises(TypeError):
                    job.advance(functools.partial(step, of_no_parameter=1), state, n)
            if event == "other_state":
                job.advance(step, jax.tree.map(jnp.copy, state), n)
            before = jax.tree.map(jnp.copy, state) if event == "saved_before" else None
            with self._settings(n):
                state = job.advance(step, state, n)
            if self.manager is not None and event != "unsaved":
                self._save(n, _given(event, state, before, chance), force=event == "forced")
        return state

    def _settings(self, n: int) -> contextlib.AbstractContextManager[Any]:
        """In some lives each third call is under other settings of JAX, and so another kind."""
        is_other = self.seed % 4 == 3 and n % 3 == 1
        return jax.default_matmul_precision("highest") if is_other else contextlib.nullcontext()

    def _save(self, n: int, given: Any, *, force: bool) -> None:
        assert self.manager is not None
        bits = host(given)
        if self.manager.save(n, args=self.save_args(given), force=force):
            self.saved[n] = bits

    def _changed(self, event: str, n: int, state: Any, rng: random.Random) -> Any:
        leaves, tree = jax.tree.flatten(state)
        plain = [i for i, x in enumerate(leaves) if _is_plain(x)]
        i = rng.choice(plain)
        if event in EDITS:
            for j in rng.sample(plain, 1 + len(plain) // 3):
                leaves[j] = EDITS[event](leaves[j])
        elif event == "swapped":
            j = rng.choice([j for j in plain if _alike(leaves[i], leaves[j])])
            leaves[i], leaves[j] = leaves[j], leaves[i]
        elif event == "restored":
            return self._back(n, state)
        elif self.manager is not None and event == "expected":
            self.manager.expect_save(in_steps=rng.randint(1, 5))
        elif self.manager is not None and event == "waited":
            self.manager.wait_until_finished()
        elif self.manager is not None and event == "deleted" and self.saved:
            self.manager.wait_until_finished()  # what is being written cannot be deleted
            self.manager.delete(label := rng.choice(sorted(self.manager.all_steps())))
            del self.saved[label]
        return jax.tree.unflatten(tree, leaves)

    def _back(self, n: int, state: Any) -> Any:
        """To the newest checkpoint, if there is one."""
        if self.manager is not None and self.saved:
            self.manager.wait_until_finished()
            newest = max(self.manager.all_steps())  # some have been superseded
            args = gockpt.GoCkptRestore(jax.tree.map(_in_place, state))
            found = self.manager.restore(newest, args=args)
            assert not differing(host(found), self.saved[newest])
            self.went_back[n] = found
            return jax.tree.map(jnp.copy, found)  # the step donates it
        return jax.tree.map(jnp.copy, self.went_back[n]) if n in self.went_back else state


def _given(event: str, state: Any, before: Any, rng: random.Random) -> Any:
    """What the loop gives to `save`."""
    if event not in (*SAVED_INSTEAD, "saved_twice"):
        return state if before is None else before
    leaves, tree = jax.tree.flatten(state)
    plain = [i for i, x in enumerate(leaves) if _is_plain(x)]
    for j in rng.sample(plain, 1 + len(plain) // 3):
        if event == "saved_twice":
            leaves[j] = leaves[rng.choice([i for i in plain if _alike(leaves[i], leaves[j])])]
        else:
            leaves[j] = SAVED_INSTEAD[event](leaves[j])
    return jax.tree.unflatten(tree, leaves)


def _in_place(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def check_checkpoints(life: Life, state: Any) -> None:
    """What a life has left behind, after `wait_until_finished`: every checkpoint, true.

    Args:
      life: Led with a manager.
      state: Like those that were saved.
    """
    manager = life.manager
    assert manager is not None
    given_up = {report.step for report in manager.reports if report.kind == "superseded"}
    wanted = {label: bits for label, bits in life.saved.items() if label not in given_up}
    assert sorted(manager.all_steps(read=True)) == sorted(wanted)
    assert [report.error for report in manager.reports if report.error] == []
    for report in manager.reports:
        if report.kind in ("window", "snapshot"):
            is_window = report.kind == "window"
            assert (report.window_steps > 1, report.early_bytes > 0) == (is_window, is_window)
        if report.step in wanted:
            num_bytes = sum(x.nbytes for x in wanted[report.step].values())
            assert report.early_bytes <= report.state_bytes <= num_bytes
    restored = functools.partial(restore_with_stock, manager.directory, to_devices=False)
    torn = {
        label: differing(_with_one_nan(restored(label, state)), bits)
        for label, bits in wanted.items()
    }
    assert not any(torn.values()), torn
