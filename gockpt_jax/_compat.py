"""The one place where JAX and Orbax are asked for what their public interfaces do not tell.

Each entry says why it is needed and on which versions it was read. Where an attribute is missing,
the caller takes the path that needs less; but without those of a `CheckpointManager` ours fails.
"""

import contextlib
import contextvars
import dataclasses
import functools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import core as jex

DropVar: Any = jex.DropVar if hasattr(jex, "DropVar") else jax.core.DropVar
"""What stands for an output that nobody reads; jax 0.7 has it in `jax.core` only."""


COMMIT_BARRIERS = ("async_write_complete", "async_commit_complete")
"""Parts of the keys of Orbax's barriers after writing and after renaming (0.11.33 to 0.12.8)."""

PROGRESS_BARRIER = "set_value_end"
"""Part of the key of Orbax's barrier at which all processes know that a save has begun, or ended
(0.11.33 to 0.12.8). Where it is missing, saves wait for the next accepted one, or for a wait."""

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


def coordination_client() -> Any | None:
    """The client of the coordination service; `None` before `jax.distributed.initialize`.

    Its barriers and its key-value store have no public name (jax 0.7 to 0.12); Orbax takes it from
    the same place.
    """
    from jax._src import distributed

    return distributed.global_state.client


def commit_thread(manager: Any) -> Any | None:
    """The thread that ends a `CheckpointManager`'s last save; `None` before the first.

    Its attribute `exception` is what it has failed with, and what those who wait for it raise. Of
    Orbax 0.11.33 to 0.12.
    """
    return manager._finalize_thread.get()


def wait_for_writes(manager: Any) -> None:
    """Waits for what a `CheckpointManager` writes (0.11.33 to 0.12), and raises why it failed."""
    manager._checkpointer.wait_until_finished()


def writes_thread(manager: Any) -> Any | None:
    """The thread that ends a `CheckpointManager`'s writes (0.11.33 to 0.12), if one does."""
    return manager._checkpointer._async_manager._thread


# Of this thread, or of one in whose place a loop of Orbax's runs.
_own_operation: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "own_operation", default=None
)


@contextlib.contextmanager
def own_operation(name: str | None) -> Iterator[None]:
    """What is done in here by Orbax belongs to one operation, whatever others begin meanwhile.

    Orbax (0.11.33 to 0.12.8) numbers the operations of each process, and each part of a save asks
    for the number of the one that has begun last there: it waits until that one's directory is
    told to be made, by whichever process has come to the same number. Where another thread has
    begun an operation in between, it waits for 300 s if that has been committed already; where
    another process has made another directory, it does not wait, and Orbax deletes what it has
    written by then when it makes this one. All others are told the number, as they always were.

    Args:
      name: Of the operation, where processes write one directory together the same on each of
        them, and of no other; `None`: what Orbax tells.
    """
    _tell_own_operations()
    before = _own_operation.set(name)
    try:
        yield
    finally:
        _own_operation.reset(before)


def operation() -> str | None:
    """The operation that this thread is part of; `None` where Orbax has no numbers."""
    ids = _operation_ids()
    return None if ids is None else str(ids.get_current_operation_id())


def _operation_ids() -> Any:
    from orbax.checkpoint._src.futures import synchronization

    ids = getattr(synchronization, "OperationIdGenerator", None)
    return ids if hasattr(ids, "get_current_operation_id") else None


@functools.cache
def _tell_own_operations() -> None:
    """Replaces the method that tells the number, for the whole process."""
    if (ids := _operation_ids()) is not None:
        last = ids.get_current_operation_id
        ids.get_current_operation_id = classmethod(lambda cls: _own_operation.get() or last())


def replace_deleter(manager: Any, around: Callable[[Any], Any]) -> Any:
    """Puts another deleter in the place of a `CheckpointManager`'s, which no option names.

    Args:
      manager: Of Orbax 0.11.33 to 0.12.
      around: Gives the new one, of the `ocp.path.deleter.CheckpointDeleter` that it has.
    """
    manager._checkpoint_deleter = deleter = around(manager._checkpoint_deleter)
    return deleter


def items_have_names(manager: Any) -> None:
    """Says that a `CheckpointManager` is given items by their names, in a `Composite`, always.

    With a handler registry it finds that out from the first call, or step: one that holds an item
    by the name `default` passes for a step whose item has no name. Of Orbax 0.11.33 to 0.12.
    """
    manager._default_item.set(False)


def who_ends(manager: Any, item: str) -> Any | None:
    """The handler by which a `CheckpointManager` with a registry ends the item of a save.

    It is the first that was registered under the name, whoever has written the item; `None`: there
    is none yet, and who writes it is the first. Of Orbax 0.11.33 to 0.12.
    """
    entries = manager._checkpointer._handler._handler_registry.get_all_entries()
    return next((handler for (name, _), handler in entries.items() if name == item), None)


def wait_for_metadata(manager: Any) -> Callable[[], None]:
    """What waits until the notes of a `CheckpointManager` on its steps have been written.

    A thread of its own writes them, of Orbax 0.11.33 to 0.12.
    """
    wait: Callable[[], None] = manager._non_blocking_metadata_store.wait_until_finished
    return wait


def deleting_thread(deleter: Any) -> Any | None:
    """The thread of a `ThreadedCheckpointDeleter` (0.11.33 to 0.12); `None` of another deleter."""
    return getattr(deleter, "_delete_thread", None)


def route_buckets(schemes: tuple[str, ...], kvstore: Callable[[str], dict[str, Any]]) -> bool:
    """Has Orbax keep arrays in buckets by TensorStore's drivers, with specs of ours.

    Orbax 0.12.8 knows `gs://` only. At `s3://` it refuses with OCDBT ("Checkpoint path should be
    absolute"), and without it writes arrays into a local folder named `s3:`. All it lacks is in
    four names, which are replaced for the whole process; local paths take the way they took.

    Args:
      schemes: Such as `gs://`; Orbax then commits there by a marker file, not by renaming.
      kvstore: Gives the spec of an address.

    Returns:
      Whether that was possible; `False` where Orbax (such as 0.11.33) has no such names.
    """
    try:
        from orbax.checkpoint._src.path import gcs_utils
        from orbax.checkpoint._src.serialization import tensorstore_utils
    except ImportError:
        return False
    names = (
        (gcs_utils, "_GCS_PATH_PREFIX"), (gcs_utils, "get_kvstore_for_gcs"),
        (tensorstore_utils, "_use_gcs_driver"), (tensorstore_utils, "_normalize_path"),
    )  # fmt: skip
    if not all(hasattr(module, name) for module, name in names):
        return False
    if gcs_utils.get_kvstore_for_gcs is kvstore:
        return True
    local = tensorstore_utils._normalize_path

    def normalize(path: str) -> str:
        scheme = next((s for s in schemes if path.startswith(s)), "")
        return scheme + str(local(path.removeprefix(scheme)))

    gcs_utils._GCS_PATH_PREFIX = schemes
    gcs_utils.get_kvstore_for_gcs = kvstore
    tensorstore_utils._use_gcs_driver = lambda directory: directory.startswith(schemes)
    tensorstore_utils._normalize_path = normalize
    return True
