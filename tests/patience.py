"""Orbax's patience with directories that do not come: 300 s are too long for a test."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from orbax.checkpoint._src.futures import future


@contextlib.contextmanager
def writers_have_no_patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What is handed over in here is never begun; on return, the threads that were to have ended.

    Yields:
      For what else is to be patched meanwhile.
    """
    wait, before = future.wait_for_signals, threading.enumerate()  # of other tests

    def impatient(*args: Any, **kwargs: Any) -> None:
        if "hand_over" in threading.current_thread().name:
            raise TimeoutError("the directory has not come")
        wait(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(future, "wait_for_signals", impatient)
        yield patch
        for thread in threading.enumerate():
            if "hand_over" in thread.name and thread not in before:
                threading.Thread.join(thread)  # Orbax's own raises what the thread has raised
