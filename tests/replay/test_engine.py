"""Replay on the CPU backend."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replay_helpers import moments, numbers, recipe_of, replayed, shard_of

from gockpt_jax import ReplayError
from gockpt_jax.replay.engine import Replayer
from gockpt_jax.replay.programs import PIECE_SIZES

SIZE = 1001


@pytest.fixture(scope="module")
def recipe():
    return recipe_of(moments, (jnp.zeros(SIZE), jnp.zeros(SIZE)), jnp.zeros(SIZE))


@pytest.mark.parametrize("updates", [1, 2, 3, 4, 5])
def test_several_updates_are_the_steps_own(recipe, updates):
    step = jax.jit(moments)
    state = [numbers(0), np.abs(numbers(1))]
    gradients = [numbers(n + 2) for n in range(updates)]
    expected = [jnp.asarray(x) for x in state]
    for g in gradients:
        expected = step(expected, g)
    for got, want in zip(
        replayed(Replayer("cpu"), recipe, state, gradients), expected, strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_fence_changes_no_bit_where_nothing_is_contracted(recipe):
    state, g = [numbers(0), np.abs(numbers(1))], [numbers(2)]
    plain = replayed(Replayer("cpu"), recipe, state, g)
    fenced = replayed(Replayer("gpu"), recipe, state, g)
    for a, b in zip(plain, fenced, strict=True):
        np.testing.assert_array_equal(a, b)


def test_scalars_are_captured_per_update():
    update = lambda state, g, rate: (state[0] - jnp.sqrt(rate) * g,)  # noqa: E731
    recipe = recipe_of(update, (jnp.zeros(SIZE),), jnp.zeros(SIZE), jnp.float32(4))
    assert recipe.num_scalars == 1
    (got,) = replayed(Replayer("cpu"), recipe, [numbers(0)], [numbers(1)], [np.float32(3.0)])
    np.testing.assert_allclose(got, numbers(0) - 3 * numbers(1), rtol=1e-6)


def test_chunks_that_do_not_fit_together(recipe):
    with pytest.raises(ReplayError, match=r"different sizes \[10, 1001\]; please report"):
        replayed(Replayer("cpu"), recipe, [numbers(0), numbers(1)], [numbers(2, 10)])
    assert issubclass(ReplayError, RuntimeError)


def test_one_at_a_time_where_training_shares_the_queues():
    assert Replayer("cpu", threads=4).threads == 1
    assert Replayer("gpu", threads=4).threads == 4


def test_where_training_runs_is_told_by_what_was_donated():
    donated = jnp.ones(2)
    donated.delete()
    assert Replayer.of([donated], None).shares_backend


@pytest.mark.parametrize(("cores", "threads"), [(None, 1), (2, 1), (16, 4), (128, 8)])
def test_a_quarter_of_the_cores_replays(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert Replayer("gpu").threads == threads


@pytest.mark.parametrize("threads", [1, 3])
def test_results_are_given_in_the_memory_that_is_counted(recipe, monkeypatch, threads):
    """Pieces of one size one after the other: fresh memory for each would be slow, and more."""
    new, made = Replayer._new_buffers, []

    def counted(self, like):
        buffers = new(self, like)
        made.extend(buffers)
        return buffers

    monkeypatch.setattr(Replayer, "_new_buffers", counted)
    size = 5 * PIECE_SIZES[0] + PIECE_SIZES[-1]
    shard = shard_of(recipe, [numbers(0, size), numbers(1, size)], [numbers(2, size)])
    replayer = Replayer("gpu", threads)
    replayer.apply([shard])
    assert 0 < sum(x.nbytes for x in made) <= replayer.scratch_bytes([shard])
    assert all(x.is_deleted() for x in made), "taken over"


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_on_any_thread_reaches_the_caller(recipe, monkeypatch, threads, error):
    def broken(*args):
        raise error("on a thread")

    monkeypatch.setattr(Replayer, "_new_buffers", broken)
    shard = shard_of(recipe, [numbers(0, 9000), numbers(1, 9000)], [numbers(2, 9000)])
    with pytest.raises(error, match="on a thread"):
        Replayer("gpu", threads).apply([shard] * 4)


def test_no_cpu_backend_names_the_variable(monkeypatch):
    def excluded(backend=None):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", excluded)
    with pytest.raises(ReplayError, match=r"`JAX_PLATFORMS` excludes it.*Unset.*cuda,cpu") as error:
        Replayer("gpu")
    assert isinstance(error.value.__cause__, RuntimeError)


# Contraction, on a CPU that has it.

CONTRACTION = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import numpy as np
    import jax, jax.numpy as jnp
    from gockpt_jax.replay.contraction import cpu_contracts
    from gockpt_jax.replay.engine import Replayer
    from replay_helpers import moments, numbers, recipe_of, replayed

    SIZE = 1001

    recipe = recipe_of(moments, (jnp.zeros(SIZE), jnp.zeros(SIZE)), jnp.zeros(SIZE))
    f32 = np.float32
    m, v = numbers(0), np.abs(numbers(1))
    gradients, expected = [numbers(n + 2) for n in range(4)], [m, v]
    fenced = replayed(Replayer("gpu"), recipe, [m, v], gradients)
    plain = replayed(Replayer("cpu"), recipe, [m, v], gradients)
    for g in gradients:
        # NumPy rounds each product before it adds.
        expected = [f32(0.9) * expected[0] + f32(0.1) * g,
                    f32(0.999) * expected[1] + f32(0.001) * (g * g)]
    for name, got in (("fenced", fenced), ("plain", plain)):
        print(name, *(int((np.asarray(a) != b).sum()) for a, b in zip(got, expected)))
    print("contracts", cpu_contracts())
"""


def test_fenced_replay_rounds_separately_where_the_cpu_contracts():
    """With fused multiply-add the plain replay differs in some elements: the fence is needed."""
    script = textwrap.dedent(CONTRACTION)
    result = subprocess.run(
        [sys.executable, "-c", script, os.path.dirname(__file__)],
        env=os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = dict(line.split(" ", 1) for line in result.stdout.splitlines())
    assert lines["fenced"] == "0 0"
    assert lines["contracts"] == str(lines["plain"] != "0 0")
    if not _has_fma():
        pytest.skip("this CPU has no fused multiply-add to fence off")
    assert lines["plain"] != "0 0"


def _has_fma() -> bool:
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            return " fma " in cpuinfo.read()
    except OSError:
        return False
