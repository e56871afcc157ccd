"""Analysis of small hand-written updates: what the training tests share.

An update is a jitted function `(state, *data) -> state`, or `(state, aux)`, of a flat dict.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gockpt_jax.training.armed import with_outputs
from gockpt_jax.training.cut import Cut, find_cut
from gockpt_jax.training.graph import Graph, flatten
from gockpt_jax.training.recipe import make_recipe
from gockpt_jax.training.values import Value
from gockpt_jax.training.walk import Leaf

N = 24  # elements of a leaf


def vector(seed: int, size: int = N) -> jax.Array:
    """Seeded normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(size), jnp.float32)


def bits(array: Any) -> np.ndarray:
    """The bits of an array; of any NaN the same, but of a zero those of its sign."""
    found = np.asarray(array)
    if jnp.issubdtype(found.dtype, jnp.floating):
        found = np.where(np.isnan(found), np.array(np.nan, found.dtype), found)
    return found.view(f"u{found.itemsize}")


def graph_of(f: Callable[..., Any], *args: Any) -> Graph:
    return flatten(jax.jit(f).trace(*args).jaxpr)


def ops_behind(value: Value) -> set[str]:
    """The names of all operations that a value depends on."""
    names: set[str] = set()
    seen: set[Value] = set()
    todo = [value]
    while todo:
        op = todo.pop().op
        if op is not None:
            names.add(op.name)
            todo += [v for v in op.inputs if v not in seen]
            seen.update(op.inputs)
    return names


@dataclasses.dataclass
class Analysis:
    """An update, its leaves and its cut."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    jaxpr: Any
    leaves: list[Leaf]
    cut: Cut

    @property
    def groups(self) -> list[list[str]]:
        return [[self.leaves[j].path for j in group.leaves] for group in self.cut.groups]

    @property
    def late(self) -> dict[str, str]:
        return {self.leaves[j].path: reason for j, reason in self.cut.late.items()}

    def run(self) -> tuple[list[jax.Array], dict[Value, jax.Array]]:
        """One step: the new leaves, and the cut values as the armed step returns them."""
        return self._armed(self.args)

    def replayed(
        self, cut: dict[Value, jax.Array], fence: Any = None
    ) -> Iterator[tuple[int, jax.Array]]:
        """The leaves that leave early as one replay from the old ones makes them, by position."""
        old = jax.tree.leaves(self.args[0])
        for group, recipe in zip(self.cut.groups, self._recipes, strict=True):
            new = recipe(
                [old[j] for j in group.leaves], [cut[v] for v in group.retained],
                [cut[v] for v in group.scalars], fence,
            )  # fmt: skip
            yield from zip(group.leaves, new, strict=True)

    def run_many(
        self, updates: int, data: Callable[[int], list[Any]]
    ) -> Iterator[tuple[list[jax.Array], dict[Value, jax.Array]]]:
        """The first leaves, and then what each update gives; `data(n)` is what it is given."""
        armed = self._armed
        leaves, cut = jax.tree.leaves(self.args[0]), {}
        yield leaves, cut
        for n in range(updates):
            leaves, cut = armed((leaves, data(n)))
            yield leaves, cut

    def given(self, state: Any, *data: Any) -> Analysis:
        """The same programs, with other values."""
        other = dataclasses.replace(self, args=(state, *data))
        vars(other).update(_armed=self._armed, _recipes=self._recipes)
        return other

    @functools.cached_property
    def _recipes(self) -> list[Callable[..., list[jax.Array]]]:
        return [jax.jit(make_recipe(group, self.leaves).apply) for group in self.cut.groups]

    @functools.cached_property
    def _armed(self) -> Callable[[Any], tuple[list[jax.Array], dict[Value, jax.Array]]]:
        values = self.cut.values
        armed = jax.jit(with_outputs(self.jaxpr, [v.site for v in values if v.site is not None]))

        def run(args: Any) -> tuple[list[jax.Array], dict[Value, jax.Array]]:
            results = armed(*jax.tree.leaves(args))
            cut = results[len(results) - len(values) :]
            return results[: len(self.leaves)], dict(zip(values, cut, strict=True))

        return run


def analyse(
    step: Callable[..., Any], state: dict[str, Any], *data: Any, even_for_nothing: bool = False,
    **options: Any,
) -> Analysis:  # fmt: skip
    """Cuts an update whose first result is the new state, in the order of the old one."""
    jitted = jax.jit(step)
    jaxpr = jitted.trace(state, *data).jaxpr
    graph = flatten(jaxpr)
    paths = [jax.tree_util.keystr(p, simple=True) for p, _ in jax.tree.leaves_with_path(state)]
    inputs, outputs = graph.inputs[: len(paths)], graph.outputs[: len(paths)]
    leaves = [Leaf(*leaf) for leaf in zip(paths, inputs, outputs, strict=True)]
    cut = find_cut(leaves, even_for_nothing=even_for_nothing, **options)
    return Analysis(jitted, (state, *data), jaxpr, leaves, cut)
