"""The example's GPT at the sizes that accelerators train, as abstract arrays on a topology.

Blocks, optimizer, sharding rule and train step are those of `examples/`, the layers one scan. What
a large model adds: with a `model` axis the matrices are split over heads and hidden units too.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import train_lm
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from lm import sharding
from lm.optimizer import make_optimizer

import gockpt_jax as gockpt
from bench.scanned_gpt import GPTConfig, ScannedGPT

__all__ = ["GPTConfig", "abstract_call", "make_mesh"]

MODEL_AXIS = "model"
# Of each layer's leaves, the axis (from the end) that the `model` axis of the mesh splits.
_SPLIT_OVER_MODEL = {
    ("qkv", "kernel"): 2,  # heads, of [layers, width, 3, heads, head width]
    ("out", "kernel"): 3,  # heads, of [layers, heads, head width, width]
    ("up", "kernel"): 1,  # hidden units
    ("up", "bias"): 1,
    ("down", "kernel"): 2,
}


def make_mesh(devices: Sequence[Any], tensor: int) -> Mesh:
    """A mesh of `data` by `model`, or of `data` alone."""
    grid = np.array(devices)
    if tensor == 1:
        return Mesh(grid, (sharding.AXIS,), axis_types=(AxisType.Auto,))
    axes = (sharding.AXIS, MODEL_AXIS)
    return Mesh(grid.reshape(-1, tensor), axes, axis_types=(AxisType.Auto,) * 2)


def abstract_call(
    config: GPTConfig, mesh: Mesh, *, seq_len: int
) -> tuple[Any, tuple[Any, jax.ShapeDtypeStruct]]:
    """The example's train step and what it is called with, one sequence per `data` shard.

    Args:
      config: The network.
      mesh: Of `make_mesh`; ambient (`jax.set_mesh`) when the step is traced.
      seq_len: Tokens per sequence.

    Returns:
      The jitted, donating step, and its arguments `(state, batch)` as shapes with shardings.
    """
    batch_size = mesh.shape[sharding.AXIS]
    target = jax.eval_shape(functools.partial(_init, config, seq_len))
    target = jax.tree_util.tree_map_with_path(functools.partial(_placed, mesh), target)
    batch = jax.ShapeDtypeStruct(
        (batch_size, seq_len + 1), jnp.uint8,
        sharding=NamedSharding(mesh, PartitionSpec(sharding.AXIS)),
    )  # fmt: skip
    placements = jax.tree.map(lambda leaf: leaf.sharding, (target, batch))
    plain = train_lm.make_train_step(placements[0]).__wrapped__
    # Abstract arguments carry no placement of their own, so the placement is the step's.
    step = jax.jit(
        plain, donate_argnums=0, in_shardings=placements, out_shardings=(placements[0], None)
    )
    return step, (target, batch)


def _init(config: GPTConfig, seq_len: int) -> gockpt.GoCkptState:
    model = ScannedGPT(config, context=seq_len)
    params = model.init(jax.random.key(0), jnp.zeros((1, seq_len), jnp.uint8))["params"]
    state = gockpt.GoCkptState.create(
        apply_fn=model.apply, params=params, tx=make_optimizer(steps=10_000)
    )
    return state.replace(step=jnp.zeros((), jnp.int32))


def _placed(mesh: Mesh, path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The example's rule on the axes that the `model` axis leaves."""
    names = tuple(getattr(key, "key", None) for key in path)[-2:]
    spec: list[Any] = [None] * len(leaf.shape)
    free = list(leaf.shape)
    if MODEL_AXIS in mesh.shape and names in _SPLIT_OVER_MODEL:
        axis = len(spec) - _SPLIT_OVER_MODEL[names]
        spec[axis], free[axis] = MODEL_AXIS, 1
    for axis, name in enumerate(sharding.fsdp_spec(tuple(free), mesh.shape[sharding.AXIS])):
        spec[axis] = name or spec[axis]
    placement = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement)
