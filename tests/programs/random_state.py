"""Random states: some parameters with their companions, and what else a state may hold."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .grammar import AROUND, LOSSES

SHAPES = ((), (1,), (7,), (16,), (64,), (13, 3), (8, 8), (32, 8), (8, 6, 4), (40, 16), (64, 24))
SPECS = ((), ("a",), ("b",), (None, "b"), ("a", "b"), ("a", None), (("a", "b"),), (None, "a"))
FLOATS = (jnp.float32,) * 6 + (jnp.bfloat16, jnp.float16)
_EXPLICIT = 0.25  # of the meshes


class Pair(NamedTuple):
    """A container of NamedTuples' kind."""

    first: Any
    rest: Any


@flax.struct.dataclass
class Record:
    """A container of Flax's kind, with a field that is no leaf."""

    inner: Any
    name: str = flax.struct.field(pytree_node=False, default="record")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    """A container of JAX's own kind."""

    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Seen:
    """What leaves that are no parameter's may read."""

    ids: jax.Array
    norm: jax.Array
    loss: jax.Array


# First values, and what becomes of them.
OTHERS: dict[str, tuple[Callable[[], Any], Callable[[jax.Array, Seen], jax.Array]]] = {
    "count": (lambda: np.int32(0), lambda x, _: x + 1),
    "wrapping": (lambda: np.int32(2**31 - 4), lambda x, _: x + 3),
    "scale": (
        lambda: np.float32(1024.0),
        lambda x, seen: jnp.where(seen.norm < 1.0, jnp.minimum(x * 2, 4e3), jnp.maximum(x / 2, 1)),
    ),
    "seen": (lambda: np.zeros(16, np.int32), lambda x, seen: x.at[seen.ids % 16].add(1)),
    "small": (lambda: np.full((5, 3), 250, np.uint8), lambda x, _: x + x % 3 + jnp.uint8(1)),
    "flags": (lambda: np.arange(11) % 3 > 0, lambda x, seen: ~x ^ (seen.loss > 0.5)),
    "half": (lambda: np.float16(0.25), lambda x, _: jnp.maximum(x * jnp.float16(0.9), 0.1)),
    "key": (lambda: jax.random.key(7), lambda x, _: jax.random.fold_in(x, 1)),
    "keys": (
        lambda: jax.random.split(jax.random.key(8), 3),
        lambda x, _: jax.vmap(lambda key: jax.random.split(key)[0])(x),
    ),
    "raw key": (lambda: jax.random.PRNGKey(9), lambda x, _: jax.random.split(x)[1]),
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter and its companions of the same shape: moments, averages, copies.

    Attributes:
      leaves: Which of the state's they are; the first is the parameter.
      loss: Of it, by name.
      around: What the update stands in, by name.
      seed: Of the update's expressions.
    """

    leaves: range
    loss: str
    around: str
    seed: int


class RandomState:
    """A state, its leaves in the order in which they were drawn, not in that of the tree.

    Args:
      rng: Of the choices.
      devices: 1 or 8.

    Attributes:
      mesh: Of the eight; `None` for one device, whose arrays stay uncommitted.
      places: Of the leaves.
      parameters: Of what the loss is taken.
      others: Further leaves, with their kinds.
      nested: The tree, with numbers of leaves in it.
    """

    def __init__(self, rng: Random, devices: int):
        self.mesh: Mesh | None = None
        if devices > 1:
            # Not of `rng`: a seed's other choices are the same on both.
            is_explicit = Random(f"{rng.getstate()}").random() < _EXPLICIT
            kind = AxisType.Explicit if is_explicit else AxisType.Auto
            self.mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
        self._rng, self._numbers = rng, np.random.default_rng(rng.getrandbits(32))
        self._leaves: list[Any] = []
        self.places: list[jax.sharding.Sharding] = []
        self.parameters = [self._parameter() for _ in range(rng.randint(1, 4))]
        kinds = rng.choices(list(OTHERS), k=rng.randint(0, 4))
        self.others = {self._add(OTHERS[kind][0]()): kind for kind in kinds}
        numbers = rng.sample(range(len(self._leaves)), len(self._leaves))
        cut = rng.randint(0, len(numbers))
        self.nested = tuple(self._tree(part) for part in (numbers[:cut], numbers[cut:]))
        self._comes_placed = rng.random() < 0.9  # else the step places it

    def move(self, devices: Sequence[Any]) -> None:
        """To other devices, which need not be here, all that is traced from now on."""
        if self.mesh is None:
            self.places = [SingleDeviceSharding(devices[0]) for _ in self.places]
            return
        self.mesh = Mesh(
            np.array(devices).reshape(4, 2), ("a", "b"), axis_types=self.mesh.axis_types
        )
        self.places = [NamedSharding(self.mesh, place.spec) for place in self.places]

    @property
    def in_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Where a loop runs: with explicit axes JAX wants to be told of the mesh."""
        if self.mesh is None or AxisType.Explicit not in self.mesh.axis_types:
            return contextlib.nullcontext()
        entered: contextlib.AbstractContextManager[Any] = jax.set_mesh(self.mesh)
        return entered

    @property
    def batch_place(self) -> jax.sharding.Sharding:
        """Where batches lie; without a mesh that of the first leaf."""
        return NamedSharding(self.mesh, PartitionSpec("a")) if self.mesh else self.places[0]

    def _parameter(self) -> Parameter:
        rng, start = self._rng, len(self._leaves)
        shape, spec = rng.choice(SHAPES), rng.choice(SPECS)
        for n in range(rng.choice([1, 2, 2, 3, 3, 4])):
            values = self._numbers.standard_normal(shape) * rng.choice([1.0, 1.0, 0.0])
            lies_otherwise = n > 0 and rng.random() < 0.15  # as ZeRO's moments do
            own_spec = rng.choice(SPECS) if lies_otherwise else spec
            self._add(values.astype(rng.choice(FLOATS)), own_spec)
        around = rng.choice(list(AROUND))
        return Parameter(
            range(start, len(self._leaves)), rng.choice(list(LOSSES)), around, rng.getrandbits(32)
        )

    def _add(self, array: Any, spec: Sequence[Any] = ()) -> int:
        self._leaves.append(array)
        self.places.append(self._place(array.shape, spec))
        return len(self._leaves) - 1

    def _place(self, shape: tuple[int, ...], spec: Sequence[Any]) -> jax.sharding.Sharding:
        """The placement, where it divides the shape; else a replicated one."""
        if self.mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        sizes = dict(self.mesh.shape) | {None: 1, ("a", "b"): 8}
        fits = len(spec) <= len(shape) and not any(
            n % sizes[part] for n, part in zip(shape, spec, strict=False)
        )
        return NamedSharding(self.mesh, PartitionSpec(*(spec if fits else ())))

    def _tree(self, leaves: Sequence[int]) -> Any:
        """A random tree of these."""
        if not leaves:
            return None
        if len(leaves) == 1 and self._rng.random() < 0.8:
            return leaves[0]
        cut = self._rng.randint(1, len(leaves))
        a, b = self._tree(leaves[:cut]), self._tree(leaves[cut:])
        trees = [
            {"b": a, "a": b},
            (a, b),
            [a, b],
            Pair(a, b),
            Plain(a, b),
            Record({"x": a, "y": b}),
        ]
        return self._rng.choice(trees)

    def make(self) -> Any:
        """The state, in buffers of its own."""
        arrays = [jnp.copy(x) if isinstance(x, jax.Array) else jnp.array(x) for x in self._leaves]
        if self.mesh is not None and self._comes_placed:
            arrays = jax.device_put(arrays, self.places)
        return jax.tree.map(lambda i: arrays[i], self.nested)

    def batch(self, n: int) -> dict[str, Any]:
        """Batch `n`: 16 rows of 8, and as many ids; of some programs now and then twice as many."""
        rng, longer_every = np.random.default_rng(n), (0, 3, 0, 4, 7)[len(self._leaves) % 5]
        rows = 32 if longer_every and n % longer_every == 1 else 16
        batch = {
            "x": rng.standard_normal((rows, 8), np.float32),
            "ids": rng.integers(0, 1000, rows, dtype=np.int32),
        }
        if self.mesh is None:
            return batch
        return jax.device_put(batch, self.batch_place)


def as_rows(w: jax.Array) -> jax.Array:
    """An array of any shape as a matrix of fp32."""
    return w.astype(jnp.float32).reshape(-1, w.shape[-1] if w.ndim > 1 else math.prod(w.shape))
