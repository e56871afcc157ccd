"""Handing a sealed save to stock's tree handler, away from the trainer's thread.

Once the state is sealed, all that is left is bookkeeping: names, types and specifications of every
leaf, an event loop, threads. For a few hundred leaves that takes stock longer than the seal, and
nothing in it needs the trainer. What `save` promises when it returns has to be true by then all
the same: what it refuses it has refused, and what the caller may change has been copied.
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gockpt_jax.locks import Gate
from gockpt_jax.storage.files import _compat as of_orbax
from gockpt_jax.storage.writing.host_array import HostArray

HAND_OVER = "gockpt_hand_over"
"""What the names of the threads begin with."""
_HELD_SECS = 1.0  # at most: whatever Orbax comes to wait for in `save`, it gets
_numbers = itertools.count()
_KNOWN = (HostArray, bool, int, float, str, np.generic)  # no caller can change them


class HandedOver(ocp.future.Future):  # type: ignore[misc]
    """A save whose writing is begun by a thread of Orbax's, as soon as its directory is there.

    Args:
      begin: Begins the writing; what it results in resolves when all is written.
      after: Nothing begins before it is open, or a second has gone by.
    """

    def __init__(
        self,
        begin: Callable[[], Coroutine[Any, Any, ocp.future.Future]],
        after: Gate,
    ):
        self._after = after
        self._has_begun = self._is_cancelled = False
        self._deciding = threading.Lock()  # which of them it is
        self._thread = f"{HAND_OVER}_{next(_numbers)}"
        self._begun = ocp.future.CommitFutureAwaitingContractedSignals(
            _MadeWhenRun(functools.partial(self._begin, of_orbax.operation(), begin)),
            name=self._thread,
        )

    async def _begin(
        self, operation: str | None, begin: Callable[[], Coroutine[Any, Any, ocp.future.Future]]
    ) -> ocp.future.Future:
        """As a part of its own operation, whichever save has begun meanwhile."""
        self._after.wait(_HELD_SECS)
        with self._deciding:
            if self._is_cancelled:
                raise RuntimeError("its save has failed, so this item is not written")
            self._has_begun = True
        with of_orbax.own_operation(operation):
            return await begin()

    def cancel(self) -> None:
        """Its writing does not begin any more, if it has not."""
        with self._deciding:
            self._is_cancelled = True

    @property
    def will_not_begin(self) -> bool:
        """Whether its writing has not begun, nor will."""
        # Where its directory does not come the thread gives up, after 300 s. What it raises then
        # cannot be told from too short a wait for it.
        is_thread_there = self._is_thread_there
        return not self._has_begun and (self._is_cancelled or not is_thread_there)

    @property
    def is_beginning(self) -> bool:
        """Whether its writing is just being begun."""
        return self._has_begun and self._is_thread_there

    @property
    def may_begin(self) -> bool:
        """Whether its writing has not begun, or is being begun."""
        return self._is_thread_there and not self.will_not_begin

    @property
    def _is_thread_there(self) -> bool:
        return any(thread.name == self._thread for thread in threading.enumerate())

    def wait(self, timeout: float | None) -> None:
        """Waits until its writing has begun, or cannot any more, which raises."""
        if not self.will_not_begin:
            self._begun.result(timeout)

    def result(self, timeout: float | None = None) -> None:
        """Waits for every write; raises what the first failing one, or their beginning, raised."""
        started_at = time.monotonic()
        written = self._begun.result(timeout)
        if timeout is not None:
            timeout = max(0.0, timeout - (time.monotonic() - started_at))
        written.result(timeout)


class _MadeWhenRun(Coroutine[Any, Any, Any]):
    """A coroutine that is made when it is first run: Python warns of one that is made and is not.

    Args:
      make: Makes it.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, Any]]):
        self._make = make

    @functools.cached_property
    def _made(self) -> Coroutine[Any, Any, Any]:
        return self._make()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._made.__await__()

    def send(self, value: Any) -> Any:
        return self._made.send(value)

    def throw(self, *error: Any) -> Any:
        return self._made.throw(*error)

    def close(self) -> None:
        self._made.close()


def run_to_its_end(save: Coroutine[Any, Any, None]) -> None:
    """Waits for a coroutine; in a notebook too, where this thread runs a loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(save)
        return
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, save).result()


def settled(save: ocp.args.PyTreeSave) -> ocp.args.PyTreeSave | None:
    """The arguments of a save that stock neither refuses nor copies on the trainer's thread.

    Args:
      save: Its arrays are `HostArray`s; nothing in it, nor its `save_args`, has been refused.

    Returns:
      The same, with NumPy arrays copied, as stock copies them in `save`. `None` if stock would
      refuse something there, or a leaf is of a type that only its own handler knows.
    """
    tree: Any  # untyped in JAX's stubs
    leaves, tree = jax.tree.flatten(save.item)
    if jax.tree_util.treedef_is_leaf(tree):  # Orbax 0.11.33 refuses a bare zero
        return None
    if not all(type(x) is np.ndarray or isinstance(x, _KNOWN) for x in leaves):
        return None
    copied = [x.copy() if isinstance(x, np.ndarray) else x for x in leaves]
    return dataclasses.replace(save, item=jax.tree.unflatten(tree, copied))
