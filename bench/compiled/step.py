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
from gockpt_jax.training.call import Positions
from gockpt_jax.training.step_cut import StepCut, cut_step

_FENCE = np.int32(0)
# A gathering that runs beside other work is in many of its pieces: nobody could read what it gives.
_OPTIONS = {
    "tpu": {
        "xla_tpu_enable_async_collective_fusion": False,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
    }
}


@dataclasses.dataclass
class CompiledStep:
    """What a compiler makes of a step that returns values of its cut as well.

    Attributes:
      expressions: Of the program.
      program: Its results, in terms of these.
      places: Of its arguments.
      results: Shape and sharding of each of its results.
    """

    expressions: Expressions
    program: Program
    places: Sequence[jax.sharding.Sharding]
    results: Sequence[jax.ShapeDtypeStruct]

    @classmethod
    def of(
        cls, jaxpr: Any, cut: StepCut | None, arguments: Sequence[Any],
        places: Sequence[jax.sharding.Sharding], *, count: int,
        expressions: Expressions | None = None, name: str = "armed",
    ) -> "CompiledStep":  # fmt: skip
        """Compiles a step as `StepProgram` does.

        Args:
          jaxpr: Closed, of flat arguments.
          cut: Whose values the step returns too; `None`: the step as it is.
          arguments: Arrays, or what has their shapes and dtypes.
          places: Where they are; on devices that need not be here.
          count: How many are leaves of the state: the first arguments, which are donated, and the
            first results, which are where these were.
          expressions: Of a program to compare with.
          name: Of the program.
        """
        specs = [
            jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=place, weak_type=getattr(x, "weak_type", False)
            )
            for x, place in zip(arguments, places, strict=True)
        ]
        run = with_outputs(jaxpr, cut.sites if cut else ())
        run.__name__ = name
        results = jax.eval_shape(run, *specs)
        others = (None,) * (len(results) - count)
        jitted = jax.jit(
            run, keep_unused=True, donate_argnums=tuple(range(count)),
            out_shardings=[*places[:count], *others],
        )  # fmt: skip
        (device, *_) = places[0].device_set
        compiled = jitted.lower(*specs).compile(compiler_options=_OPTIONS.get(device.platform))
        made = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            for x, place in zip(results, compiled.output_shardings, strict=True)
        ]
        expressions = expressions or Expressions()
        program = Program(parse(compiled.as_text()), expressions)
        return cls(expressions, program, places, made)

    def numbers(self, arguments: Sequence[Any], seed: int = 0) -> Numbers:
        """What its expressions are, of given arguments."""
        of = {}
        for i, (x, place) in enumerate(zip(arguments, self.places, strict=True)):
            whole = as_numpy(x)
            of[self.program.parameters[i]] = [whole[index] for index in _indices(place, x.shape)]
        return Numbers(self.expressions, of, seed)

    def result(self, numbers: Numbers, position: int) -> np.ndarray:
        """A result as a whole, of what its partitions have."""
        spec, parts = self.results[position], numbers[self.program.results[position]]
        whole = np.empty((*spec.shape, *parts[0].shape[len(spec.shape) :]), parts[0].dtype)
        indices = _indices(spec.sharding, spec.shape)
        for index, part in zip(indices, parts, strict=True):
            whole[index] = part
        for index, part in zip(indices, parts, strict=True):
            assert _differing(whole[index], part) == 0, "replicas are not the same"
        return whole


def _indices(place: Any, shape: tuple[int, ...]) -> list[Any]:
    """Which part of an array each partition has."""
    return list(place.devices_indices_map(shape).values())


def cut_state(jaxpr: Any, count: int, *, even_for_nothing: bool = False) -> StepCut:
    """Cuts a step whose first arguments, and first results, are the leaves of its state.

    Args:
      jaxpr: Closed.
      count: Of leaves.
      even_for_nothing: Whether leaves may leave early that gain no bytes.
    """
    places = tuple(range(count))
    positions = Positions(places, places, tuple(map(str, places)))
    return cut_step(jaxpr, positions, even_for_nothing=even_for_nothing, exact=True)


def differing_early(
    step: CompiledStep, cut: StepCut, arguments: Sequence[Any], seed: int = 0
) -> dict[int, int]:
    """Elements of the early leaves that the host, given what the step returns, makes otherwise.

    Args:
      step: Compiled with this cut.
      cut: Of the step; leaves are its first arguments, and its first results.
      arguments: Of the step.
      seed: Of what is not worked out.

    Returns:
      How many, for each early leaf, by position: bit for bit, but NaN is NaN, and below the least
        normal number all is zero.
    """
    numbers = step.numbers(arguments, seed)
    first = len(step.results) - len(cut.sites)
    given = [step.result(numbers, first + i) for i in range(len(cut.sites))]
    found: dict[int, int] = {}
    for group in cut.groups:
        replay = jax.jit(group.recipe.apply)
        old = [as_numpy(arguments[j]).reshape(-1) for j in group.leaves]
        retained = [given[i].reshape(-1) for i in group.retained]
        new = replay(old, retained, [given[i] for i in group.scalars], _FENCE)
        for j, mine in zip(group.leaves, new, strict=True):
            theirs = step.result(numbers, j).reshape(-1)
            found[j] = _differing(theirs, np.asarray(mine))
    return found


def differing_results(
    one: CompiledStep, other: CompiledStep, arguments: Sequence[Any], count: int
) -> tuple[int, int]:
    """How many of the first results of two programs are not the same expression, nor number.

    Args:
      one: A program.
      other: Another, of the same expressions.
      arguments: Of both.
      count: Of results that are compared.

    Returns:
      Results that are computed in another way, and those of them that are other numbers.
    """
    mine, theirs = one.numbers(arguments), other.numbers(arguments)
    otherwise = [j for j in range(count) if one.program.results[j] != other.program.results[j]]
    perturbed = [
        j for j in otherwise if _differing(one.result(mine, j), other.result(theirs, j)) > 0
    ]
    return len(otherwise), len(perturbed)


def _differing(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.sum(_bits(a) != _bits(b)))


def _bits(x: np.ndarray) -> np.ndarray:
    """As the CPU backend has them, which flushes denormals; of any NaN the same."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        tiny = jnp.finfo(jnp.promote_types(x.dtype, jnp.float32)).tiny
        x = np.where(np.abs(x) < tiny, np.copysign(np.zeros_like(x), x), x)
        x = np.where(np.isnan(x), np.array(np.nan, x.dtype), x)
    return x.view(f"u{x.itemsize}")


def as_numpy(x: Any) -> np.ndarray:
    """An array as a compiled program holds it."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)
