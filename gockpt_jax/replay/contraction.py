"""Whether the CPU backend contracts: rounds a product and the sum it feeds only once."""

import functools

import jax
import numpy as np

from gockpt_jax.compiling import unwatched
from gockpt_jax.replay.engine import replay_device

_WIDTH = 64  # as wide as a vector register, so that vector code is what is asked


@functools.cache
def cpu_contracts() -> bool:
    """Whether programs on the CPU backend of this process use fused multiply-add.

    Asked of a program, not of the processor: `--xla_cpu_max_isa=AVX` takes it away, and which
    architectures have it changes.

    Raises:
      ReplayError: if there is no CPU backend.
    """
    one_and_a_bit = np.full(_WIDTH, 1 + 2.0**-12, np.float32)
    square = one_and_a_bit * one_and_a_bit  # rounded: the bit of 2**-24 is lost
    with jax.default_device(replay_device()), unwatched():
        rest = jax.jit(lambda x, y, z: x * y - z)(one_and_a_bit, one_and_a_bit, square)
        return bool(np.asarray(rest).any())
