"""How a failed save is told to a trainer who has asked for a warning."""

from __future__ import annotations

import jax
import pytest

from gockpt_jax import DeviceMemoryError, SaveFailedWarning
from gockpt_jax.storage.files.storage_errors import storage_error
from gockpt_jax.window.failures import named, surface, window_failed


def warned_of(error, cause):
    error.__cause__ = cause
    with pytest.warns(SaveFailedWarning) as told:
        surface(error, "warn")
    return str(told[0].message)


@pytest.mark.parametrize("end", ["", "."])
def test_a_cause_that_the_error_tells_is_told_once(tmp_path, end):
    refused = OSError(20, f"Not a directory{end}")
    told = warned_of(storage_error("the save of step 3", tmp_path, refused), refused)
    assert told.startswith("StorageError: the save of step 3 failed: [Errno 20] Not a directory. N")
    assert told.endswith(" The next save tries anew.")
    injected = RuntimeError("injected")
    assert warned_of(window_failed(injected), injected).endswith("opens a new window.")


@pytest.mark.parametrize("end", ["", "."])
def test_another_cause_ends_the_sentence(end):
    told = warned_of(RuntimeError(f"it failed{end}"), ValueError("why"))
    assert told == "RuntimeError: it failed, from ValueError('why')."
    assert warned_of(RuntimeError("it failed"), ValueError()).endswith(", from ValueError().")


def test_an_interrupt_is_raised_whatever_was_asked_for():
    with pytest.raises(KeyboardInterrupt):
        surface(KeyboardInterrupt(), "warn")


def test_a_save_that_a_device_had_no_room_for_has_that_as_its_cause():
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")
    told, other = named(7, full), OSError()
    assert isinstance(told, DeviceMemoryError)
    assert told.__cause__ is full
    assert named(7, other) is other
