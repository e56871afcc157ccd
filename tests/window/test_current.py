"""The ends of a window: alone it is over with its first failure, beside other processes not."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from gockpt_jax import ProcessError, SaveFailedWarning, WindowOptions
from gockpt_jax.errors import ReplayError
from gockpt_jax.window.current import CurrentWindow

TARGET = 12
FAILED = MemoryError("injected")


class Held:
    """In the place of an array."""


class Window:
    """As much of an open window as its ends are about."""

    target, stepping = TARGET, None
    others_wait = False

    def __init__(self, error: BaseException | None = None):
        self.error = error
        self.given_up: str | None = None
        self.is_dropped = False
        self.state: tuple[Any, ...] = (object(),)

    @property
    def is_sound(self) -> bool:
        return self.error is None and self.given_up is None

    def give_up(self, why: str) -> None:
        assert self.given_up is None
        self.given_up = why

    def drop(self) -> None:
        self.is_dropped = True
        self.state = ()


def current_of(window: Any, *, several: bool, **options: Any) -> CurrentWindow:
    processes: Any = SimpleNamespace(several=several)
    current = CurrentWindow(WindowOptions(**options), processes)
    current.open(window)
    return current


in_both = pytest.mark.parametrize("several", [False, True])


@in_both
def test_who_has_failed_alone_is_told_once_and_beside_others_not_at_all(several, caplog):
    current = current_of(Window(FAILED), several=several)
    with caplog.at_level(logging.DEBUG, "gockpt_jax"):
        current.abandon("the manager was closed")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "it failed: MemoryError('injected')" in record.getMessage()
    assert current.why_none == "its window was abandoned: it failed: MemoryError('injected')"
    assert current.window is None
    if not several:
        with pytest.raises(ReplayError, match="injected") as raised:
            current.raise_failure()
        assert raised.value.__cause__ is FAILED
    current.raise_failure()


@in_both
def test_what_is_given_up_here_others_may_go_on_with(several):
    window = Window()
    current = current_of(window, several=several)
    assert current.is_due(TARGET)
    current.give_up("staging failed")
    assert window.is_dropped is not several
    assert current.window is (window if several else None)
    assert window.given_up == ("staging failed" if several else None)
    assert not current.is_due(TARGET)
    assert current.to_seal(TARGET) is None
    assert window.is_dropped
    assert current.window is None
    assert current.why_none == "its window was abandoned: staging failed"


@in_both
def test_a_failed_window_is_given_up_once(several):
    window = Window()
    current = current_of(window, several=several)
    for error in (None, FAILED, FAILED):
        window.error = error
        current.give_up_if_failed()
    assert window.given_up == ("it failed: MemoryError('injected')" if several else None)
    assert not current.has_failed


@in_both
@pytest.mark.parametrize("version", [TARGET - 1, TARGET])
def test_beside_others_a_failed_window_fails_its_save_and_no_other(several, version):
    """Which would else be a snapshot there alone; the others' would be a window."""
    current = current_of(Window(FAILED), several=several)
    if several and version == TARGET:
        with pytest.raises(ReplayError, match="injected"):
            current.to_seal(version)
    else:
        assert current.to_seal(version) is None
    assert current.window is None
    current = current_of(Window(FAILED), several=True, on_save_error="warn")
    with pytest.warns(SaveFailedWarning, match="injected"):
        current.to_seal(TARGET)


def test_a_sound_window_is_sealed_at_its_version():
    window = Window()
    current = current_of(window, several=False)
    assert current.to_seal(TARGET) is window is current.window
    assert current.to_seal(TARGET - 2) is None
    assert current.why_none == "its window was abandoned: the save came 2 steps early"


def test_an_update_is_of_one_thread():
    window = Window()
    current = current_of(window, several=False)
    for stepping, mine in ((None, None), (1, None), (threading.get_ident(), window)):
        window.stepping = stepping
        assert current.in_my_step is mine


def test_an_interrupt_is_no_error_of_the_window(caplog):
    window = Window()
    current = current_of(window, several=False)
    with pytest.raises(KeyboardInterrupt), current.giving_up_on_errors("staging failed"):
        raise KeyboardInterrupt
    assert current.window is window
    assert caplog.records == []
    with current.giving_up_on_errors("staging failed"):
        raise FAILED
    assert current.window is None
    assert current.why_none == f"its window was abandoned: staging failed: {FAILED!r}"


