"""A step compiled for a device that need not be here, and its results worked out on the host."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.compiled.expressions import Expressions, Program
from bench.compiled.hlo import parse
from bench.compiled.numbers import Numbers
from gockpt_jax.training.armed import with_outputs
from gockpt_jax.training.cut import Cut
from gockpt_jax.training.recipe import make_recipe
from gockpt_jax.training.walk import Leaf

_FENCE = np.int32(0)


@dataclasses.dataclass
class CompiledStep:
    """What a compiler makes of a step that returns values of its cut as well.

    Attributes:
      expressions: Of the program.
      program: Its results, in terms of these.
    """

    expressions: Expressions
    program: Program

    @classmethod
    def of(
        cls, jaxpr: Any, cut: Cut | None, arguments: Sequence[Any], device: Any,
        expressions: Expressions | None = None, name: str = "armed",
    ) -> "CompiledStep":  # fmt: skip
        """Compiles a step.

        Args:
          jaxpr: Closed, of flat arguments.
          cut: Whose values the step returns too; `None`: the step as it is.
          arguments: Arrays, or what has their shapes and dtypes.
          device: For which it is compiled.
          expressions: Of a program to compare with.
          name: Of the program.
        """
        sites = [v.site for v in cut.values if v.site is not None] if cut else []
        place = jax.sharding.SingleDeviceSharding(device)
        specs = [
            jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=place, weak_type=getattr(x, "weak_type", False)
            )
            for x in arguments
        ]
        run = with_outputs(jaxpr, sites)
        run.__name__ = name
        compiled = jax.jit(run, keep_unused=True).lower(*specs).compile()
        expressions = expressions or Expressions()
        return cls(expressions, Program(parse(compiled.as_text()), expressions))

    def numbers(self, arguments: Sequence[Any], seed: int = 0) -> Numbers:
        """What its expressions are, of given arguments."""
        of = {self.program.parameters[i]: as_numpy(x) for i, x in enumerate(arguments)}
        return Numbers(self.expressions, of, seed)


def differing_early(
    step: CompiledStep, cut: Cut, leaves: Sequence[Leaf], arguments: Sequence[Any], seed: int = 0
) -> dict[int, int]:
    """Elements of the early leaves that the host, given what the step returns, makes otherwise.

    Args:
      step: Compiled with this cut.
      cut: Of the step.
      leaves: Of the state: the first arguments, and the first results.
      arguments: Of the step.
      seed: Of what is not worked out.

    Returns:
      How many, for each early leaf, by position. Zeros of either sign are one, and NaN is NaN.
    """
    numbers, results = step.numbers(arguments, seed), step.program.results
    returned = results[len(results) - len(cut.values) :]
    given = {v: numbers[n] for v, n in zip(cut.values, returned, strict=True)}
    found: dict[int, int] = {}
    for group in cut.groups:
        replay = jax.jit(make_recipe(group, leaves).apply)
        old = [as_numpy(arguments[j]).reshape(-1) for j in group.leaves]
        retained = [given[v].reshape(-1) for v in group.retained]
        new = replay(old, retained, [given[v] for v in group.scalars], _FENCE)
        for j, mine in zip(group.leaves, new, strict=True):
            theirs = numbers[results[j]].reshape(-1)
            found[j] = _differing(theirs, np.asarray(mine))
    return found


def differing_results(
    one: CompiledStep, other: CompiledStep, arguments: Sequence[Any], count: int, seed: int = 0
) -> tuple[int, int]:
    """How many of the first results of two programs are not the same expression, nor number.

    Args:
      one: A program.
      other: Another, of the same expressions.
      arguments: Of both.
      count: Of results that are compared.
      seed: Of what is not worked out.

    Returns:
      Results that are computed in another way, and those of them that are other numbers.
    """
    pairs = zip(one.program.results[:count], other.program.results[:count], strict=True)
    otherwise = [(a, b) for a, b in pairs if a != b]
    mine, theirs = one.numbers(arguments, seed), other.numbers(arguments, seed)
    return len(otherwise), sum(_differing(mine[a], theirs[b]) > 0 for a, b in otherwise)


def _differing(a: np.ndarray, b: np.ndarray) -> int:
    if jnp.issubdtype(a.dtype, jnp.floating):
        a, b = a.astype(np.float64), b.astype(np.float64)
        return int(np.sum((a != b) & ~(np.isnan(a) & np.isnan(b))))
    return int(np.sum(a != b))


def as_numpy(x: Any) -> np.ndarray:
    """An array as a compiled program holds it."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)
