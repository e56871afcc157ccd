"""How much work it is to analyse a step: so much for each of its equations, however many."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from gockpt_jax.training import step_cut
from gockpt_jax.training.call import Positions

WIDTH, FEW, TIMES = 4, 6, 4
HERE = str(Path(step_cut.__file__).parent)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
DECAYED = optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(1e-3, momentum=0.9))
Step = tuple[Callable[..., Any], Any]


def loss(layers: Any, x: Any) -> Any:
    for p in layers:
        x = x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]
    return jnp.mean(x**2)


def step_of(count: int, gradients: Callable[[Any, Any], Any], tx: Any) -> Step:
    sizes = {"up": (WIDTH, 8), "bias": (8,), "down": (8, WIDTH)}
    layers = [{k: jnp.ones(shape) for k, shape in sizes.items()} for _ in range(count)]

    def step(state: Any, x: Any) -> Any:
        params, opt = state
        updates, opt = tx.update(gradients(params, x), opt, params)
        return optax.apply_updates(params, updates), opt

    return step, (layers, tx.init(layers))


def written_out(count: int) -> Step:
    return step_of(count, jax.grad(loss), CLIPPED)


def in_a_shard_map(count: int) -> Step:
    """All of it, with nothing checked."""
    step, state = step_of(count, lambda p, x: lax.pmean(jax.grad(loss)(p, x), "d"), DECAYED)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs: dict[str, Any] = {"in_specs": (jax.P(), jax.P("d")), "out_specs": jax.P()}
    return jax.shard_map(step, mesh=mesh, check_vma=False, **specs), state


def behind_a_barrier(count: int) -> Step:
    return step_of(count, lambda p, x: lax.optimization_barrier(jax.grad(loss)(p, x)), CLIPPED)


def in_a_loop(count: int) -> Step:
    """Gradients of micro-batches are summed up."""

    def gradients(p: Any, x: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(p, part)), None

        return lax.scan(add, jax.tree.map(jnp.zeros_like, p), x.reshape(4, -1, WIDTH))[0]

    return step_of(count, gradients, CLIPPED)


def in_one_vector(count: int) -> Step:
    """Weights and gradients are slices of one."""

    def matrices(vector: Any) -> list[Any]:
        return [a.reshape(WIDTH, WIDTH) for a in jnp.split(vector, 3 * count)]

    def of_vector(vector: Any, x: Any) -> Any:
        for w in matrices(vector):
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(state: Any, x: Any) -> Any:
        params, moments = state
        vector = jnp.concatenate([p.ravel() for p in params])
        moments = [
            0.9 * m + g
            for m, g in zip(moments, matrices(jax.grad(of_vector)(vector, x)), strict=True)
        ]
        return [p - 1e-3 * m for p, m in zip(params, moments, strict=True)], moments

    ones = [jnp.ones((WIDTH, WIDTH))] * (3 * count)
    return step, (ones, ones)


def calls_to_analyse(step: Callable[..., Any], state: Any) -> int:
    """How many calls of functions of the analysis it takes; whatever the machine, the same."""
    jaxpr = jax.jit(step).trace(state, jnp.ones((8, WIDTH))).jaxpr
    places = tuple(range(len(jax.tree.leaves(state))))
    positions = Positions(places, places, tuple(map(str, places)))
    profile = cProfile.Profile()
    profile.enable()
    step_cut.cut_step(jaxpr, positions, even_for_nothing=False, exact=True)
    profile.disable()
    codes = ((each.code, each.callcount) for each in profile.getstats())
    return sum(n for code, n in codes if getattr(code, "co_filename", "").startswith(HERE))


@pytest.mark.parametrize(
    "steps", [written_out, in_a_shard_map, behind_a_barrier, in_a_loop, in_one_vector]
)
def test_a_step_of_many_layers_is_no_more_work_for_each(steps: Callable[[int], Step]) -> None:
    few, many = (calls_to_analyse(*steps(count)) for count in (FEW, TIMES * FEW))
    assert many < 1.03 * TIMES * few
