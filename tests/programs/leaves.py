"""States with leaves out of the ordinary: frozen, empty, single, integer, boolean."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .common import (
    BATCH,
    CLASSES,
    IDS,
    INPUTS,
    LEARNING_RATE,
    MODEL,
    Job,
    Layout,
    Registry,
    cross_entropy,
    grad_fn,
    init_params,
    make_job,
)

PROGRAMS = Registry()


@PROGRAMS.program("frozen")
def frozen(layout: Layout) -> Job:
    """Updates set to zero, a frozen tree returned as it came, and a leaf that nothing reads."""
    labels = {"first": "train", "head": "freeze"}
    tx = optax.multi_transform(
        {"train": optax.adamw(LEARNING_RATE), "freeze": optax.set_to_zero()}, labels
    )

    def init() -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(3), 2)
        normal = jax.nn.initializers.lecun_normal()
        params = {
            "first": {"kernel": normal(keys[0], (48, 40)), "bias": jnp.zeros(40)},
            "head": {"kernel": normal(keys[1], (40, CLASSES)), "bias": jnp.zeros(CLASSES)},
        }
        encoder = init_params()
        encoder = {name: encoder[name] for name in ("Dense_0", "Embed_0")}
        table = jnp.arange(48.0)
        return {"params": params, "opt": tx.init(params), "encoder": encoder, "table": table}

    def loss_fn(params: Any, encoder: Any, batch: Any) -> jax.Array:
        h = batch["x"] @ encoder["Dense_0"]["kernel"] + encoder["Dense_0"]["bias"]
        h = jax.nn.gelu(h + encoder["Embed_0"]["embedding"][batch["ids"]])
        for layer in ("first", "head"):
            h = jnp.tanh(h) @ params[layer]["kernel"] + params[layer]["bias"]
        return cross_entropy(h, batch["y"])

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], jax.Array]:
        params = state["params"]
        loss, grads = jax.value_and_grad(loss_fn)(params, state["encoder"], batch)
        updates, opt_state = tx.update(grads, state["opt"], params)
        return state | {"params": optax.apply_updates(params, updates), "opt": opt_state}, loss

    return make_job(layout, init, step)


@PROGRAMS.program()
def zero_size(layout: Layout) -> Job:
    """Odd parameters: no elements, no dimensions, one element, prime lengths, in bf16."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE))

    def init() -> TrainState:
        params = init_params() | {
            "empty": jnp.zeros((0,)),
            "empty_rows": jnp.zeros((0, 8)),
            "gain": jnp.float32(1.0),
            "shift": jnp.zeros((1,)),
            "primes": jnp.ones((3, 5, 7)),
            "prime": jnp.ones((13,)),
            "narrow": jnp.ones((11, 3), jnp.bfloat16),
        }
        return TrainState.create(apply_fn=MODEL.apply, params=params, tx=tx)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        names = ("empty", "empty_rows", "gain", "shift", "primes", "prime", "narrow")
        model_params = {name: p for name, p in params.items() if name not in names}
        logits = MODEL.apply({"params": model_params}, batch) * params["gain"] + params["shift"]
        penalty = params["empty"].sum() + params["empty_rows"].sum() + params["shift"].sum() ** 2
        penalty += sum(jnp.sin(params[name]).sum() for name in ("primes", "prime", "narrow"))
        return cross_entropy(logits, batch["y"]) + penalty

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return make_job(layout, init, step)


@PROGRAMS.program()
def int_state(layout: Layout) -> Job:
    """Integer counters and a flag beside the parameters; the flag decides the step size."""
    tx = optax.sgd(LEARNING_RATE, momentum=0.9)

    def init() -> dict[str, Any]:
        params = init_params()
        return {
            "params": params,
            "opt_state": tx.init(params),
            "seen": jnp.zeros((IDS,), jnp.int32),
            "largest": jnp.zeros((INPUTS,), jnp.uint8),
            "samples": jnp.int32(0),
            "even": jnp.bool_(True),
        }

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], jax.Array]:
        loss, grads = grad_fn(state["params"], batch)
        rate = jnp.where(state["even"], 1.0, 0.5)
        grads = jax.tree.map(lambda g: g * rate, grads)
        updates, opt_state = tx.update(grads, state["opt_state"])
        largest = jnp.abs(batch["x"] * 16).max(0).astype(jnp.uint8)
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "seen": state["seen"].at[batch["ids"]].add(1),
            "largest": jnp.maximum(state["largest"], largest),
            "samples": state["samples"] + BATCH,
            "even": ~state["even"],
        }, loss

    return make_job(layout, init, step)


@PROGRAMS.program("one_axis")
def one_layer(layout: Layout) -> Job:
    """Eight leaves, where something else is tested: each of a program costs its tests time."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(LEARNING_RATE))

    def init() -> TrainState:
        kernel = jax.nn.initializers.lecun_normal()(jax.random.key(5), (INPUTS, CLASSES + 1))
        params = {"Dense_0": {"kernel": kernel, "bias": jnp.zeros(CLASSES + 1)}}
        return TrainState.create(apply_fn=None, params=params, tx=tx)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        layer = params["Dense_0"]
        return cross_entropy(batch["x"] @ layer["kernel"] + layer["bias"], batch["y"])

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return make_job(layout, init, step)
