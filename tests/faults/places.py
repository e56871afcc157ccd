"""Every state that a window can be in, and how a loop gets there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from gockpt_jax.replay.engine import Replayer
from gockpt_jax.transfer.pull import Pull
from gockpt_jax.window.early import EarlyChunks

from .injection import Fault, Gate
from .trainer import Trainer


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
    gate = Gate(patch, EarlyChunks, "land")
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
    gate = Gate(patch, Pull, "result")
    gate.shut()
    trainer.run(8)
    return gate.open


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
    gate, fault = Gate(patch, EarlyChunks, "land"), Fault(patch, Replayer, "apply")
    gate.shut()
    fault.arm()
    trainer.run(8)
    trainer.given.pop(8)
    return gate.open


PLACES: dict[str, Callable[[Trainer, pytest.MonkeyPatch], Callable[[], None]]] = {
    "fresh": _fresh,
    "after_one_step": _after_one_step,
    "closed": _closed,
    "opened": _opened,
    "behind": _behind,
    "reached": _reached,
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
