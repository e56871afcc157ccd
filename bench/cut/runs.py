"""Runs of a train step's two executables, the user's own and the armed one, and their replay."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.cut.programs import batch
from gockpt_jax.training.armed import with_outputs
from gockpt_jax.training.cut import Cut
from gockpt_jax.training.graph import flatten
from gockpt_jax.training.recipe import make_recipe
from gockpt_jax.training.walk import Leaf

STEPS, REPLAYED = 8, 5

Arrays = list[np.ndarray]
Step = Callable[[list[Any], int], list[Any]]
"""Makes of a flat state and the number of a step the next flat state, and what it retained."""


class Traced:
    """A train step of `make_step`, as functions of flat states.

    Args:
      step: Jitted; donates its state.
      first: Makes the first state.

    Attributes:
      first: As given.
      jaxpr: Of the step, closed.
      leaves: Of the state, for the search of a cut.
    """

    def __init__(self, step: Any, first: Callable[[], Any]):
        self.first = first
        self._step, self._tree = step, jax.tree.structure(first())
        self.jaxpr = step.trace(first(), batch(0)).jaxpr
        graph = flatten(self.jaxpr)
        self.leaves = [
            Leaf(str(i), graph.inputs[i], graph.outputs[i]) for i in range(self._tree.num_leaves)
        ]

    def user(self, state: list[Any], n: int) -> list[Any]:
        """The user's own executable."""
        return jax.tree.leaves(self._step(jax.tree.unflatten(self._tree, state), batch(n))[0])

    def armed(self, cut: Cut) -> Step:
        """The one that returns the values of a cut too."""
        size = len(self.leaves)
        sites = [v.site for v in cut.values if v.site is not None]
        armed = jax.jit(with_outputs(self.jaxpr, sites), donate_argnums=tuple(range(size)))

        def step(state: list[Any], n: int) -> list[Any]:
            results = armed(*state, batch(n))
            return [*results[:size], *results[size + 1 :]]  # without the loss

        return step

    def run(self, step: Step) -> list[Arrays]:
        """The state at every version, followed by what the step to it retained."""
        flat = jax.tree.leaves(self.first())
        seen = [[_host(x) for x in flat]]
        for n in range(STEPS):
            results = step(flat, n)
            seen.append([_host(x) for x in results])
            flat = results[: len(self.leaves)]
        return seen


def _host(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(x) if is_key else x)


def replayed(
    cut: Cut, leaves: Sequence[Leaf], seen: list[Arrays], fence: Any = None
) -> dict[int, np.ndarray]:
    """The early leaves after the last updates of a run, replayed: one program for each group.

    Args:
      cut: That the run was armed with.
      leaves: Of the state.
      seen: The run.
      fence: As for an accelerator's run; `None`: none.
    """
    state = {j: seen[STEPS - REPLAYED][j] for group in cut.groups for j in group.leaves}
    updates = [jax.jit(make_recipe(group, leaves).apply) for group in cut.groups]
    for version in range(STEPS - REPLAYED + 1, STEPS + 1):
        values = dict(zip(cut.values, seen[version][len(leaves) :], strict=True))
        for group, update in zip(cut.groups, updates, strict=True):
            old = [state[j].reshape(-1) for j in group.leaves]
            retained = [values[v].reshape(-1) for v in group.retained]
            new = update(old, retained, [values[v] for v in group.scalars], fence)
            for j, x in zip(group.leaves, new, strict=True):
                state[j] = np.asarray(x).reshape(state[j].shape)
    return state
