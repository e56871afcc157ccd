"""What JAX and Python do not tell, or tell otherwise from one version to another.

What Orbax does not is in `storage/files/_compat.py`. Each entry says why it is needed and on which
versions it was read. Where an attribute is missing, the caller takes the path that needs less.
"""

import contextlib
import dataclasses
import functools
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core as jex

DropVar: Any = jex.DropVar if hasattr(jex, "DropVar") else jax.core.DropVar
"""What stands for an output that nobody reads; jax 0.7 has it in `jax.core` only."""


_WIDE = frozenset(("float64", "int64", "uint64", "complex128"))
_PACKED = re.compile(r"(u?int|float)[1-7](_|$)")


@dataclasses.dataclass(frozen=True)
class JitSettings:
    """What the user passed to `jax.jit`, as far as it can be known.

    Attributes:
      static_argnums: Positions that are static.
      static_argnames: Names that are static.
      compiler_options: Options the user compiles with, so that the armed step does too.
      keep_unused: Whether unused arguments are kept.
    """

    static_argnums: frozenset[int] = frozenset()
    static_argnames: frozenset[str] = frozenset()
    compiler_options: dict[str, Any] | None = None
    keep_unused: bool = False


def jit_settings(step: Any) -> JitSettings | None:
    """Reads the settings of a jitted function, or `None` where this JAX does not hold them.

    `_jit_info` has no public counterpart (jax 0.7 to 0.12): without the static positions an
    argument that is baked into the program cannot be told from one that is passed to it.
    """
    info = getattr(step, "_jit_info", None)
    if info is None or not hasattr(info, "static_argnums"):
        return None
    return JitSettings(
        static_argnums=frozenset(info.static_argnums),
        static_argnames=frozenset(info.static_argnames),
        compiler_options=dict(getattr(info, "compiler_options_kvs", ())) or None,
        keep_unused=bool(getattr(info, "keep_unused", False)),
    )


def inner_jit(step: Any) -> str | None:
    """The attribute in which an object holds the jitted function that it calls, if it does.

    `nnx.jit` (flax 0.10 to 0.12) keeps it as `jitted_fn`, as does our own `jit`; `eqx.filter_jit`
    (0.11 to 0.13) as `_cached`. Neither has another way to the program that a call runs.
    """
    for name in ("jitted_fn", "_cached"):
        if jit_settings(getattr(step, name, None)) is not None:
            return name
    return None


def specified_shardings(traced: Any, which: str) -> tuple[Any, ...] | None:
    """The flat `in_shardings` or `out_shardings` that the user gave, `None` where unspecified.

    `Traced` publishes neither (jax 0.7 to 0.12); `_params` is what it lowers with.
    """
    flat = getattr(traced, "_params", {}).get(which)
    if flat is None:
        return None
    return tuple(s if isinstance(s, jax.sharding.Sharding) else None for s in flat)


def donated(traced: Any) -> tuple[int, ...]:
    """Flat positions of the arguments that are donated.

    `Traced.donate_argnums` makes the user's own trees of something else than arrays to tell, and
    classes that check what they hold refuse it (jax 0.7 to 0.12).
    """
    flags = getattr(traced, "_params", {}).get("donated_invars")
    if flags is None:
        return tuple(traced.donate_argnums)
    return tuple(i for i, is_donated in enumerate(flags) if is_donated)


def open_jaxpr(closed: Any) -> tuple[Any, list[Any]]:
    """Splits a closed (or open) jaxpr into its equations' owner and its constants.

    jax 0.10 wraps a `Jaxpr` in a `ClosedJaxpr`; from 0.11 on they are one class.
    """
    return getattr(closed, "jaxpr", closed), list(getattr(closed, "consts", ()))


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an operation is a body, closed or open."""
    return hasattr(value, "eqns")


def scan_operands(params: dict[str, Any], operands: Sequence[Any]) -> list[list[Any]]:
    """What a `scan` is given: to all turns alike, from turn to turn, and a row of to each.

    How many each of them are is told by two numbers until jax 0.10, from 0.11 on by a tree.
    """
    if "ft_in" in params:
        return [list(part) for part in params["ft_in"].update(operands).unpack()]
    first, after = params["num_consts"], params["num_consts"] + params["num_carry"]
    return [list(operands[:first]), list(operands[first:after]), list(operands[after:])]


def close_jaxpr(jaxpr: Any, consts: list[Any], *, eqns: list[Any], outvars: list[Any]) -> Any:
    """A closed jaxpr with the same inputs as `jaxpr`, other equations and other outputs."""
    return jex.ClosedJaxpr(with_equations(jaxpr, eqns, outvars), list(consts))


def with_equations(jaxpr: Any, eqns: list[Any], outvars: list[Any]) -> Any:
    """A jaxpr with the same inputs, other equations and other outputs."""
    # The names of results no longer match once outputs are added.
    debug_info = jaxpr.debug_info.with_unknown_names()
    return jaxpr.replace(eqns=eqns, outvars=outvars, debug_info=debug_info)


def wide_numbers(dtypes: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Lets this thread compile programs of 64-bit numbers, if there are any among the dtypes.

    The user may have asked for them on another thread alone (`with jax.enable_x64(True)`); without
    it JAX takes narrower ones. `jax.enable_x64` came with jax 0.8; before, it is experimental.
    """
    if not any(str(dtype) in _WIDE for dtype in dtypes):
        return contextlib.nullcontext()
    owner: Any = jax if hasattr(jax, "enable_x64") else jax.experimental
    enabled: contextlib.AbstractContextManager[Any] = owner.enable_x64(True)
    return enabled


