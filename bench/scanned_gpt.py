"""The example's GPT as large models are trained: its layers scanned and rematerialised.

A program of 88 layers compiles like one of a few, and the state has few, large leaves.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from lm.model import VOCABULARY, Block, GPTConfig

__all__ = ["VOCABULARY", "GPTConfig", "ScannedGPT"]


class _Layer(nn.Module):
    """The example's block, in the form that `nn.scan` takes."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return nn.remat(Block)(self.config, name="block")(x), None


class ScannedGPT(nn.Module):
    """The example's GPT, its layers in scanned segments.

    Attributes:
      config: The network.
      context: Tokens per sequence, at most.
      segments: Of layers, each scanned by itself; they divide the layers.
      dtype: What the matrix products compute in; parameters are float32.
    """

    config: GPTConfig
    context: int
    segments: int = 1
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps integers `[batch, time]` to float32 logits `[batch, time, VOCABULARY]`."""
        width, normal = self.config.width, nn.initializers.normal(0.02)
        embed = nn.Embed(VOCABULARY, width, dtype=self.dtype, embedding_init=normal, name="tokens")
        position = nn.Embed(
            self.context, width, dtype=self.dtype, embedding_init=normal, name="positions"
        )
        x = embed(tokens) + position(jnp.arange(tokens.shape[-1]))
        segment = nn.scan(
            _Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.config.layers // self.segments,
        )
        for i in range(self.segments):
            x, _ = segment(self.config, name=f"segment_{i}")(x, None)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return embed.attend(x).astype(jnp.float32)
