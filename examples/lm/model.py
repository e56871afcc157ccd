"""A decoder-only transformer over bytes (GPT-2's blocks), in Flax linen."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from lm.sharding import shard_batch

VOCABULARY = 256  # Every byte is a token: no tokenizer, no downloads.


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The shape of the network."""

    layers: int
    heads: int
    width: int


SIZES = {
    "pico": GPTConfig(layers=1, heads=2, width=64),  # 0.07 M parameters, for tests
    "nano": GPTConfig(layers=4, heads=6, width=192),  # 1.9 M, for a CPU
    "small": GPTConfig(layers=8, heads=8, width=512),  # 25 M
    # GPT-2's twelve blocks: 86 M here, 124 M there, where the vocabulary holds 50,257 entries.
    "gpt2": GPTConfig(layers=12, heads=12, width=768),
}


def _normal(stddev: float = 0.02) -> nn.initializers.Initializer:
    return nn.initializers.normal(stddev)


class Attention(nn.Module):
    """Causal self-attention."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Mix `[batch, time, width]` along time."""
        cfg = self.config
        head_width = cfg.width // cfg.heads
        # No bias: softmax cancels that of the keys, whose gradient is rounding noise, which Adam's
        # division then blows up to full-sized updates.
        qkv = nn.DenseGeneral(
            (3, cfg.heads, head_width),
            use_bias=False,
            dtype=x.dtype,
            kernel_init=_normal(),
            name="qkv",
        )(x)
        query, key, value = jnp.moveaxis(qkv, -3, 0)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return nn.DenseGeneral(
            cfg.width,
            axis=(-2, -1),
            dtype=x.dtype,
            # Each block adds twice to the residual stream: its variance must not grow with depth.
            kernel_init=_normal(0.02 / (2 * cfg.layers) ** 0.5),
            name="out",
        )(mixed)


class MLP(nn.Module):
    """The position-wise half of a block."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Transform `[batch, time, width]` at each position."""
        cfg = self.config
        x = nn.Dense(4 * cfg.width, dtype=x.dtype, kernel_init=_normal(), name="up")(x)
        residual_init = _normal(0.02 / (2 * cfg.layers) ** 0.5)
        return nn.Dense(cfg.width, dtype=x.dtype, kernel_init=residual_init, name="down")(
            nn.gelu(x)
        )


class Block(nn.Module):
    """A pre-norm transformer block."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Add attention, then the MLP, to the residual stream `[batch, time, width]`."""
        # Without this the partitioner may shard the activations like the weights, along `width`,
        # and move activations instead of weights.
        x = shard_batch(x)
        x += Attention(self.config, name="attention")(nn.LayerNorm(dtype=x.dtype, name="norm_1")(x))
        x += MLP(self.config, name="mlp")(nn.LayerNorm(dtype=x.dtype, name="norm_2")(x))
        return x


class GPT(nn.Module):
    """Bytes in, logits of the next byte out.

    Parameters are float32; `dtype` is what the matrix products compute in.
    """

    config: GPTConfig
    context: int
    dtype: jnp.dtype = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map integers `[batch, time]` to float32 logits `[batch, time, VOCABULARY]`."""
        width = self.config.width
        embed = nn.Embed(
            VOCABULARY, width, dtype=self.dtype, embedding_init=_normal(), name="tokens"
        )
        position = nn.Embed(
            self.context, width, dtype=self.dtype, embedding_init=_normal(), name="positions"
        )
        x = embed(tokens) + position(jnp.arange(tokens.shape[-1]))
        for i in range(self.config.layers):
            x = Block(self.config, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return embed.attend(x).astype(jnp.float32)
