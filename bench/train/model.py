"""The training job of `bench train`: the example's GPT over bytes, its optimizer and its text.

Layers are scanned in a few segments, so that the state has many leaves of a few hundred megabytes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from lm import data
from lm.optimizer import make_optimizer
from lm.sharding import AXIS

from bench.scanned_gpt import VOCABULARY, GPTConfig, ScannedGPT

STATE_BYTES_PER_PARAMETER = 12  # fp32: itself and Adam's two moments
_BATCHES = 16  # different ones, on the device beforehand: no loader in the measurement


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and its batch.

    Attributes:
      layers: Blocks of the transformer, a multiple of the segments.
      width: Of the residual stream; heads are 64 wide.
      batch: Excerpts per step.
      length: Bytes per excerpt.
      segments: Of scanned layers.
    """

    layers: int
    width: int
    batch: int
    length: int
    segments: int = 4

    @property
    def parameters(self) -> int:
        """About how many: twelve matrices of width x width per layer."""
        return 12 * self.layers * self.width**2 + (VOCABULARY + self.length) * self.width

    @property
    def flops(self) -> int:
        """About how many operations one step takes, rematerialised: 8 per parameter and token."""
        return 8 * self.parameters * self.batch * self.length

    @property
    def state_bytes(self) -> int:
        """About the bytes of parameters and optimizer state."""
        return STATE_BYTES_PER_PARAMETER * self.parameters


SIZES = {
    "toy": Size(2, 64, 2, 32, segments=1),  # 0.1 M, for tests
    "3m": Size(4, 256, 4, 64),
    "10m": Size(8, 320, 4, 64),
    "100m": Size(12, 832, 8, 512),
    "300m": Size(24, 1024, 8, 1024),
    "340m_apart": Size(12, 1536, 8, 1024, segments=12),  # 4.1 GB, each layer's arrays by themselves
    "800m": Size(16, 2048, 8, 1024),  # 9.7 GB of state
    "1.2b": Size(24, 2048, 8, 1024),
    "1.7b": Size(30, 2176, 8, 1024, segments=5),  # 20.5 GB: what the aims ask for, at 80 GB
    "2b": Size(40, 2048, 8, 1024),  # 24.2 GB
    "2.8b": Size(36, 2560, 8, 1024),  # 34 GB
    "4.2b": Size(40, 2944, 8, 1024),  # 50 GB
}


def one_device_mesh() -> jax.sharding.Mesh:
    """A mesh of the first device alone, for `jax.set_mesh`."""
    axes = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((1,), (AXIS,), axis_types=axes, devices=jax.devices()[:1])


def tiny(size: Size) -> Size:
    """The same layers and segments, for a rehearsal: as many arrays, with little in them."""
    return dataclasses.replace(size, width=64, batch=2, length=32)


@dataclasses.dataclass
class Job:
    """What all modes train.

    Attributes:
      init: Makes a fresh state on the device.
      donating: The step `(state, batch) -> (state, loss)`, jitted as training runs it: the new
        state takes the old one's memory.
      keeping: It, jitted without donation.
      batches: On the device; step n takes number n modulo their count.
    """

    init: Any
    donating: Any
    keeping: Any
    batches: list[jax.Array]


def make_job(size: Size, dtype: Any) -> Job:
    """Makes the job; call it, and all of its functions, under `jax.set_mesh`."""
    config = GPTConfig(layers=size.layers, heads=size.width // 64, width=size.width)
    model = ScannedGPT(config, size.length, size.segments, dtype)
    optimizer = make_optimizer(100_000)

    def init() -> TrainState:
        tokens = jnp.zeros((size.batch, size.length), jnp.int32)
        params = model.init(jax.random.key(0), tokens)["params"]
        state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)
        return state.replace(step=jnp.zeros((), jnp.int32))

    def update(state: TrainState, batch: jax.Array) -> tuple[TrainState, jax.Array]:
        batch = batch.astype(jnp.int32)

        def loss_fn(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    text = data.load_corpus()
    batches = [
        jnp.asarray(data.batch(text, seed=0, step=n, size=size.batch, length=size.length))
        for n in range(_BATCHES)
    ]
    return Job(jax.jit(init), jax.jit(update, donate_argnums=0), jax.jit(update), batches)
