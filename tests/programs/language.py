"""Two language models, and the step that trains them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from .common import BATCH, LEARNING_RATE, Job, Layout, Registry, cross_entropy, make_job

PROGRAMS = Registry()

VOCABULARY, LENGTH = 44, 8


def token_batch(n: int) -> np.ndarray:
    """Return batch `n` of sequences that count upwards from a random start by a random stride."""
    rng = np.random.default_rng(n)
    start, stride = rng.integers(0, VOCABULARY, (2, BATCH, 1), dtype=np.int32)
    return (start + stride * np.arange(LENGTH + 1, dtype=np.int32)) % VOCABULARY


class TiedModel(nn.Module):
    """A token model whose output layer is its embedding."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, 40)
        h = nn.Dense(48)(embed(tokens))
        return embed.attend(nn.Dense(40)(nn.gelu(h)))


class Block(nn.Module):
    """Causal attention and a feed-forward layer, before each a norm."""

    heads: int = 2

    @nn.compact
    def __call__(self, h: jax.Array) -> jax.Array:
        batch, length, width = h.shape
        qkv = nn.Dense(3 * width, use_bias=False, dtype=h.dtype, name="qkv")(self._norm(h))
        q, k, v = jnp.split(qkv.reshape(batch, length, self.heads, -1), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = nn.softmax(jnp.where(causal, scores, -1e4), axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape)
        h = h + nn.Dense(width, use_bias=False, dtype=h.dtype, name="proj")(mixed)
        up = nn.relu(nn.Dense(56, dtype=h.dtype, name="up")(self._norm(h)))
        return h + nn.Dense(width, dtype=h.dtype, name="down")(up)

    def _norm(self, h: jax.Array) -> jax.Array:
        return nn.RMSNorm(dtype=h.dtype)(h)


class Layer(nn.Module):
    """A block that is computed again in the backward pass, in the form that `nn.scan` takes."""

    @nn.compact
    def __call__(self, h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return nn.remat(Block)(name="block")(h), None


class Transformer(nn.Module):
    """Two scanned blocks in bf16, as of large models; the logits are fp32."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        h = nn.Embed(VOCABULARY, 32, dtype=jnp.bfloat16, name="tokens")(tokens)
        h = h + nn.Embed(LENGTH, 32, dtype=jnp.bfloat16, name="position")(jnp.arange(LENGTH))
        scanned = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=2)
        h, _ = scanned(name="layers")(h, None)
        return nn.Dense(VOCABULARY, name="logits")(h.astype(jnp.float32))


def _job(layout: Layout, model: nn.Module, tx: optax.GradientTransformation) -> Job:
    """Return the job of a language model that predicts the next token."""

    def init() -> TrainState:
        params = model.init(jax.random.key(0), token_batch(0)[:, :-1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            return cross_entropy(state.apply_fn({"params": params}, tokens[:, :-1]), tokens[:, 1:])

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return make_job(layout, init, step, lambda n: layout.put(token_batch(n)))


@PROGRAMS.program()
def tied_embedding(layout: Layout) -> Job:
    """One matrix for input and output: its gradient is the sum of two."""
    return _job(layout, TiedModel(), optax.adamw(LEARNING_RATE))


@PROGRAMS.program()
def transformer_bf16(layout: Layout) -> Job:
    """A small transformer computed in bf16, with fp32 parameters and clipping."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE))
    return _job(layout, Transformer(), tx)
