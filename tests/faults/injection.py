"""Faults, put into the library where its stages meet the outside."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from .trainer import LIMIT_SECS


def replace(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, new: Any) -> None:
    """Replaces a function of the library, also where another module has imported it by name."""
    old = getattr(owner, name)
    monkeypatch.setattr(owner, name, new)
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("gockpt_jax.") and getattr(module, name, None) is old:
            monkeypatch.setattr(module, name, new)


class InjectedError(RuntimeError):
    """What a fault raises; no library raises it by itself."""


class Fault:
    """Makes a call of a function fail, while it is armed.

    Args:
        monkeypatch: Puts the function back.
        owner: The module or class that holds the function.
        name: The function's name.
        only_in: Counts only calls made inside this function, another (owner, name).
        error: What to raise instead of an `InjectedError`.
        lasts: Whether all calls fail, until it is disarmed.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        *,
        only_in: tuple[Any, str] | None = None,
        error: BaseException | None = None,
        lasts: bool = False,
    ) -> None:
        self.error = error or InjectedError(f"injected into {name}")
        self._lasts = lasts
        self.fired = False
        self._armed = False
        self._inside = threading.local()
        function = getattr(owner, name)
        replace(monkeypatch, owner, name, self._failing(function, only_in is not None))
        if only_in is not None:
            replace(monkeypatch, *only_in, self._entered(getattr(*only_in)))

    def arm(self) -> None:
        """The next call fails; those after it do not."""
        self._armed, self.fired = True, False

    def disarm(self) -> None:
        """No call fails any more."""
        self._armed = False

    def _strike(self, only_inside: bool) -> None:
        if self._armed and (not only_inside or getattr(self._inside, "now", False)):
            self._armed, self.fired = self._lasts, True
            raise self.error

    def _failing(self, function: Callable[..., Any], only_inside: bool) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            async def failing_async(*args: Any, **kwargs: Any) -> Any:
                self._strike(only_inside)
                return await function(*args, **kwargs)

            return failing_async

        def failing(*args: Any, **kwargs: Any) -> Any:
            self._strike(only_inside)
            return function(*args, **kwargs)

        return failing

    def _entered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def entered(*args: Any, **kwargs: Any) -> Any:
            self._inside.now = True
            try:
                return function(*args, **kwargs)
            finally:
                self._inside.now = False

        return entered


class Gate:
    """Holds a function's callers back while it is shut, so that a state can be looked at.

    Args:
        monkeypatch: Puts the function back.
        owner: The module or class that holds the function.
        name: The function's name.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self._open = threading.Event()
        self._open.set()
        function = getattr(owner, name)

        def gated(*args: Any, **kwargs: Any) -> Any:
            assert self._open.wait(LIMIT_SECS), "the gate stayed shut"
            return function(*args, **kwargs)

        replace(monkeypatch, owner, name, gated)

    def shut(self) -> None:
        """Whoever comes waits."""
        self._open.clear()

    def open(self) -> None:
        """All may pass."""
        self._open.set()


class Passed:
    """Tells when a function has been called.

    Args:
        monkeypatch: Puts the function back.
        owner: The module or class that holds the function.
        name: The function's name.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self._called = threading.Event()
        function = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._called.set()
            return function(*args, **kwargs)

        replace(monkeypatch, owner, name, noted)

    def wait(self) -> None:
        """Returns when it has."""
        assert self._called.wait(LIMIT_SECS), "it was not called"
