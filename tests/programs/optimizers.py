"""One linen `TrainState` step under many optax optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from .common import (
    LEARNING_RATE,
    Job,
    Layout,
    Registry,
    init_train_state,
    make_job,
    make_train_step,
)

PROGRAMS = Registry()


def _kernels(params: Any) -> Any:
    """Return the usual decay mask: matrices, not vectors."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _kernel_labels(params: Any) -> Any:
    return jax.tree.map(lambda p: "kernel" if p.ndim > 1 else "bias", params)


def _clip_adamw() -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, 2, 20, LEARNING_RATE / 10)
    return optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(schedule, weight_decay=0.1, mask=_kernels),
    )


def _inject_hyperparams() -> optax.GradientTransformation:
    schedule = optax.linear_schedule(LEARNING_RATE, LEARNING_RATE / 10, 10)
    return optax.inject_hyperparams(optax.adamw)(learning_rate=schedule, b1=0.8)


def _multi_transform() -> optax.GradientTransformation:
    by_label = {"kernel": optax.adamw(LEARNING_RATE), "bias": optax.sgd(LEARNING_RATE)}
    return optax.multi_transform(by_label, _kernel_labels)


def _l2_adam() -> optax.GradientTransformation:
    return optax.chain(optax.add_decayed_weights(1e-2), optax.adam(LEARNING_RATE))


def _multisteps() -> optax.GradientTransformation:
    """Whose sums are clipped in a branch, in every second step."""
    return optax.MultiSteps(_clip_adamw(), 2).gradient_transformation()


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(LEARNING_RATE),
    "clip_adamw": _clip_adamw,
    "adam_bf16_moments": lambda: optax.adam(LEARNING_RATE, mu_dtype=jnp.bfloat16),
    "lion": lambda: optax.lion(LEARNING_RATE / 10),
    "sgd_momentum": lambda: optax.sgd(LEARNING_RATE, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optax.rmsprop(LEARNING_RATE),
    "lamb": lambda: optax.lamb(LEARNING_RATE, weight_decay=0.1),
    "muon": lambda: optax.contrib.muon(LEARNING_RATE, ns_steps=3),
    "multisteps": _multisteps,
    "inject_hyperparams": _inject_hyperparams,
    "multi_transform": _multi_transform,
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(LEARNING_RATE, warmup_steps=2),
    "l2_adam": _l2_adam,
    "adabelief": lambda: optax.adabelief(LEARNING_RATE),
    "nadamw": lambda: optax.nadamw(LEARNING_RATE),
    "adan": lambda: optax.adan(LEARNING_RATE, weight_decay=0.02),
    "ademamix": lambda: optax.contrib.ademamix(LEARNING_RATE),
}


def _setup(make_tx: Callable[[], optax.GradientTransformation]) -> Callable[[Layout], Job]:
    def setup(layout: Layout) -> Job:
        tx = make_tx()
        return make_job(layout, lambda: init_train_state(tx), make_train_step())

    return setup


for _name, _make_tx in OPTIMIZERS.items():
    PROGRAMS.add(_name, _setup(_make_tx))


@PROGRAMS.program("skips")
def apply_if_finite(layout: Layout) -> Job:
    """The optimizer itself skips the batches whose gradients are not finite, in a branch."""
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(LEARNING_RATE))
    tx = optax.apply_if_finite(clipped, max_consecutive_errors=5)
    return make_job(layout, lambda: init_train_state(tx), make_train_step(), layout.bad_batch)


@PROGRAMS.program("resharded")
def adafactor(layout: Layout) -> Job:
    """Factored moments; the partitioner shards the row and column means that begin replicated."""
    tx = optax.adafactor(LEARNING_RATE, min_dim_size_to_factor=16)
    return make_job(layout, lambda: init_train_state(tx), make_train_step())