@in_both
@pytest.mark.parametrize("others_wait", [False, True])
def test_a_process_whose_others_wait_in_a_program_ends(several, others_wait):
    """It did not begin there: to go on would be for ever, in the next step of all."""
    window = Window()
    window.others_wait = others_wait
    current = current_of(window, several=several)
    if several and others_wait:
        ends = pytest.raises(ProcessError, match=r"could not begin a program .*MemoryError")
        with ends, current.giving_up_on_errors("its cut could not be pulled"):
            raise FAILED
        return
    with current.giving_up_on_errors("its cut could not be pulled"):
        raise FAILED
    assert window.given_up is not None or current.window is None


@in_both
def test_where_a_device_had_no_room_no_other_window_opens_for_that_save(several):
    """Beside others it goes on: they would be in the other window, and this process not."""
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")
    current = current_of(Window(), several=several)
    with current.giving_up_on_errors("staging failed"):
        raise full
    assert current.leaves_out(TARGET) != several
    current = current_of(Window(), several=False)
    with current.giving_up_on_errors("staging failed"):
        raise FAILED
    assert not current.leaves_out(TARGET)


def test_windows_for_which_there_is_no_room_again_and_again_are_tried_less_often():
    """Trying takes long where an allocator waits before it fails. One that is sealed ends that."""
    current, tried = current_of(None, several=False), []
    for target in range(60):
        if not current.leaves_out(target):
            tried.append(target)
            current.had_no_room(target)
        assert current.leaves_out(target), "nor once more for the same save"
    assert tried == [0, 1, 3, 7, 15, 31]
    assert "no room for the last 6 windows, so the next one is tried after" in current.why_none
    current.window = Window()
    current.sealed()
    tried = [target for target in range(60, 100) if not current.leaves_out(target)]
    assert tried[0] == 63, "what was decided stands"
    current.had_no_room(100)
    assert not current.leaves_out(101)


@in_both
def test_a_window_ends_with_a_step_that_did_not_come_to_its_end(several):
    window = Window()
    current = current_of(window, several=several)
    current.abandon_interrupted()
    assert current.window is window
    window.stepping = 1  # of whichever thread
    current.abandon_interrupted()
    assert (current.window, window.is_dropped) == (None, True)
    current.abandon_interrupted()


# --- A call that comes to nothing ----------------------------------------------------------------


@in_both
def test_beside_others_a_window_is_taken_up_again_where_a_call_came_to_nothing(several):
    """They are in it: this process runs the armed steps with them, and has no part in it."""
    window = Window()
    state = window.state
    current = current_of(window, several=several)
    window.stepping = threading.get_ident()
    current.abandon_in_vain("the call changed", 7)
    assert (current.window, window.is_dropped, window.state) == (None, True, ())
    current.take_up_again(7)
    assert current.in_my_step is None, "an interrupt before it leaves would end the window"
    assert current.window is (window if several else None)
    assert (window.given_up is not None) == several
    assert window.state == (state if several else ())  # what was replaced is told by that


@pytest.mark.usefixtures("its_own_garbage")
def test_what_a_call_in_vain_was_made_with_is_held_until_the_next_version():
    window = Window()
    window.state = (kept := Held(),)
    held = weakref.ref(kept)
    del kept
    current = current_of(window, several=True)
    current.abandon_in_vain("the call changed", 7)
    gc.collect()
    assert held() is not None
    current.take_up_again(8)
    gc.collect()
    assert held() is None


def test_it_is_the_first_of_its_version_that_is_taken_up_and_more_than_once():
    first, second = Window(), Window()
    current = current_of(first, several=True)
    current.abandon_in_vain("the call changed", 7)
    current.open(second)  # for the shortest, with what the call was made of
    for _ in range(2):
        current.abandon_in_vain("the call changed", 7)
        current.take_up_again(7)
        assert current.window is first


@pytest.mark.parametrize(
    "ends",
    [
        lambda current: current.take_up_again(8),  # its own step ran
        lambda current: (current.to_seal(7), current.take_up_again(7)),
        lambda current: (current.abandon("the state was released"), current.take_up_again(7)),
        lambda current: (current.open(Window()), current.take_up_again(7)),
    ],
    ids=["another_version", "a_save", "a_release", "another_window"],
)
def test_what_is_over_for_the_others_is_not_taken_up_again(ends):
    window = Window()
    current = current_of(window, several=True)
    current.abandon_in_vain("the call changed", 7)
    ends(current)
    assert current.window is not window
