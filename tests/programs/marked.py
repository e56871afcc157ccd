"""The same updates with their gradients marked, in both ways that gockpt_jax offers.

gockpt_jax is imported when a program is built: `programs` must load where it is not installed.
"""

from __future__ import annotations

import optax

from .common import (
    LEARNING_RATE,
    MODEL,
    Job,
    Layout,
    Registry,
    init_params,
    init_train_state,
    make_job,
    make_train_step,
)

PROGRAMS = Registry()


def _tx() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(LEARNING_RATE))


@PROGRAMS.program()
def gockpt_state(layout: Layout) -> Job:
    """`GoCkptState` in place of `TrainState`."""
    import gockpt_jax as gockpt

    tx = _tx()

    def init() -> gockpt.GoCkptState:
        return gockpt.GoCkptState.create(apply_fn=MODEL.apply, params=init_params(), tx=tx)

    return make_job(layout, init, make_train_step())


@PROGRAMS.program()
def retained(layout: Layout) -> Job:
    """`retain(tx)` around a part of the chain: the mark lies behind the clipping."""
    import gockpt_jax as gockpt

    tx = optax.chain(optax.clip_by_global_norm(0.5), gockpt.retain(optax.adamw(LEARNING_RATE)))
    return make_job(layout, lambda: init_train_state(tx), make_train_step())
