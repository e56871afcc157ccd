"""Random training programs: a whole step, its state and how it is called, from a seed.

A step takes the gradients of a random loss and updates each parameter with its companions by
random expressions, in a random form of call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .common import Job
from .explicit import is_explicit, lying_like, put, together, whole
from .grammar import AROUND, LOSSES, REPEATED, Expressions
from .random_state import OTHERS, Parameter, RandomState, Seen, as_rows

Arrays = dict[int, jax.Array]
"""Leaves of the state, by their numbers."""


class RandomProgram:
    """A program.

    Args:
      seed: Of all its choices.
      devices: 1 or 8.

    Attributes:
      state: The first one.
    """

    def __init__(self, seed: int, devices: int):
        rng = Random(f"{seed} on {devices}")
        self.state = RandomState(rng, devices)
        self._form = rng.choice(list(_FORMS))
        self._donates = rng.random() < 0.8
        self._clips = rng.random() < 0.5
        self._constrains = rng.random() < 0.3
        self._places_results = rng.random() < 0.3
        self._seed = rng.getrandbits(32)

    def job(self) -> Job:
        """What a loop calls, and a first state in buffers of its own."""
        step, donated, advance, wrap_kwargs = _FORMS[self._form](self)
        options = donated if self._donates else {}
        if self._form == "static":
            options = options | {"static_argnames": "mode"}
        if self._form == "first" and self._places_results and self.state.mesh is not None:
            placed = jax.tree.map(lambda i: self.state.places[i], self.state.nested)
            options = options | {"out_shardings": (placed, None)}
        return Job(self.state.make(), jax.jit(step, **options), advance, wrap_kwargs)

    def update(self, state: Any, batch: Any, rate: Any = 0.1) -> tuple[Any, jax.Array]:
        """One step; traceable.

        Returns:
          The new state, and the loss.
        """
        batch = jax.tree.map(whole, batch)
        rng, numbers = Random(self._seed), jax.tree.leaves(self.state.nested)
        old: Arrays = dict(zip(numbers, jax.tree.leaves(state), strict=True))
        if is_explicit(self.state.places[0]):  # a life may have moved some
            old = {i: put(x, self.state.places[i]) for i, x in old.items()}
        loss, grads = self._gradients(old, batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
        if self._clips:
            grads = [jnp.where(norm < 1.0, g, g / norm) for g in grads]
        scalars = [jnp.float32(rate), norm, loss, *self._schedules(old)]
        new: Arrays = {}
        for parameter, g in zip(self.state.parameters, grads, strict=True):
            new |= self._updated(parameter, old, g, scalars)
        seen = Seen(batch["ids"], norm, loss)
        new |= {i: OTHERS[kind][1](old[i], seen) for i, kind in self.state.others.items()}
        self._rewire(rng, old, new)
        if self._constrains and self.state.mesh is not None:
            new = {i: put(x, self.state.places[i]) for i, x in new.items()}
        return jax.tree.unflatten(jax.tree.structure(state), [new[i] for i in numbers]), loss

    def _gradients(self, old: Arrays, batch: Any) -> tuple[jax.Array, list[jax.Array]]:
        parameters = self.state.parameters

        def loss(values: list[jax.Array]) -> jax.Array:
            return sum(
                LOSSES[p.loss](as_rows(whole(w)), batch["x"], batch["ids"])
                for p, w in zip(parameters, values, strict=True)
            )

        value, grads = jax.value_and_grad(loss)([old[p.leaves[0]] for p in parameters])
        return value, [g.astype(jnp.float32) for g in grads]

    def _schedules(self, old: Arrays) -> list[jax.Array]:
        """Scalars that depend on counters."""
        counts = [old[i] for i, kind in self.state.others.items() if kind == "count"]
        steps = [count.astype(jnp.float32) for count in counts]
        return [y for n in steps for y in (0.1 / (1.0 + n), 1.0 - 0.9 ** (n + 1.0))]

    def _updated(
        self, parameter: Parameter, old: Arrays, g: jax.Array, scalars: list[jax.Array]
    ) -> Arrays:
        """A parameter and its companions, updated."""

        def update(arrays: list[jax.Array], scalars: list[jax.Array]) -> list[jax.Array]:
            *olds, g = arrays
            rng, wide = Random(parameter.seed), [x.astype(jnp.float32) for x in olds]
            drawn = expressions(rng, [g, g, *wide], scalars)
            new = [new_value(rng, drawn, x) for x in wide]
            return [lying_like(y.astype(x.dtype), x) for x, y in zip(olds, new, strict=True)]

        around = AROUND[parameter.around](update, self.state.places[parameter.leaves[0]])
        new = around([*(old[i] for i in parameter.leaves), g], scalars)
        return dict(zip(parameter.leaves, new, strict=True))

    def _rewire(self, rng: Random, old: Arrays, new: Arrays) -> None:
        """Leaves that come out as they were, as others, or twice."""
        for parameter in self.state.parameters:
            i, j = rng.choices(parameter.leaves, k=2)
            alike = old[i].dtype == old[j].dtype
            what = rng.choice([*("nothing",) * 9, "kept", "other", "swapped", "twice"])
            if what == "kept":
                new[i] = old[i]
            elif what == "other" and alike:
                new[i] = old[j]
            elif what == "swapped" and alike:
                new[i], new[j] = new[j], new[i]
            elif what == "twice" and alike and not self._donates:  # one buffer for both
                new[i] = new[j]


def expressions(
    rng: Random, arrays: Sequence[jax.Array], scalars: Sequence[jax.Array]
) -> Expressions:
    """Of an update: as a rule the host can repeat it, behind the gradient."""
    if rng.random() < 0.3:
        return Expressions(rng, arrays, scalars)
    gradient = Expressions(rng, arrays[:1], scalars).array(rng.randint(0, 4))
    return Expressions(rng, [gradient, *arrays[1:]], scalars, REPEATED)


def new_value(rng: Random, drawn: Expressions, old: jax.Array) -> jax.Array:
    """The new value of a leaf, in fp32; bounded, so that it stays a number."""
    kind = rng.random()
    if kind < 0.06:
        return old
    if kind < 0.1:
        return jnp.full_like(old, 0.5)
    if kind < 0.3:
        new = together(lambda x, y: 0.9 * x + 0.1 * y)(old, drawn.array(1))
    elif kind < 0.45:
        factor = drawn.factor() * 0.1
        new = together(lambda x, y: x - factor * y)(old, drawn.array(rng.randint(0, 2)))
    else:
        new = lying_like(drawn.array(rng.randint(1, 4)), old)
    drawn.arrays.append(new)
    if rng.random() < 0.5:
        return jnp.clip(new, -4.0, 4.0)
    return jnp.where(jnp.abs(new) < 9.0, new, 0.5 * old)


# Forms of the call: the step, what it donates, how a loop calls it, and what `wrap` is told.


def _first(p: RandomProgram) -> Any:
    donated = {"donate_argnums": 0}
    return p.update, donated, lambda f, state, n: f(state, p.state.batch(n))[0], {}


def _alone(p: RandomProgram) -> Any:
    def step(state: Any, batch: Any) -> Any:
        return p.update(state, batch)[0]

    return step, {"donate_argnums": 0}, lambda f, state, n: f(state, p.state.batch(n)), {}


def _last(p: RandomProgram) -> Any:
    """By keyword, with a Python number that changes, and more than one result."""

    def step(batch: Any, rate: Any, state: Any) -> Any:
        new, loss = p.update(state, batch, rate)
        return {"loss": loss, "norm": loss * 2}, new

    def advance(f: Callable[..., Any], state: Any, n: int) -> Any:
        return f(p.state.batch(n), 0.1 + n, state=state)[1]

    return step, {"donate_argnames": "state"}, advance, {"state": "state"}


def _in_two(p: RandomProgram) -> Any:
    """Two arguments, of which one is donated."""

    def step(left: Any, batch: Any, right: Any) -> Any:
        (left, right), loss = p.update((left, right), batch)
        return left, loss, right

    def advance(f: Callable[..., Any], state: Any, n: int) -> Any:
        left, _, right = f(state[0], p.state.batch(n), state[1])
        return left, right

    return step, {"donate_argnums": 0}, advance, {"state": (0, 2), "state_out": (0, 2)}


def _static(p: RandomProgram) -> Any:
    """With a static argument, of which each fifth call has another, and results by name."""

    def step(state: Any, batch: Any, mode: str, rate: Any) -> Any:
        new, loss = p.update(state, batch, rate if mode == "train" else 2 * rate)
        return {"state": new, "loss": loss} | ({} if mode == "train" else {"rate": rate})

    def advance(f: Callable[..., Any], state: Any, n: int) -> Any:
        mode = "train" if n % 5 else "decay"
        return f(state, p.state.batch(n), mode=mode, rate=np.float32(0.1))["state"]

    return step, {"donate_argnums": 0}, advance, {}


_FORMS: dict[str, Callable[[RandomProgram], Any]] = {
    "first": _first, "alone": _alone, "last": _last, "in two": _in_two, "static": _static,
}  # fmt: skip
