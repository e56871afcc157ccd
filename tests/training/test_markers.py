"""Markers change a name in the trace and nothing else."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from gockpt_jax import GoCkptState, retain
from gockpt_jax.training.cut import find_cut
from gockpt_jax.training.graph import flatten
from gockpt_jax.training.markers import GRADIENT
from gockpt_jax.training.walk import Leaf

TX = optax.adamw(1e-2)
X = jnp.arange(1.0, 7.0)


def make(cls, tx=TX):
    return cls.create(apply_fn=None, params={"b": jnp.ones(6), "w": jnp.outer(X, X)}, tx=tx)


def step(state, x):
    grads = jax.grad(lambda p: jnp.sum(jnp.tanh(p["w"] @ x + p["b"])))(state.params)
    return state.apply_gradients(grads=grads)


def compiled_text(state):
    """The optimised program without names, source positions and metadata."""
    text = jax.jit(step, donate_argnums=0).lower(state, X).compile().as_text()
    text = re.sub(r", metadata=\\{[^}]*\\}", "", text)
    body = text[text.index("\n") : text.find("\nFileNames")]
    return re.sub(r"%[\w.\-]+", "%", body)


MARKED = {
    "GoCkptState": lambda: make(GoCkptState),
    "retain": lambda: make(TrainState, retain(TX)),
    "both": lambda: make(GoCkptState, retain(TX)),
}


def test_the_very_same_tree():
    stock, ours = make(TrainState), make(GoCkptState)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(ours)]
    assert paths == [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(stock)]
    assert paths[0] == ".step"
    restored = jax.tree.unflatten(jax.tree.structure(ours), jax.tree.leaves(stock))
    assert isinstance(restored, GoCkptState)
    assert isinstance(step(ours, X), GoCkptState)
    jax.tree.map(
        np.testing.assert_array_equal, jax.tree.leaves(jax.jit(step)(ours, X)),
        jax.tree.leaves(jax.jit(step)(stock, X)),
    )  # fmt: skip


def test_retain_keeps_the_optimizers_state_and_extra_arguments():
    assert jax.tree.structure(retain(TX).init(X)) == jax.tree.structure(TX.init(X))
    scaled = optax.GradientTransformationExtraArgs(
        lambda p: (), lambda u, s, p=None, *, by: (u * by, s)
    )
    assert retain(scaled).update(jnp.float32(2.0), (), by=3.0)[0] == 6.0


@pytest.mark.parametrize("marked", MARKED)
def test_the_same_compiled_program(marked):
    assert compiled_text(MARKED[marked]()) == compiled_text(make(TrainState))


@pytest.mark.parametrize("marked", MARKED)
def test_the_cut_is_at_the_mark(marked):
    state = MARKED[marked]()
    graph = flatten(jax.jit(step).trace(state, X).jaxpr)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(state)]
    cut = find_cut(
        [Leaf(*x) for x in zip(paths, graph.inputs, graph.outputs, strict=False)],
        even_for_nothing=False,
    )
    retained = [v for group in cut.groups for v in group.retained]
    assert len(cut.groups) == 2
    assert [(v.op.name, v.op.params["name"]) for v in retained] == [("name", GRADIENT)] * 2
