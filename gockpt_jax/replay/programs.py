"""The programs that replay runs: a recipe, some updates in a row, on a piece of a fixed size.

Few sizes, few numbers of updates: a model of 1000 leaves of any shapes compiles a handful. They are
kept for the process, since the next manager meets the same recipes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from gockpt_jax import _compat
from gockpt_jax.compiling import Programs
from gockpt_jax.training.recipe import Recipe, through_bits

PIECE_SIZES = (256 * 1024, 32 * 1024, 8 * 1024, 1024)
"""Elements of a piece, largest first. The largest runs long enough to be worth a dispatch, and its
results still fit the cache, from where they are copied back (docs/decisions/0009)."""

TILE_SIZE = 8 * 1024
"""Elements that a program works on at a time. XLA makes a loop of its own for each result, and each
reads what the others have read: within a tile, from the core's own cache."""

FUSED_UPDATES = (4, 2, 1)
"""Updates in one program, largest first."""

_MAX_PADDED_SIZE = 32 * 1024  # a larger piece is cut again: copies of it would need fresh memory

# No operation is split over cores, so that replay's threads say how many it takes. (Operations of
# one program that do not read each other may still run side by side.)
_COMPILER_OPTIONS: dict[str, str | bool] = {"xla_cpu_multi_thread_eigen": False}


@dataclasses.dataclass(frozen=True, slots=True)
class ReplaySpec:
    """What a group's programs are made from.

    Attributes:
      recipe: The group's program.
      states: Dtypes of its states.
      retained: Dtypes of the cut values.
      scalars: Dtypes of the captured scalars.
    """

    recipe: Recipe
    states: tuple[np.dtype, ...]
    retained: tuple[np.dtype, ...]
    scalars: tuple[np.dtype, ...]

    @property
    def dtypes(self) -> tuple[np.dtype, ...]:
        """All that its programs take."""
        return (*self.states, *self.retained, *self.scalars)

    @property
    def fused_updates(self) -> Sequence[int]:
        """Of `FUSED_UPDATES` those that it may have: what lies between two goes through bits."""
        return FUSED_UPDATES[-1:] if self.recipe.tells_zero else FUSED_UPDATES


Compiled = Callable[..., list[jax.Array]]
"""A function of (states, updates, results, zero): old pieces of shape (size,); for each update a
pair of cut values (size,) and scalars (); buffers for the results, which it takes over; an int32
zero. It returns the new pieces of the states that change."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayProgram:
    """A program, by what it is made from.

    Attributes:
      spec: Of the group.
      updates: How many it applies in a row.
      size: Elements of its pieces.
      fenced: Whether products are fenced off from additions (`Recipe.apply`).
      device: A CPU device.
    """

    spec: ReplaySpec
    updates: int
    size: int
    fenced: bool
    device: jax.Device

    def compile_ahead(self) -> None:
        """Has it compiled, on a thread of its own."""
        _programs.wanted(self)

    def compiled(self) -> Compiled:
        """The program itself; waits for its compilation."""
        found: Compiled = _programs.needed(self)
        return found


def cut_up(elements: int) -> Iterator[tuple[slice, int]]:
    """Cuts a shard into pieces for which there are programs.

    Args:
      elements: Of the shard.

    Yields:
      Parts that follow each other, and the size of the program for each; the last part may be
      shorter than its program's size.
    """
    start = 0
    for size in PIECE_SIZES:
        while elements - start >= size:
            yield slice(start, start + size), size
            start += size
        left = elements - start
        if left and (size == PIECE_SIZES[-1] or (size // 2 <= left and size <= _MAX_PADDED_SIZE)):
            yield slice(start, elements), size
            return


def fused(updates: int, counts: Sequence[int] = FUSED_UPDATES) -> Iterator[int]:
    """Splits a number of updates into numbers for which there are programs: largest first."""
    for count in counts:
        while updates >= count:
            yield count
            updates -= count


def _compile(program: ReplayProgram) -> Any:
    spec, place = program.spec, SingleDeviceSharding(program.device)

    def pieces(dtypes: Sequence[np.dtype], *shape: int) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for dtype in dtypes]

    states = pieces(spec.states, program.size)
    update = (pieces(spec.retained, program.size), pieces(spec.scalars))
    (zero,) = pieces([np.dtype(np.int32)])
    # Not all are read, yet they are kept: donated, their memory becomes that of the results.
    jitted = jax.jit(functools.partial(_replay, program), donate_argnums=(2,), keep_unused=True)
    results = [states[i] for i in spec.recipe.changed]
    with _compat.wide_numbers(spec.dtypes):
        lowered = jitted.lower(states, [update] * program.updates, results, zero)
    return lowered.compile(compiler_options=_COMPILER_OPTIONS)


_programs = Programs("gockpt-compile-replay", _compile)


def _replay(
    program: ReplayProgram, states: Any, updates: Any, results: Any, zero: jax.Array
) -> list[jax.Array]:
    """What is compiled: tile by tile, each into its place among the results."""
    if program.size <= TILE_SIZE:
        return _updated(program, states, updates, zero)

    def tile(n: jax.Array, results: list[jax.Array]) -> list[jax.Array]:
        start = (n * TILE_SIZE,)

        def cut(xs: Sequence[jax.Array]) -> list[jax.Array]:
            return [lax.dynamic_slice(x, start, (TILE_SIZE,)) for x in xs]

        pending = [(cut(retained), scalars) for retained, scalars in updates]
        news = _updated(program, cut(states), pending, zero)
        return [
            lax.dynamic_update_slice(x, new, start) for x, new in zip(results, news, strict=True)
        ]

    done: list[jax.Array] = lax.fori_loop(0, program.size // TILE_SIZE, tile, results)
    return done


def _updated(program: ReplayProgram, states: Any, updates: Any, zero: jax.Array) -> list[jax.Array]:
    fence = zero if program.fenced else None
    for n, (retained, scalars) in enumerate(updates):
        states = states if n == 0 else [_settled(x, zero) for x in states]
        states = program.spec.recipe.apply(states, retained, scalars, fence)
    return [states[i] for i in program.spec.recipe.changed]


def _settled(state: jax.Array, zero: jax.Array) -> jax.Array:
    """A state between two updates: the same bits, rounded as in memory.

    Without it the compiler would see through: fold the factors of two updates into one, contract
    across them, or drop a narrowing to bf16 that the next update undoes.
    """
    return through_bits(state, zero) if jnp.issubdtype(state.dtype, jnp.floating) else state
