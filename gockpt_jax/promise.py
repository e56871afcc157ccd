"""A value that comes later, once."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Promise(Generic[_T]):
    """What `concurrent.futures.Future` is to those who do not wait: they are called.

    A save has one for each shard of the state, made on the trainer's thread. A `Future` is eleven
    objects, for it could wait: thousands of them have Python's garbage collector look at everything
    sooner (docs/scale.md). This is two, and has no lock: what is appended to a list is taken from
    it once, whoever comes first, a signal handler included.

    Example:
      >>> promise: Promise[int] = Promise()
      >>> promise.add_done_callback(lambda done: print("came:", done.result()))
      >>> promise.set_result(6)
      came: 6
      >>> promise.add_done_callback(lambda done: print("again:", done.result()))
      again: 6
    """

    __slots__ = ("_callbacks", "_error", "_is_done", "_value")

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Promise[_T]], Any]] = []
        self._is_done = False
        self._error: BaseException | None = None
        self._value: _T | None = None

    def done(self) -> bool:
        """Whether it has come, or what went wrong instead."""
        return self._is_done

    def result(self) -> _T:
        """What has come; raises what went wrong instead."""
        self._require_done()
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # it has been set

    def exception(self) -> BaseException | None:
        """What went wrong; `None` if it has come."""
        self._require_done()
        return self._error

    def set_result(self, value: _T) -> None:
        """It has come; calls everybody who asked for that."""
        assert not self._is_done, "kept already"
        self._value = value
        self._end()

    def set_exception(self, error: BaseException) -> None:
        """It will not come; calls everybody who asked."""
        assert not self._is_done, "kept already"
        self._error = error
        self._end()

    def add_done_callback(self, call: "Callable[[Promise[_T]], Any]") -> None:
        """Has `call` called with this, once: now if it has come, else when it does.

        By whichever thread sets it, or asks at that moment: it must not raise, for that thread
        would not know what of.
        """
        self._callbacks.append(call)
        if self._is_done:
            self._call_all()

    def _end(self) -> None:
        self._is_done = True
        self._call_all()

    def _call_all(self) -> None:
        while True:
            try:
                call = self._callbacks.pop(0)
            except IndexError:  # no more, or another thread has them
                return
            call(self)

    def _require_done(self) -> None:
        assert self._is_done, "nothing has come yet"
