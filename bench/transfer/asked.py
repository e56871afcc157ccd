"""What every question about the link is given: how much to move, until when, and the record."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from bench.record import Record

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is moved and how often.

    Attributes:
      sizes_mib: Of the arrays that are pulled.
      busy_mib: Of what is pulled beside a step.
      width: Of the busy step's matrices.
      depth: Products in one step; few, so that many steps run beside a pull.
      repeats: Timed runs of each.
    """

    sizes_mib: tuple[float, ...]
    busy_mib: float
    width: int
    depth: int
    repeats: int

    @classmethod
    def of(cls, platform: str, *, quick: bool) -> "Scale":
        """The scale for a platform; toy size on the CPU backend."""
        if platform == "cpu":
            return cls((0.25, 1), 1, 128, 4, 3)
        if quick:
            return cls((1, 16, 256), 256, 4096, 2, 5)
        return cls((0.0625, 1, 16, 64, 256, 1024), 1024, 8192, 2, 9)


@dataclasses.dataclass
class Asked:
    """What every question is given.

    Attributes:
      record: Takes samples and notes.
      device: The device in question.
      scale: How much.
      until: `time.perf_counter()` at the end of the time.
    """

    record: Record
    device: jax.Device
    scale: Scale
    until: float

    @property
    def is_over(self) -> bool:
        """Whether no further measurement should begin."""
        return time.perf_counter() > self.until

    def add(self, figure: str, *samples: float) -> None:
        """Adds samples to a figure."""
        self.record.add(figure, *samples)

    def note(self, text: str) -> None:
        """Adds a note."""
        self.record.notes.append(text)

    def fresh(self, mib: float, seed: int = 0) -> jax.Array:
        """A float32 array on the device that is nobody else's, finished."""
        size = max(1, int(mib * _MIB) // 4)
        with jax.default_device(self.device):
            return jax.block_until_ready(jnp.arange(size, dtype=jnp.float32) + seed)

    @property
    def pinned(self) -> Any:
        """The sharding of the device's pinned host memory."""
        return SingleDeviceSharding(self.device, memory_kind="pinned_host")
