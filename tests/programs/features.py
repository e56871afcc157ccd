"""Steps that do more than gradient and optimizer: randomness, averages, scaling, skips, edits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .common import (
    BATCH,
    LEARNING_RATE,
    MLP,
    MODEL,
    Job,
    Layout,
    Registry,
    cross_entropy,
    grad_fn,
    init_params,
    init_train_state,
    init_variables,
    loss_fn,
    make_job,
)

PROGRAMS = Registry()


def _where(ok: jax.Array, new: Any, old: Any) -> Any:
    """Take the new tree or the old one, leaf by leaf, without a branch."""
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


class BatchNormState(TrainState):
    """A train state with running statistics and a key."""

    batch_stats: Any
    key: jax.Array


def _dropout_job(layout: Layout, make_key: Callable[[int], jax.Array]) -> Job:
    model = MLP(batch_norm=True, dropout=0.2)
    tx = optax.adamw(LEARNING_RATE)

    def init() -> BatchNormState:
        return BatchNormState.create(
            apply_fn=model.apply, tx=tx, key=make_key(7), **init_variables(model)
        )

    def step(state: BatchNormState, batch: Any) -> tuple[BatchNormState, jax.Array]:
        key, dropout_key = jax.random.split(state.key)

        def loss_fn(params: Any) -> tuple[jax.Array, Any]:
            logits, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch,
                mutable=["batch_stats"],
                rngs={"dropout": dropout_key},
            )
            return cross_entropy(logits, batch["y"]), updates["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats, key=key), loss

    return make_job(layout, init, step)


@PROGRAMS.program("typed_key")
def batch_stats_dropout(layout: Layout) -> Job:
    """BatchNorm statistics, and a typed key that is split in each step."""
    return _dropout_job(layout, jax.random.key)


@PROGRAMS.program()
def dropout_raw_key(layout: Layout) -> Job:
    """The same with a raw uint32 key."""
    return _dropout_job(layout, jax.random.PRNGKey)


class EmaState(TrainState):
    """A train state with an average of the parameters."""

    ema: Any


@PROGRAMS.program()
def ema(layout: Layout) -> Job:
    """An average of the parameters, taken after the update."""
    tx = optax.adamw(LEARNING_RATE)

    def init() -> EmaState:
        params = init_params()
        return EmaState.create(apply_fn=MODEL.apply, params=params, tx=tx, ema=params)

    def step(state: EmaState, batch: Any) -> tuple[EmaState, jax.Array]:
        loss, grads = grad_fn(state.params, batch)
        state = state.apply_gradients(grads=grads)
        average = optax.incremental_update(state.params, state.ema, 0.1)
        return state.replace(ema=average), loss

    return make_job(layout, init, step)


@PROGRAMS.program()
def grad_accumulation(layout: Layout) -> Job:
    """Gradients summed over microbatches by a scan, then averaged and clipped."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(LEARNING_RATE))
    micro = 2

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        def body(carry: Any, microbatch: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, grad_fn(state.params, microbatch)), None

        # Microbatch i takes the rows i, i + micro, ...: so each device keeps its own rows.
        parts = jax.tree.map(
            lambda x: x.reshape(BATCH // micro, micro, *x.shape[1:]).swapaxes(0, 1), batch
        )
        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        (loss, grads), _ = jax.lax.scan(body, zeros, parts)
        grads = jax.tree.map(lambda g: g / micro, grads)
        return state.apply_gradients(grads=grads), loss / micro

    return make_job(layout, lambda: init_train_state(tx), step)


@PROGRAMS.program("skips")
def skip_step(layout: Layout) -> Job:
    """Parameters and optimizer state stay as they are when the loss is not finite."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE))

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        loss, grads = grad_fn(state.params, batch)
        new = state.apply_gradients(grads=grads)
        params, opt_state = _where(
            jnp.isfinite(loss), (new.params, new.opt_state), (state.params, state.opt_state)
        )
        return new.replace(params=params, opt_state=opt_state), loss

    return make_job(layout, lambda: init_train_state(tx), step, layout.bad_batch)


@PROGRAMS.program("skips")
def loss_scale(layout: Layout) -> Job:
    """A dynamic loss scale: halved and the step skipped on overflow, doubled after two good."""
    tx = optax.adamw(LEARNING_RATE)

    def init() -> dict[str, Any]:
        params = init_params()
        scale, good = jnp.float32(2**10), jnp.int32(0)
        return {"params": params, "opt_state": tx.init(params), "scale": scale, "good": good}

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], jax.Array]:
        params, opt_state, scale = state["params"], state["opt_state"], state["scale"]
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, batch) * scale)(params)
        grads = jax.tree.map(lambda g: g / scale, grads)
        ok = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        good = jnp.where(ok, state["good"] + 1, 0)
        grown = jnp.where(good >= 2, scale * 2, scale)
        return {
            "params": _where(ok, new_params, params),
            "opt_state": _where(ok, new_opt_state, opt_state),
            "scale": jnp.where(ok, grown, scale / 2),
            "good": jnp.where(good >= 2, 0, good),
        }, loss / scale

    return make_job(layout, init, step, layout.bad_batch)


@PROGRAMS.program()
def param_edit(layout: Layout) -> Job:
    """Parameters edited after the optimizer: matrices clipped, a bias moved against its load."""
    tx = optax.adamw(LEARNING_RATE)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> tuple[jax.Array, jax.Array]:
            logits, stats = state.apply_fn({"params": params}, batch, mutable=["stats"])
            return cross_entropy(logits, batch["y"]), stats["stats"]["load"]

        (loss, load), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads)
        params = jax.tree.map(lambda p: jnp.clip(p, -0.3, 0.3) if p.ndim > 1 else p, state.params)
        dense = params["Dense_1"]
        bias = dense["bias"] + 1e-3 * jnp.sign(load.mean() - load)
        return state.replace(params=params | {"Dense_1": dense | {"bias": bias}}), loss

    return make_job(layout, lambda: init_train_state(tx), step)
