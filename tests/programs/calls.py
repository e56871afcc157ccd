"""One update, called in the many ways in which loops call their step."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .common import (
    INPUTS,
    LEARNING_RATE,
    Job,
    Layout,
    Registry,
    cross_entropy,
    grad_fn,
    init_params,
    init_train_state,
    make_job,
    make_train_step,
    numpy_batch,
)

PROGRAMS = Registry()

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE))


def _init() -> TrainState:
    return init_train_state(TX)


def _init_pair() -> tuple[Any, Any]:
    params = init_params()
    return params, TX.init(params)


def _update(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    loss, grads = grad_fn(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


@PROGRAMS.program()
def params_opt_state(layout: Layout) -> Job:
    """Two state arguments, returned first."""

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        return _update(params, opt_state, batch)

    return Job(
        layout.maker(_init_pair),
        jax.jit(step, donate_argnums=(0, 1)),
        lambda f, state, n: f(*state, layout.batch(n))[:2],
        {"state": (0, 1)},
    )


@PROGRAMS.program()
def loss_first(layout: Layout) -> Job:
    """Two state arguments, returned after the loss."""

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[jax.Array, Any, Any]:
        params, opt_state, loss = _update(params, opt_state, batch)
        return loss, params, opt_state

    return Job(
        layout.maker(_init_pair),
        jax.jit(step, donate_argnums=(0, 1)),
        lambda f, state, n: f(*state, layout.batch(n))[1:],
        {"state": (0, 1), "state_out": (1, 2)},
    )


@PROGRAMS.program()
def donate_argnames(layout: Layout) -> Job:
    """State and batch by keyword."""
    return Job(
        layout.maker(_init),
        jax.jit(make_train_step(), donate_argnames="state"),
        lambda f, state, n: f(state=state, batch=layout.batch(n))[0],
        {"state": "state"},
    )


def _static_step(state: TrainState, batch: Any, train: bool, mode: str) -> tuple[TrainState, Any]:
    """Take a step whose arguments decide at trace time what it computes."""

    def loss_fn(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch, train=train)
        if mode == "mse":
            return jnp.square(logits - jax.nn.one_hot(batch["y"], logits.shape[-1])).mean()
        return cross_entropy(logits, batch["y"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@PROGRAMS.program("static")
def static_argnums(layout: Layout) -> Job:
    """Static arguments by position, one of them before the state."""

    def step(mode: str, state: TrainState, batch: Any, train: bool) -> tuple[TrainState, Any]:
        return _static_step(state, batch, train, mode)

    return Job(
        layout.maker(_init),
        jax.jit(step, static_argnums=(0, 3), donate_argnums=1),
        lambda f, state, n: f("mse", state, layout.batch(n), True)[0],
        {"state": 1, "state_out": 0},
    )


@PROGRAMS.program("static")
def static_argnames(layout: Layout) -> Job:
    """Static arguments by name."""

    def step(state: TrainState, batch: Any, *, train: bool, mode: str) -> tuple[TrainState, Any]:
        return _static_step(state, batch, train, mode)

    return Job(
        layout.maker(_init),
        jax.jit(step, static_argnames=("train", "mode"), donate_argnums=0),
        lambda f, state, n: f(state, layout.batch(n), train=True, mode="xent")[0],
    )


@PROGRAMS.program()
def jit_shardings(layout: Layout) -> Job:
    """Shardings of state, batch and loss given to jit as trees."""
    shardings = layout.shardings(jax.eval_shape(_init))
    step = jax.jit(
        make_train_step(),
        donate_argnums=0,
        in_shardings=(shardings, layout.sharding("fsdp")),
        out_shardings=(shardings, layout.sharding()),
    )
    return Job(layout.maker(_init), step, lambda f, state, n: f(state, layout.batch(n))[0])


@PROGRAMS.program("resharded")
def resharded(layout: Layout) -> Job:
    """The first state is replicated (uncommitted on one device), all later ones are sharded."""
    step = jax.jit(
        make_train_step(),
        donate_argnums=0,
        out_shardings=(layout.shardings(jax.eval_shape(_init)), None),
    )
    replicated = None if layout.mesh is None else layout.sharding()
    make_state = jax.jit(_init, out_shardings=replicated)
    return Job(make_state, step, lambda f, state, n: f(state, layout.batch(n))[0])


@PROGRAMS.program("resharded", "replicated")
def uncommitted_start(layout: Layout) -> Job:
    """The first state lies on the default device, and only the batch names the mesh."""
    return dataclasses.replace(
        make_job(layout, _init, make_train_step()), state=lambda: jax.jit(_init)()
    )


@PROGRAMS.program("python_scalar")
def python_int_step(layout: Layout) -> Job:
    """The state of `TrainState.create` as it is: its step is a Python int until the first call."""
    make = layout.maker(_init)
    return dataclasses.replace(
        make_job(layout, _init, make_train_step()), state=lambda: make().replace(step=0)
    )


@PROGRAMS.program("no_donation")
def no_donation(layout: Layout) -> Job:
    """A step that donates nothing."""
    step = jax.jit(make_train_step())
    return Job(layout.maker(_init), step, lambda f, state, n: f(state, layout.batch(n))[0])


@PROGRAMS.program()
def state_alone(layout: Layout) -> Job:
    """The state is the whole result."""
    train_step = make_train_step()
    step = jax.jit(lambda state, batch: train_step(state, batch)[0], donate_argnums=0)
    return Job(layout.maker(_init), step, lambda f, state, n: f(state, layout.batch(n)))


@PROGRAMS.program()
def dict_state(layout: Layout) -> Job:
    """A dict as state, metrics as second result; the update has its own `jit` around an array."""
    shift = jnp.linspace(-0.1, 0.1, INPUTS)

    def init() -> dict[str, Any]:
        params, opt_state = _init_pair()
        return {"step": jnp.int32(0), "params": params, "opt_state": opt_state}

    @jax.jit
    def update(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        return _update(params, opt_state, batch | {"x": batch["x"] + shift})

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        params, opt_state, loss = update(state["params"], state["opt_state"], batch)
        metrics = {"loss": loss, "param_count": sum(p.size for p in jax.tree.leaves(params))}
        return {"step": state["step"] + 1, "params": params, "opt_state": opt_state}, metrics

    return make_job(layout, init, step)


class Nested(NamedTuple):
    """A state that is a tuple itself, with tuples inside."""

    model: tuple[Any, Any]
    step: jax.Array


@PROGRAMS.program()
def nested_tuple(layout: Layout) -> Job:
    """Tuples within a NamedTuple, as one state argument."""

    def init() -> Nested:
        return Nested(_init_pair(), jnp.int32(0))

    def step(state: Nested, batch: Any) -> tuple[Nested, jax.Array]:
        params, opt_state, loss = _update(*state.model, batch)
        return Nested((params, opt_state), state.step + 1), loss

    return make_job(layout, init, step)


@PROGRAMS.program()
def numpy_batches(layout: Layout) -> Job:
    """Batches are numpy arrays, so that jit itself transfers them."""
    return make_job(layout, _init, make_train_step(), numpy_batch)


@PROGRAMS.program()
def rng_argument(layout: Layout) -> Job:
    """A key as a third argument, made outside for each step."""

    def step(state: TrainState, batch: Any, key: jax.Array) -> tuple[TrainState, jax.Array]:
        noise = 0.1 * jax.random.normal(key, batch["x"].shape)
        loss, grads = grad_fn(state.params, batch | {"x": batch["x"] + noise})
        return state.apply_gradients(grads=grads), loss

    return Job(
        layout.maker(_init),
        jax.jit(step, donate_argnums=0),
        lambda f, state, n: f(state, layout.batch(n), jax.random.key(n))[0],
    )
