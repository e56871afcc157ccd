"""What happens to device buffers: who is donated, who is reused, who is sent to the host."""

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest


def _leaves(tree: Any) -> dict[str, jax.Array]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p): x for p, x in paths if isinstance(x, jax.Array)}


def pointers(array: jax.Array) -> set[int]:
    """Where an array's shards are in memory; empty for one that has been donated."""
    if array.is_deleted():
        return set()
    jax.block_until_ready(array)  # asking for a pointer would wait with the interpreter's lock held
    return {s.data.unsafe_buffer_pointer() for s in array.addressable_shards if s.data.size}


def _first_pointer(array: jax.Array) -> int | None:
    data = jax.block_until_ready(array.addressable_data(0))
    return data.unsafe_buffer_pointer() if data.size else None


@dataclasses.dataclass
class Buffers:
    """A state's buffers before an update, and what the update did with them.

    Attributes:
      donated: Paths of the old leaves that are gone.
      reused: Paths of the new leaves that lie where an old one was; scalars left out, which the
        compiler pairs as it likes.
    """

    donated: frozenset[str] = frozenset()
    reused: frozenset[str] = frozenset()
    _old: dict[str, jax.Array] = dataclasses.field(default_factory=dict, compare=False)
    _at: set[int] = dataclasses.field(default_factory=set, compare=False)

    @classmethod
    def of(cls, state: Any) -> "Buffers":
        """Looks at a state that is about to go into a step."""
        old = _leaves(state)
        return cls(_old=old, _at={p for x in old.values() if (p := _first_pointer(x))})

    def after(self, state: Any) -> "Buffers":
        """Looks at what the step made of it."""
        donated = frozenset(path for path, x in self._old.items() if x.is_deleted())
        new = {path: x for path, x in _leaves(state).items() if x.ndim}
        reused = frozenset(path for path, x in new.items() if _first_pointer(x) in self._at)
        return Buffers(donated, reused)


class PullWatch:
    """Looks at every array that anybody starts to move to the host, or reads on the host.

    On the trainer's thread none may share memory with the live state, which the next step may
    donate: the arguments of the running call until they are donated, from then on the last result.
    Other threads may read only what the trainer's thread has started: by the time they
    run, the trainer is some steps further. The trainer's thread is watched inside
    `live` only: the test's own copies are its own business.
    """

    def __init__(self) -> None:
        self.count = 0
        self.unsafe: list[str] = []
        self._patch = pytest.MonkeyPatch()
        self._trainer = threading.current_thread()
        self._watching = False
        self._inputs: Any = ()
        self._step: Any = None
        self._known: tuple[Any, Any, dict[int, str]] | None = None
        self._pointers: dict[int, tuple[jax.Array, set[int]]] = {}
        self._fit_to_read: dict[int, weakref.ref[jax.Array]] = {}

    def __enter__(self) -> "PullWatch":
        array_type = type(jax.numpy.zeros(()))
        start, put, read = array_type.copy_to_host_async, jax.device_put, np.asarray

        def copy_to_host_async(array: jax.Array) -> None:
            self._look(array, "copy_to_host_async")
            self._may_be_read(array)
            start(array)

        def device_put(value: Any, device: Any = None, **kwargs: Any) -> Any:
            moved = put(value, device, **kwargs)
            if "host" in (getattr(device, "memory_kind", None) or ""):
                self._look(value, "device_put")
                self._may_be_read(moved)
            return moved

        def asarray(value: Any, *args: Any, **kwargs: Any) -> np.ndarray:
            if isinstance(value, jax.Array):
                self._look(value, "np.asarray")
            return read(value, *args, **kwargs)

        self._patch.setattr(array_type, "copy_to_host_async", copy_to_host_async)
        self._patch.setattr(jax, "device_put", device_put)
        self._patch.setattr(np, "asarray", asarray)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    @contextlib.contextmanager
    def live(self, args: Any, kwargs: Any, step: Any) -> Iterator[None]:
        """While the library is called with these arguments."""
        self._inputs, self._step, self._watching = (args, kwargs), step, True
        try:
            yield
        finally:
            self._watching = False

    def _may_be_read(self, array: Any) -> None:
        if isinstance(array, jax.Array):
            self._fit_to_read[id(array)] = weakref.ref(array)

    def _look(self, array: jax.Array, how: str) -> None:
        if threading.current_thread() is not self._trainer:
            known = self._fit_to_read.get(id(array))
            if known is None or known() is not array:
                self.unsafe.append(f"{how} of {array.aval} on {threading.current_thread().name}")
        elif self._watching:
            self.count += 1
            live = self._live_pointers()
            self.unsafe += [f"{how} of {live[p]}" for p in pointers(array) if p in live]

    def _live_pointers(self) -> dict[int, str]:
        """Where the live state is, and whatever else goes in and out of the step."""
        inputs, result = self._inputs, getattr(getattr(self._step, "last", None), "result", None)
        known = self._known
        if known is None or known[0] is not inputs or known[1] is not result:
            arrays = [item for tree in (inputs, result) for item in _leaves(tree).items()]
            # The results of one call are the arguments of the next: looked up once.
            self._pointers = {
                id(x): self._pointers.get(id(x)) or (x, pointers(x)) for _, x in arrays
            }
            found = {
                p: path
                for path, x in arrays
                if not x.is_deleted()
                for p in self._pointers[id(x)][1]
            }
            self._known = known = (inputs, result, found)
        return known[2]
