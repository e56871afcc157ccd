"""Arrays whose bytes are on the host, or will be: what the storage room writes.

A `HostArray` takes the place of a `jax.Array` leaf in the tree that goes to Orbax. It says what the
global array looks like and which boxes of it this process writes; the bytes of each box follow
later, by a promise, so that writing starts while other boxes are still being replayed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gockpt_jax.promise import Promise
from gockpt_jax.storage.files import grid
from gockpt_jax.transfer.chunks import is_key_type


class HostShard:
    """One box of a global array that this process writes, exactly once.

    The promise belongs to whoever keeps it. To give a save up, set an exception: it fails the whole
    save, and nothing of it becomes visible.

    Args:
      index: One slice of step 1 per dimension, as in `jax.Shard.index` (`slice(None)` is the
        whole dimension).
      data: Becomes an ndarray of the box's shape and the array's dtype. The writer does not
        copy it: its bytes must not change until `on_release` was called.
      on_release: Called once, when the writer needs the bytes no more, because they are written
        or because the save failed. It runs on the writer's thread and must neither block nor
        raise.
    """

    __slots__ = ("_data", "_on_release", "index")

    def __init__(
        self,
        index: tuple[slice, ...],
        data: Promise[np.ndarray[Any, Any]],
        on_release: Callable[[], None] | None = None,
    ) -> None:
        self.index = index
        self._data: Promise[np.ndarray[Any, Any]] | None = data
        self._on_release = on_release

    @property
    def data(self) -> Promise[np.ndarray[Any, Any]]:
        """The box's bytes, once they have come; RuntimeError once they have been given back."""
        if self._data is None:
            raise RuntimeError(
                f"The bytes of the box {self.index} were given back after an earlier save. A"
                " HostArray is written once: make a new one for every save."
            )
        return self._data

    @property
    def released(self) -> bool:
        """Whether the writer has given the bytes back."""
        return self._data is None

    def release(self) -> None:
        """Drops the bytes; the second and later calls do nothing."""
        if self._data is None:
            return
        self._data = None
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def box(self, shape: Sequence[int]) -> grid.Box:
        """Returns `index` within an array of `shape`, with explicit starts and stops.

        Raises:
          ValueError: The index has another rank than `shape`, or a step other than 1.
        """
        if len(self.index) != len(shape):
            raise ValueError(f"`index`: expected {len(shape)} slices, got {self.index}.")
        if any(s.step not in (None, 1) for s in self.index):
            raise ValueError(f"`index`: expected slices of step 1, got {self.index}.")
        return grid.explicit(self.index, shape)


class HostArray:
    """A leaf that stands for a `jax.Array`; its bytes are on the host, or will be.

    Deliberately not a registered pytree: Orbax must see it as one leaf.

    Args:
      shape: The global shape.
      dtype: The dtype of the data.
      sharding: The training sharding. It is a calculator for the chunk layout and is recorded in
        the checkpoint; no data moves to its devices.
      shards: The boxes that this process writes. All processes together must cover the array.
      key_impl: For typed PRNG keys the name of their implementation; the data is the key data.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        sharding: jax.sharding.Sharding,
        shards: Sequence[HostShard],
        key_impl: str | None = None,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.sharding = sharding
        self.shards = tuple(shards)
        self.key_impl = key_impl

    @classmethod
    def like(cls, array: jax.Array, shards: Sequence[HostShard]) -> "HostArray":
        """Returns what stands for `array`.

        A typed PRNG key is stored as its key data, which has trailing unsharded dimensions.
        Reads no data, so `array` may be in flight; it must not have been deleted.
        """
        key_impl = None
        if is_key_type(array.dtype):
            key_impl = str(jax.random.key_impl(array))
            # No computation: JAX hands out the array below the keys. Its partition spec cannot be
            # told from that of the keys, in which trailing None entries are normalised.
            array = jax.random.key_data(array)
        return cls(array.shape, array.dtype, array.sharding, shards, key_impl)

    def boxes(self) -> list[grid.Box]:
        """The shards' positions, with explicit starts and stops; for the writer's thread.

        Raises:
          ValueError: A shard's index does not fit `shape`, or (with every device of the sharding
            in this process) the boxes do not add up to the array. A forgotten one would surface
            only when somebody restores.
        """
        boxes = [shard.box(self.shape) for shard in self.shards]
        covered = sum(math.prod(grid.shape_of(box)) for box in boxes)
        if self.sharding.is_fully_addressable and covered != self.size:
            raise ValueError(
                f"`shards`: {len(boxes)} boxes cover {covered} of the {self.size} elements of an"
                f" array of shape {self.shape}; this process must write each element once."
            )
        return boxes

    def release(self) -> None:
        """Drops the bytes of all shards, as where a save has failed."""
        for shard in self.shards:
            shard.release()

    @property
    def size(self) -> int:
        """The number of elements of the global array."""
        return math.prod(self.shape)
