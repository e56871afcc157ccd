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

from gockpt_jax import ReplayError
from gockpt_jax.replay.engine import Replayer, replay_device
from gockpt_jax.training.cut import find_cut
from gockpt_jax.training.graph import flatten
from gockpt_jax.training.recipe import Recipe, make_recipe
from gockpt_jax.training.walk import Leaf

SIZE = 1001


def moments(state, g):
    m, v = state
    return 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * (g * g)


def recipe_of(update, *args) -> Recipe:
    graph = flatten(jax.jit(update).trace(*args).jaxpr)
    leaves = [Leaf(str(i), graph.inputs[i], new) for i, new in enumerate(graph.outputs)]
    (group,) = find_cut(leaves, even_for_nothing=True).groups
    return make_recipe(group, leaves)


def numbers(seed, size=SIZE):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(size).astype(np.float32)


@pytest.fixture(scope="module")
def recipe():
    return recipe_of(moments, (jnp.zeros(SIZE), jnp.zeros(SIZE)), jnp.zeros(SIZE))


def test_several_updates_are_the_steps_own(recipe):
    step = jax.jit(moments)
    state = [numbers(0), np.abs(numbers(1))]
    expected, replayer = [jnp.asarray(x) for x in state], Replayer("cpu")
    for n in range(5):
        g = numbers(n + 2)
        expected = step(expected, g)
        state = replayer.apply(recipe, state, [g], [])
    for got, want in zip(state, expected, strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.devices() == {replay_device()}


def test_fence_changes_no_bit_where_nothing_is_contracted(recipe):
    state, g = [numbers(0), np.abs(numbers(1))], numbers(2)
    plain = Replayer("cpu").apply(recipe, state, [g], [])
    fenced = Replayer("gpu").apply(recipe, state, [g], [])
    for a, b in zip(plain, fenced, strict=True):
        np.testing.assert_array_equal(a, b)


def test_its_own_results_are_donated_and_what_was_pulled_is_not(recipe):
    """Pulled chunks are views of memory that XLA does not own; its own results it may reuse."""
    replayer, g = Replayer("cpu"), numbers(2)
    pulled = [numbers(0), np.abs(numbers(1))]
    before = [x.copy() for x in pulled]
    first = replayer.apply(recipe, pulled, [g], [])
    for kept, x in zip(before, pulled, strict=True):
        np.testing.assert_array_equal(kept, x)
    retained = jnp.asarray(g)
    replayer.apply(recipe, first, [retained], [])
    assert all(x.is_deleted() for x in first)
    assert not retained.is_deleted()


def test_scalars_are_captured_per_update():
    update = lambda state, g, rate: (state[0] - jnp.sqrt(rate) * g,)  # noqa: E731
    recipe = recipe_of(update, (jnp.zeros(SIZE),), jnp.zeros(SIZE), jnp.float32(4))
    assert recipe.num_scalars == 1
    (got,) = Replayer("cpu").apply(recipe, [numbers(0)], [numbers(1)], [np.float32(3.0)])
    np.testing.assert_allclose(got, numbers(0) - 3 * numbers(1), rtol=1e-6)


def test_chunks_that_do_not_fit_together(recipe):
    with pytest.raises(ReplayError, match=r"different sizes \[10, 1001\]; please report"):
        Replayer("cpu").apply(recipe, [numbers(0), numbers(1)], [numbers(2, 10)], [])
    assert issubclass(ReplayError, RuntimeError)


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
    from gockpt_jax.replay.engine import Replayer
    from test_engine import SIZE, moments, numbers, recipe_of

    recipe = recipe_of(moments, (jnp.zeros(SIZE), jnp.zeros(SIZE)), jnp.zeros(SIZE))
    f32 = np.float32
    m, v = numbers(0), np.abs(numbers(1))
    fenced, plain, expected = ([m, v] for _ in range(3))
    for n in range(4):
        g = numbers(n + 2)
        fenced = Replayer("gpu").apply(recipe, fenced, [g], [])
        plain = Replayer("cpu").apply(recipe, plain, [g], [])
        # NumPy rounds each product before it adds.
        expected = [f32(0.9) * expected[0] + f32(0.1) * g,
                    f32(0.999) * expected[1] + f32(0.001) * (g * g)]
    for name, got in (("fenced", fenced), ("plain", plain)):
        print(name, *(int((np.asarray(a) != b).sum()) for a, b in zip(got, expected)))
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
    if not _has_fma():
        pytest.skip("this CPU has no fused multiply-add to fence off")
    assert lines["plain"] != "0 0"


def _has_fma() -> bool:
    try:
        with open("/proc/cpuinfo") as cpuinfo:
            return " fma " in cpuinfo.read()
    except OSError:
        return False