def trace_context() -> Any:
    """What programs depend on beside their arguments: matmul precision, meshes, x64, ...

    `jax.jit` has it in its keys, and a compiled program does not know of it. There is no public
    name (jax 0.7 to 0.12).
    """
    from jax._src import config

    return getattr(config, "trace_context", tuple)()


def is_tracing() -> bool:
    """Whether what is called now is traced, and not run: in `jit`, `grad`, `vmap`, `eval_shape`.

    The arguments do not tell: a traced function may close over arrays. `jax.core` had the name
    until jax 0.8; where it is missing we go by the arguments alone.
    """
    from jax._src import core

    return not getattr(core, "trace_state_clean", lambda: True)()


def result_structure(traced: Any) -> Any:
    """The structure of what a traced function returns.

    `out_info` would put specifications into the user's classes, which may refuse them. Where
    `Traced.out_tree` is not public yet (jax 0.7) it is there as `_out_tree`.
    """
    return traced.out_tree if hasattr(traced, "out_tree") else traced._out_tree


@functools.cache
def is_packed(dtype: Any) -> bool:
    """Whether several elements share a byte on a device (int4); each has one of its own in NumPy.

    Only the name tells: `itemsize` is 1. Programs refuse such arrays that another has made. NumPy
    takes longer to make the name than a replay to start, so it is asked once.
    """
    return _PACKED.match(str(dtype)) is not None


def varies(aval: Any) -> bool:
    """Whether JAX's types say that a value differs by device; inside checked `shard_map`s they do.

    `ShapedArray.vma` became `manual_axis_type` with jax 0.10.
    """
    types = getattr(aval, "manual_axis_type", None)
    return bool(getattr(aval, "vma", ()) if types is None else types.varying)


def is_mutable(aval: Any) -> bool:
    """Whether a type is that of an array that changes in place (`jax.new_ref`).

    `AbstractRef` has no public name (jax 0.7 to 0.12); what tells it apart is what it refers to.
    """
    return hasattr(aval, "inner_aval")


def lies_as_pmap_left_it(sharding: Any) -> bool:
    """Whether programs compiled ahead refuse arrays that lie so: the results of `pmap` in jax 0.7.

    From jax 0.8 on they have a `NamedSharding`; the name of this one is deprecated there.
    """
    return type(sharding).__name__ == "PmapSharding"


def coordination_client() -> Any | None:
    """The client of the coordination service; `None` before `jax.distributed.initialize`.

    Its barriers and its key-value store have no public name (jax 0.7 to 0.12); Orbax takes it from
    the same place.
    """
    from jax._src import distributed

    return distributed.global_state.client


def before_shutdown(callback: Callable[[], None]) -> None:
    """Has `callback` called when the main thread has ended, while executors still take work.

    Not in a process that was forked from this one, as data loaders are: it ends in the same way.

    `atexit` is too late: it comes after the other threads have been joined, and a save of Orbax's
    that loses its executors on the way waits 300 s for a directory that nobody makes (0.12.8).
    `threading._register_atexit` is what `concurrent.futures` uses (Python 3.9 to 3.14).
    """
    register = getattr(threading, "_register_atexit", None)
    process = os.getpid()
    if register is not None:
        register(lambda: callback() if os.getpid() == process else None)


def is_held(lock: Any) -> bool:
    """Whether this thread holds a `threading.RLock`, which tells only conditions (3.11 to 3.14)."""
    return bool(lock._is_owned())
