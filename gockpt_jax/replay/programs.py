"""The programs that replay runs: a recipe, some updates in a row, on a chunk of a fixed size.

Few sizes, few numbers of updates: a model of 1000 leaves of any shapes compiles a handful. They are
kept for the process, since the next manager meets the same recipes.
"""

import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from gockpt_jax import _compat
from gockpt_jax.training.recipe import Recipe

CHUNK_SIZES = (256 * 1024, 32 * 1024, 8 * 1024, 1024)
"""Elements of a piece, largest first. The largest runs long enough to be worth a dispatch, and its
results still fit the cache, from where they are copied back (docs/decisions/0009)."""

BLOCK_SIZE = 8 * 1024
"""Elements that a program works on at a time. XLA makes a loop of its own for each result, and each
reads what the others have read: within a block, from the core's own cache."""

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
    def changed(self) -> tuple[int, ...]:
        """Positions of the states that an update changes; the others are only read."""
        return tuple(i for i, o in enumerate(self.recipe.outputs) if o != i)


@dataclasses.dataclass(frozen=True, slots=True)
class _Key:
    spec: ReplaySpec
    updates: int
    size: int
    fenced: bool
    device: jax.Device


def cut_up(elements: int) -> Iterator[tuple[slice, int]]:
    """Cuts a shard into pieces for which there are programs.

    Args:
      elements: Of the shard.

    Yields:
      Parts that follow each other, and the size of the program for each; the last part may be
      shorter than its program's size.
    """
    start = 0
    for size in CHUNK_SIZES:
        while elements - start >= size:
            yield slice(start, start + size), size
            start += size
        left = elements - start
        if left and (size == CHUNK_SIZES[-1] or (size // 2 < left and size <= _MAX_PADDED_SIZE)):
            yield slice(start, elements), size
            return


def fused(updates: int) -> Iterator[int]:
    """Splits a number of updates into numbers for which there are programs."""
    for count in FUSED_UPDATES:
        while updates >= count:
            yield count
            updates -= count


_programs: dict[_Key, concurrent.futures.Future[Any]] = {}
_lock = threading.Lock()


def program_for(
    spec: ReplaySpec, updates: int, size: int, *, fenced: bool, device: jax.Device
) -> Any:
    """The compiled program; waits where another thread is compiling it.

    Args:
      spec: Of the group.
      updates: How many updates in a row.
      size: Elements of a chunk.
      fenced: Whether products are fenced off from additions (`Recipe.apply`).
      device: A CPU device.

    Returns:
      A function of (states, updates, results, zero): old chunks of shape (size,); for each update
      a pair of cut values (size,) and scalars (); buffers for the results, which it takes over; an
      int32 zero. It returns the new chunks of the states that change.
    """
    key = _Key(spec, updates, size, fenced, device)
    with _lock:
        program = _programs.get(key)
        is_new = program is None
        if program is None:
            program = _programs[key] = concurrent.futures.Future()
    if is_new:
        try:
            program.set_result(_compile(key))
        except BaseException as error:
            with _lock:
                del _programs[key]
            program.set_exception(error)
    return program.result()


def _compile(key: _Key) -> Any:
    spec, place = key.spec, SingleDeviceSharding(key.device)

    def chunks(dtypes: Sequence[np.dtype], *shape: int) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, dtype, sharding=place) for dtype in dtypes]

    states = chunks(spec.states, key.size)
    update = (chunks(spec.retained, key.size), chunks(spec.scalars))
    (zero,) = chunks([np.dtype(np.int32)])
    # Not all are read, yet they are kept: donated, their memory becomes that of the results.
    program = jax.jit(functools.partial(_replay, key), donate_argnums=(2,), keep_unused=True)
    results = [states[i] for i in spec.changed]
    with _compat.wide_numbers(spec.dtypes):
        lowered = program.lower(states, [update] * key.updates, results, zero)
    return lowered.compile(compiler_options=_COMPILER_OPTIONS)


def _replay(key: _Key, states: Any, updates: Any, results: Any, zero: jax.Array) -> list[jax.Array]:
    """What `program_for` compiles: block for block, each into its place among the results."""
    if key.size <= BLOCK_SIZE:
        return _updated(key, states, updates, zero)

    def block(n: jax.Array, results: list[jax.Array]) -> list[jax.Array]:
        start = (n * BLOCK_SIZE,)

        def cut(xs: Sequence[jax.Array]) -> list[jax.Array]:
            return [lax.dynamic_slice(x, start, (BLOCK_SIZE,)) for x in xs]

        pending = [(cut(retained), scalars) for retained, scalars in updates]
        news = _updated(key, cut(states), pending, zero)
        return [
            lax.dynamic_update_slice(x, new, start) for x, new in zip(results, news, strict=True)
        ]

    done: list[jax.Array] = lax.fori_loop(0, key.size // BLOCK_SIZE, block, results)
    return done


def _updated(key: _Key, states: Any, updates: Any, zero: jax.Array) -> list[jax.Array]:
    fence = zero if key.fenced else None
    for n, (retained, scalars) in enumerate(updates):
        states = states if n == 0 else [_settled(x, zero) for x in states]
        states = key.spec.recipe.apply(states, retained, scalars, fence)
    return [states[i] for i in key.spec.changed]


def _settled(state: jax.Array, zero: jax.Array) -> jax.Array:
    """A state between two updates: the same bits, rounded as in memory.

    Without it the compiler would see through: fold the factors of two updates into one, contract
    across them, or drop a narrowing to bf16 that the next update undoes.
    """
    if not jnp.issubdtype(state.dtype, jnp.floating):
        return state
    integer = jnp.dtype(f"uint{jnp.finfo(state.dtype).bits}")
    bits = lax.bitcast_convert_type(state, integer) ^ lax.convert_element_type(zero, integer)
    return lax.bitcast_convert_type(bits, state.dtype)
