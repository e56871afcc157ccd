"""Two wrapped steps in turn: one count of updates, one window at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from window.training_loop import BATCH, Options, assert_same, fresh, to_host, update

from gockpt_jax import GoCkptManager, GoCkptSave, WindowOptions
from gockpt_jax.transfer.staging import owned_bytes, owned_bytes_at_most


@pytest.mark.parametrize("host_budget_bytes", [None, 100_000])
def test_a_window_opens_after_another_step_has_donated_the_state(tmp_path, host_budget_bytes):
    """Also when the plan is made: the results that a step last returned are gone by then."""

    def with_norm(state, batch):
        return update(state, batch), jnp.linalg.norm(batch)

    window = WindowOptions(steps=3, host_budget_bytes=host_budget_bytes)
    options = Options(save_interval_steps=6)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        plain = manager.wrap(jax.jit(update.__wrapped__, donate_argnums=0))
        extra = manager.wrap(jax.jit(with_norm, donate_argnums=0))
        state, saved = jax.tree.map(jnp.array, fresh()), {}
        for label in range(19):
            if label % 6 in (3, 4):  # a window opens right after these
                state, _ = extra(state, BATCH)
            else:
                state = plain(state, BATCH)
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
        manager.wait_until_finished()
        kinds = [(r.step, r.kind, r.window_steps) for r in manager.reports]
        assert kinds == [(0, "snapshot", 1), *((n, "window", 3) for n in (6, 12, 18))]
        for label, state in saved.items():
            assert_same(manager.restore(label), state)


@pytest.mark.parametrize("spec", [(), ("a",), ("a", "b"), (("a", "b"),), (None, "b")])
def test_bytes_of_a_donated_array(spec):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    placed = jax.NamedSharding(mesh, jax.P(*spec))
    for array in (np.ones((8, 4), np.float32), jax.random.split(jax.random.key(0), (8, 2))):
        placed_array = jax.device_put(array, placed)
        want = owned_bytes(placed_array)
        placed_array.delete()
        assert owned_bytes_at_most(placed_array) == want
