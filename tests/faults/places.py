"""Every state that a window can be in, and how a loop gets there."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gockpt_jax.replay.engine import Replayer
from gockpt_jax.storage.writing.tree_writer import TreeWriter
from gockpt_jax.transfer.pull import Pull
from gockpt_jax.window.early import EarlyChunks

from .injection import Fault, Gate, Passed
from .trainer import LIMIT_SECS, Trainer


def wait_for_shutdown() -> None:
    """Returns when the main thread has left the program and waits for the other threads.

    Nothing public tells: executors refuse work a moment later, the main thread counts as alive
    until their threads have ended, and Orbax waits for a drain on one of those.
    """
    main = threading.main_thread().ident
    while main is not None and main in sys._current_frames():
        frames = traceback.walk_stack(sys._current_frames()[main])
        if any(frame.f_code is threading._shutdown.__code__ for frame, _ in frames):
            return
        time.sleep(0.01)


def _nothing() -> None:
    """Nothing is held back."""


def _fresh(trainer: Trainer, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    return _nothing


def _after_one_step(trainer: Trainer, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    trainer.update()
    return _nothing


def _closed(trainer: Trainer, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    trainer.run_undisturbed(6)
    return _nothing


def _opened(trainer: Trainer, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    trainer.run_undisturbed(6)
    trainer.update()
    return _nothing


def _behind(trainer: Trainer, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The window is open and none of its chunks has landed."""
    trainer.run_undisturbed(6)
    gate = Gate(patch, EarlyChunks, "land_block")
    gate.shut()
    trainer.update()
    return gate.open


def _reached(trainer: Trainer, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    trainer.run_undisturbed(7)
    trainer.update()
    return _nothing


def _draining(trainer: Trainer, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Save 8 has returned, none of its chunks is on the host."""
    trainer.run_undisturbed(6)
    gate, written = Gate(patch, Pull, "result"), Passed(patch, TreeWriter, "_write_array_metadatas")
    gate.shut()
    trainer.run(8)
    written.wait()
    return gate.open


def _just_saved(trainer: Trainer, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Save 8 has returned; the directory to write into does not exist yet."""
    trainer.run_undisturbed(7)
    to_thread, may_go_on = asyncio.to_thread, threading.Event()

    async def late(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert may_go_on.wait(LIMIT_SECS)
        return await to_thread(*args, **kwargs)

    patch.setattr(asyncio, "to_thread", late)
    trainer.run(8)
    return may_go_on.set


def _failed(trainer: Trainer, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The worker has failed inside the window; the trainer does not know yet."""
    trainer.run_undisturbed(6)
    fault = Fault(patch, Replayer, "apply")
    fault.arm()
    trainer.update()
    trainer.settle()
    assert fault.fired
    return _nothing


def _sealed_and_failed(trainer: Trainer, patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Save 8 has returned; its early chunks will turn out to be lost."""
    trainer.run_undisturbed(6)
    gate, fault = Gate(patch, EarlyChunks, "land_block"), Fault(patch, Replayer, "apply")
    written = Passed(patch, TreeWriter, "_write_array_metadatas")
    gate.shut()
    fault.arm()
    trainer.run(8)
    written.wait()
    trainer.given.pop(8)
    return gate.open


PLACES: dict[str, Callable[[Trainer, pytest.MonkeyPatch], Callable[[], None]]] = {
    "fresh": _fresh,
    "after_one_step": _after_one_step,
    "closed": _closed,
    "opened": _opened,
    "behind": _behind,
    "reached": _reached,
    "just_saved": _just_saved,
    "draining": _draining,
    "failed": _failed,
    "sealed_and_failed": _sealed_and_failed,
}

STATUS = {"opened": "window", "behind": "window", "reached": "window", "draining": "draining"}
"""How `window_status` begins there."""


def go_to(
    trainer: Trainer, place: str, patch: pytest.MonkeyPatch | None = None
) -> Callable[[], None]:
    """Trains until the window is in some state.

    Args:
        trainer: That has done nothing yet.
        place: One of `PLACES`.
        patch: Puts the library back; not needed in a process that ends.

    Returns:
        What lets go of a stage that is held back.
    """
    release = PLACES[place](trainer, patch or pytest.MonkeyPatch())
    if place in STATUS:
        assert trainer.manager.window_status.startswith(STATUS[place])
    return release


@contextlib.contextmanager
def at_place(
    trainer: Trainer, place: str, patch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """`go_to`, and letting go at the end whatever happens."""
    release = go_to(trainer, place, patch)
    try:
        yield release
    finally:
        release()
