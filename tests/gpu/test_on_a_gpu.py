"""What only a GPU can show: `PYTHONPATH=. python -m pytest -m gpu`, where there is one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from programs import PROGRAMS

import gockpt_jax as gockpt
from gockpt_jax.transfer.host_memory import PINNED_LIMIT
from gockpt_jax.transfer.pull import Pull, host_memory_kind
from gockpt_jax.transfer.staging import stage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu",
        reason="no GPU was found, or not asked for by `-m gpu`; GOCKPT_TEST_PLATFORM=gpu insists",
    ),
    # What others deprecate on a borrowed machine is no fault of ours; what we warn of is.
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::gockpt_jax.SaveFailedWarning"),
]

REPLAYED = ("adamw", "clip_adamw", "lion", "sgd_momentum", "ema", "l2_adam", "transformer_bf16")


def to_host(tree: Any) -> list[np.ndarray]:
    def host(leaf: Any) -> np.ndarray:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(leaf) if is_key else leaf)

    return [host(leaf) for leaf in jax.tree.leaves(tree)]


def test_pulls_go_to_pinned_memory() -> None:
    assert host_memory_kind(jax.local_devices()[0]) == "pinned_host"
    staged = stage([jnp.arange(1 << 20, dtype=jnp.float32)])
    (found,) = Pull(staged, list).result()
    np.testing.assert_array_equal(found, np.arange(1 << 20, dtype=np.float32))


def test_more_than_xla_may_pin_leaves_all_the_same(tmp_path: Path) -> None:
    """Its log says so."""
    environ = {**os.environ, PINNED_LIMIT: "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    script = Path(__file__).with_name("beyond_the_pool.py")
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=environ, check=False, timeout=120, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[1, 3, 3]"
    assert ran.stderr.count("there is no more pinned memory") == 1


def all_but(num_bytes: int) -> jax.Array:
    """Takes the device's memory, but for so much."""
    stats = jax.local_devices()[0].memory_stats()
    taken = jnp.zeros(stats["largest_free_block_bytes"] - num_bytes, jnp.uint8)
    return jax.block_until_ready(taken)


def test_what_a_device_has_no_room_for_at_once_leaves_in_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Something else takes its memory, once saves have been planned."""
    step = jax.jit(lambda state: {name: x + 1 for name, x in state.items()}, donate_argnums=0)
    state = {str(n): jnp.full(2**24, n, jnp.float32) for n in range(8)}  # 64 MiB each
    with gockpt.GoCkptManager(tmp_path, window=gockpt.WindowOptions(steps=1)) as manager:
        step = manager.wrap(step)
        for n in range(2):
            state = step(state)
            manager.save(n, args=gockpt.GoCkptSave(state))
            manager.wait_until_finished()
        taken = all_but(3 * 2**26)
        state = step(state)
        given = to_host(state)
        assert manager.save(2, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        del taken
        restored = to_host(manager.restore(2, args=gockpt.GoCkptRestore(state)))
        for got, want in zip(restored, given, strict=True):
            np.testing.assert_array_equal(got, want)
    assert "a device had no room for" in caplog.text


def test_an_armed_step_that_finds_no_room_gives_way_to_the_users(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it returns besides the state does not fit, while the first block of its window does."""

    def update(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        new = {}
        for n in range(8):
            new[f"m{n}"] = 0.5 * state[f"m{n}"] + jnp.sin(state[f"w{n}"])
            new[f"w{n}"] = state[f"w{n}"] - 0.25 * new[f"m{n}"]
        return new

    step = jax.jit(update, donate_argnums=0)
    state = {f"{name}{n}": jnp.full(2**24, n, jnp.float32) for n in range(8) for name in "mw"}
    expected = to_host(state)
    options = ocp.CheckpointManagerOptions(save_interval_steps=8)
    window = gockpt.WindowOptions(steps=5)  # four blocks of 256 MiB, and 512 MiB retained
    with gockpt.GoCkptManager(tmp_path, options=options, window=window) as manager:
        wrapped = manager.wrap(step)
        for n in range(12):
            state = wrapped(state)
            manager.save(n, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        taken = all_but(6 * 2**26)
        for n in range(12, 17):
            state = wrapped(state)
            manager.save(n, args=gockpt.GoCkptSave(state))
        given = to_host(state)
        manager.wait_until_finished()
        del taken
        restored = to_host(manager.restore(16, args=gockpt.GoCkptRestore(state)))
    assert "a window was given up, training is not affected" in caplog.text
    tree = jax.tree.unflatten(jax.tree.structure(state), [jnp.asarray(x) for x in expected])
    for _ in range(17):
        tree = step(tree)
    for got, want, alone in zip(restored, given, to_host(tree), strict=True):
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(want, alone)


def test_staging_makes_new_buffers() -> None:
    array = jnp.ones((1024, 1024))
    (staged,) = stage([array])
    assert staged.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("name", REPLAYED)
def test_checkpoint_is_the_state_given_to_save(name: str, steps: int, tmp_path: Path) -> None:
    job = PROGRAMS[name].build(1)
    options = ocp.CheckpointManagerOptions(save_interval_steps=6)
    given: dict[int, list[np.ndarray]] = {}
    with gockpt.GoCkptManager(
        tmp_path, options=options, window=gockpt.WindowOptions(steps=steps)
    ) as manager:
        step = manager.wrap(job.step, **job.wrap_kwargs)
        state = job.state
        for n in range(20):
            state = job.advance(step, state, n)
            if n % 6 == 0:
                given[n] = to_host(state)
            manager.save(n, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        assert [r.window_steps for r in manager.reports[1:]] == [steps] * 3
        assert [r.audit and r.audit.max_ulps for r in manager.reports[1:]] == [0] * 3
        for label in manager.all_steps():
            restored = to_host(manager.restore(label, args=gockpt.GoCkptRestore(state)))
            for got, want in zip(restored, given[label], strict=True):
                np.testing.assert_array_equal(got, want)
