"""What a wrapped step's second call adds, once, on the trainer's thread, by the state's leaves.

There the step is analysed, and at the call behind it the armed step is lowered. Beside that is what
`jax.jit` itself takes on that thread to trace and lower the same step. A GPT whose layers are apart
has the many leaves. Seconds are the thread's own processor time, so compiling is in none of them.
"""

import gc
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from lm.model import GPT, GPTConfig
from lm.optimizer import make_optimizer
from lm.sharding import local_mesh

from bench.record import Record
from gockpt_jax import _compat
from gockpt_jax.training.armed import with_outputs
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.program import StepProgram

_LAYERS, _QUICK_LAYERS = (8, 32, 128), (2, 8)
_REPEATS, _QUICK_REPEATS = 5, 3
_LENGTH, _WIDTH = 8, 16  # neither analysis nor tracing looks at sizes
_NOTES = [
    "N leaves/analysis_over_jit, lowering_over_jit: processor time of the trainer's thread for the "
    "step's analysis, and for lowering the armed step, over that of tracing and lowering the step "
    "for the user. In turns, with JAX's caches emptied before each.",
    "N leaves/analysis_us_per_leaf: its microseconds for each leaf of the state.",
]


def run(quick: bool) -> Record:
    """Measures models of some numbers of layers."""
    record = Record("analysis", notes=list(_NOTES))
    with jax.set_mesh(local_mesh()):
        for layers in _QUICK_LAYERS if quick else _LAYERS:
            _measure(layers, _QUICK_REPEATS if quick else _REPEATS, record)
    return record


def _measure(layers: int, repeats: int, record: Record) -> None:
    state, batch, update = _model(layers)
    leaves = len(jax.tree.leaves(state))
    _secs(state, batch, update)  # warms up
    for _ in range(repeats):
        own, analysis, lowering = _secs(state, batch, update)
        record.add(f"{leaves} leaves/analysis_over_jit", analysis / own)
        record.add(f"{leaves} leaves/lowering_over_jit", lowering / own)
        record.add(f"{leaves} leaves/analysis_us_per_leaf", analysis / leaves * 1e6)


def _secs(state: TrainState, batch: jax.Array, update: Callable[..., Any]) -> Sequence[float]:
    """Of processor time: for tracing and lowering, for the analysis, for the armed step."""
    jax.clear_caches()
    gc.collect()
    step = jax.jit(update, donate_argnums=0)
    times = [time.thread_time()]
    traced = step.trace(state, batch)
    traced.lower()
    times.append(time.thread_time())
    form = CallForm(step, 0, _compat.jit_settings(step))
    program = StepProgram(traced, form, (state, batch), {}, even_for_nothing=False)
    times.append(time.thread_time())
    armed = jax.jit(with_outputs(traced.jaxpr, program.cut.sites), donate_argnums=0)
    armed.lower(*traced.jaxpr.in_avals)
    times.append(time.thread_time())
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _model(layers: int) -> tuple[TrainState, jax.Array, Callable[..., Any]]:
    model = GPT(GPTConfig(layers=layers, heads=1, width=_WIDTH), _LENGTH)
    batch = jnp.zeros((2, _LENGTH + 1), jnp.int32)

    def init() -> TrainState:
        params = model.init(jax.random.key(0), batch[:, 1:])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=make_optimizer(100))

    def update(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return jax.eval_shape(init), batch, update
