"""What plans rest on beside the program and the device budget."""

import collections
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from gockpt_jax.compiling import REMEMBERED
from gockpt_jax.transfer.chunks import in_host_memory
from gockpt_jax.transfer.replicas import Replicas
from gockpt_jax.window.units import sharers


class SavedBytes(NamedTuple):
    """Bytes of arrays that a save takes.

    Attributes:
      of_device: One device's part.
      in_host_memory: Of that, what the host holds already.
      to_host: Of that, what comes to the host: replicas of a process share the rest.
      owned: By this process.
    """

    of_device: int = 0
    in_host_memory: int = 0
    to_host: int = 0
    owned: int = 0

    @classmethod
    def of(cls, arrays: Iterable[jax.Array], replicas: Replicas) -> "SavedBytes":
        """Those of arrays, donated or not; at each save of all that it takes."""
        alike = collections.Counter((a.shape, a.dtype, a.sharding) for a in arrays)
        found = NO_BYTES
        for layout, count in alike.items():
            found = found.plus(_of_one(replicas, *layout).times(count))
        return found

    def plus(self, other: "SavedBytes") -> "SavedBytes":
        """Both."""
        return self._with(other, operator.add)

    def or_more(self, other: "SavedBytes") -> "SavedBytes":
        """The larger."""
        return self._with(other, max)

    def beyond(self, other: "SavedBytes") -> "SavedBytes":
        """By how much it is larger."""
        return self._with(other, lambda mine, others: max(0, mine - others))

    def times(self, count: int) -> "SavedBytes":
        """Of so many that are alike."""
        return SavedBytes(*(count * number for number in self))

    def differs_by(self, other: "SavedBytes") -> int:
        """By how much, at the most."""
        return max(map(abs, self._with(other, operator.sub)))

    def _with(self, other: "SavedBytes", function: Callable[[int, int], int]) -> "SavedBytes":
        return SavedBytes(*map(function, self, other))


NO_BYTES = SavedBytes()


@functools.lru_cache(REMEMBERED)
def _of_one(
    replicas: Replicas, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding
) -> SavedBytes:
    array = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    source = replicas.source(array)
    return SavedBytes(
        of_device=source.shard_bytes,
        in_host_memory=source.shard_bytes if in_host_memory(source.sharding) else 0,
        to_host=-(-source.shard_bytes // sharers(source)),  # replicas as if all sent alike
        owned=source.owned_bytes,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the machine beside the device budget.

    Attributes:
      step_secs: Time of a training step; `None`: not known yet.
      link_bytes_per_sec: Rate from one device to the host; `None`: not known yet.
      host_budget_bytes: Host memory for one device's part of a save; `None`: no limit.
      unsaved: Positions of the leaves that saves do not take.
      was_refused: Whether the host had no room for a window that was to open, on any process.
      beside: What saves take that no leaf is; what each process owns of it is not told.
    """

    step_secs: float | None = None
    link_bytes_per_sec: float | None = None
    host_budget_bytes: int | None = None
    unsaved: frozenset[int] = frozenset()
    was_refused: bool = False
    beside: SavedBytes = NO_BYTES

    @property
    def unknown(self) -> str:
        """What the plan waits for, in words."""
        measured = {"step time": self.step_secs, "link": self.link_bytes_per_sec}
        return " and ".join(name for name, value in measured.items() if value is None)
