"""Replay: updates applied to chunks on the CPU backend.

Chunks are flat here: a recipe is elementwise, so a shard's shape does not matter, and leaves of the
same size and recipe share one compiled program.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gockpt_jax.errors import ReplayError
from gockpt_jax.training.recipe import Recipe

Flat = jax.Array | np.ndarray


class Replayer:
    """Applies recipes to host chunks.

    Args:
      platform: Where training runs. For an accelerator's run, products are fenced off from the
        additions they feed, because accelerators do not contract them and the CPU backend would.
        A run on the CPU backend contracts as its own compiler does, and so does its replay.
    """

    def __init__(self, platform: str):
        self._fenced = platform != "cpu"
        # Where training runs on the CPU backend, replay shares its devices' queues. A queue that is
        # full of replays behind a step which waits for another device's part of a collective can
        # keep the threads from which that part would run: then nothing moves again. One at a time.
        self._one_at_a_time = platform == "cpu"
        self.device = replay_device()

    def apply(
        self, recipe: Recipe, states: Sequence[Flat], retained: Sequence[Flat],
        scalars: Sequence[Flat],
    ) -> list[jax.Array]:  # fmt: skip
        """Applies one update to one chunk of a group.

        Args:
          recipe: The group's program.
          states: Old chunks of the group's leaves, 1-d and of one length. Those that are JAX arrays
            are donated: only replay's own results are.
          retained: Chunks of the cut values, likewise.
          scalars: Captured scalars, shape ().

        Returns:
          New chunks, on the CPU backend.

        Raises:
          ReplayError: if the chunks do not fit together.
        """
        sizes = {x.size for x in (*states, *retained)}
        if len(sizes) > 1:
            raise ReplayError(
                f"replay got chunks of different sizes {sorted(sizes)}; please report"
            )
        program = _program(recipe, self._fenced, all(isinstance(x, jax.Array) for x in states))
        with jax.default_device(self.device):
            moved = [_on(self.device, x) for x in states]
            new = list(program(moved, list(retained), list(scalars), np.int32(0)))
        return jax.block_until_ready(new) if self._one_at_a_time else new


def replay_device() -> jax.Device:
    """The CPU device that replays.

    Raises:
      ReplayError: if `JAX_PLATFORMS` leaves no CPU backend beside the accelerator.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ReplayError(
            "replay needs JAX's CPU backend beside the accelerator, but `JAX_PLATFORMS` excludes "
            "it. Unset `JAX_PLATFORMS`, or add cpu to it (for example `JAX_PLATFORMS=cuda,cpu`)."
        ) from error


def _on(device: jax.Device, chunk: Flat) -> jax.Array:
    return chunk if isinstance(chunk, jax.Array) else jax.device_put(chunk, device)


@functools.lru_cache(maxsize=512)
def _program(recipe: Recipe, fenced: bool, donate: bool) -> Callable[..., Sequence[jax.Array]]:
    """One program per recipe; `jax.jit` compiles it once per chunk size."""

    def replay(
        states: list[jax.Array],
        retained: list[jax.Array],
        scalars: list[jax.Array],
        zero: jax.Array,
    ) -> tuple[jax.Array, ...]:
        return recipe.apply(states, retained, scalars, jnp.asarray(zero) if fenced else None)

    # Imported buffers (numpy views) cannot be donated; XLA's own are, so that no fresh pages fault.
    return jax.jit(replay, donate_argnums=(0,) if donate else ())
