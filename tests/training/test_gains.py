"""How much of the usual models' state leaves early: all that their optimizer allows.

What a model is made of, loops and blocks that are computed again, is no reason to send more of it
late: a rule of the analysis that is right of every program may still give up the usual ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from training_helpers import Analysis, analyse

WIDTH, LAYERS, WORDS = 8, 3, 16
CLIP = optax.clip_by_global_norm(1.0)
CLIPPED = optax.chain(CLIP, optax.adamw(1e-3))
IN_FOURS = optax.MultiSteps(CLIPPED, 4, should_skip_update_fn=optax.skip_not_finite)
RATE = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)


def normalized(x: Any, p: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    return scaled * p["scale"] + p["bias"]


def layer(x: Any, p: Any) -> Any:
    hidden = jax.nn.gelu(normalized(x, p["norm"]) @ p["up"] + p["up_bias"])
    return x + hidden @ p["down"] + p["down_bias"]


def loss_of(layers: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Of a model that predicts words, with its layers applied in some way."""

    def loss(p: Any, ids: Any) -> Any:
        x = layers(p["words"][ids], p["layers"])
        logits = normalized(x, p["norm"]) @ p["words"].T
        of_each = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), ids)
        return of_each.mean()

    return loss


def written_out(x: Any, p: Any) -> Any:
    for n in range(LAYERS):
        x = layer(x, jax.tree.map(lambda a, n=n: a[n], p))
    return x


def scanned(x: Any, p: Any) -> Any:
    return lax.scan(lambda c, q: (layer(c, q), None), x, p)[0]


def computed_again(x: Any, p: Any) -> Any:
    return lax.scan(lambda c, q: (jax.checkpoint(layer)(c, q), None), x, p)[0]


def in_twos(x: Any, p: Any) -> Any:
    """And the turn that is left behind the loop."""
    return lax.scan(lambda c, q: (layer(c, q), None), x, p, unroll=2)[0]


def narrow(x: Any, p: Any) -> Any:
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
    return computed_again(x.astype(jnp.bfloat16), half)


def each_token(x: Any, p: Any) -> Any:
    """Weights are used again in each turn, as of recurrent networks."""
    first = jax.tree.map(lambda a: a[0], p)
    return lax.scan(lambda c, t: (layer(c + t, first),) * 2, x[:, 0], x.swapaxes(0, 1))[1]


def accumulated(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Gradients summed up over two micro-batches."""

    def gradients(p: Any, ids: Any) -> Any:
        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(p, part)), None

        zeros = jax.tree.map(jnp.zeros_like, p)
        total, _ = lax.scan(add, zeros, ids.reshape(2, -1, ids.shape[-1]))
        return jax.tree.map(lambda g: g / 2, total)

    return gradients


def averaged(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Gradients of each device's rows, averaged by hand."""

    def of_rows(p: Any, ids: Any) -> Any:
        return jax.tree.map(lambda g: lax.pmean(g, "d"), jax.grad(loss)(p, ids))

    def gradients(p: Any, ids: Any) -> Any:
        mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = {"in_specs": (jax.P(), jax.P("d")), "out_specs": jax.P(), "check_vma": False}
        return jax.shard_map(of_rows, mesh=mesh, **specs)(p, ids)

    return gradients


MODELS: dict[str, Callable[[Any, Any], Any]] = {
    "computed again": jax.grad(loss_of(computed_again)),
    "written out": jax.grad(loss_of(written_out)),
    "scanned": jax.grad(loss_of(scanned)),
    "in twos": jax.grad(loss_of(in_twos)),
    "in bfloat16": jax.grad(loss_of(narrow)),
    "recurrent": jax.grad(loss_of(lambda x, p: each_token(x, p).swapaxes(0, 1))),
    "accumulated": accumulated(loss_of(written_out)),
    "accumulated and scanned": accumulated(loss_of(computed_again)),
    "averaged by hand": averaged(loss_of(scanned)),
}
# With the share of the state's bytes that leaves early: of Adam's three arrays two, of Lion's all.
# First what most models are made of and trained with: with it the others are tried.
OPTIMIZERS: dict[str, tuple[optax.GradientTransformation, float]] = {
    "clipped AdamW": (optax.chain(CLIP, optax.adamw(RATE, weight_decay=0.1)), 2 / 3),
    "adam": (optax.adam(1e-3), 2 / 3),
    "clipped by units": (optax.chain(optax.adaptive_grad_clip(0.01), optax.adamw(1e-3)), 2 / 3),
    "clipped by values": (optax.chain(optax.clip(1.0), optax.adamw(1e-3)), 2 / 3),
    "clipped Lion": (optax.chain(CLIP, optax.lion(1e-3)), 1.0),
    "clipped AMSGrad": (optax.chain(CLIP, optax.amsgrad(1e-3)), 1 / 2),
    # They keep the gradient, or what they make of it, which is retained for others.
    "clipped Adan": (optax.chain(CLIP, optax.adan(1e-3)), 4 / 5),
    "optimistic Adam": (optax.optimistic_adam_v2(1e-3), 1.0),
    "only if finite": (optax.chain(CLIP, optax.apply_if_finite(optax.adam(1e-3), 5)), 2 / 3),
    "clipped if finite": (optax.apply_if_finite(CLIPPED, 5), 2 / 3),
    # Its fourth array are the sums, whose gradients would have to follow beside the clipped ones.
    "clipped in fours": (IN_FOURS.gradient_transformation(), 1 / 2),
}


def analysed(model: str, optimizer: str) -> Analysis:
    """A step of one under the other."""
    gradients, (tx, _) = MODELS[model], OPTIMIZERS[optimizer]

    def step(state: Any, ids: Any) -> Any:
        params, opt = state
        updates, opt = tx.update(gradients(params, ids), opt, params)
        return optax.apply_updates(params, updates), opt

    shapes = {
        "words": (WORDS, WIDTH),
        "norm": {"scale": (WIDTH,), "bias": (WIDTH,)},
        "layers": {
            "norm": {"scale": (LAYERS, WIDTH), "bias": (LAYERS, WIDTH)},
            "up": (LAYERS, WIDTH, 2 * WIDTH),
            "up_bias": (LAYERS, 2 * WIDTH),
            "down": (LAYERS, 2 * WIDTH, WIDTH),
            "down_bias": (LAYERS, WIDTH),
        },
    }
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32),
        shapes, is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip
    return analyse(step, (params, tx.init(params)), jnp.asarray(rng.integers(0, WORDS, (4, 6))))


@pytest.mark.sampled
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_a_model_is_made_of_makes_nothing_late(model: str, optimizer: str) -> None:
    found = analysed(model, optimizer)
    sizes = [leaf.old.nbytes for leaf in found.leaves]
    early = sum(sizes[j] for group in found.cut.groups for j in group.leaves)
    expected = OPTIMIZERS[optimizer][1]
    assert early / sum(sizes) == pytest.approx(expected, rel=0.01), found.late


@pytest.mark.sampled
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", ["clipped AdamW", "clipped if finite"])
def test_what_leaves_early_of_a_model_is_what_its_step_makes(model: str, optimizer: str) -> None:
    found = analysed(model, optimizer)
    new, cut = found.run()
    compared = [
        np.testing.assert_array_equal(leaf, new[j])
        for fence in (None, np.int32(0))  # for a CPU's run, and for an accelerator's
        for j, leaf in found.replayed(cut, fence)
    ]
    assert len(compared) == 4 * 9  # both of the moments, twice
