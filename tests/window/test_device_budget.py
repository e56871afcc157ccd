"""The device budget: measured once, lowered by what fails, and the same on all processes."""

from __future__ import annotations

import jax
import pytest

from gockpt_jax.window import device_budget
from gockpt_jax.window.device_budget import DeviceBudget
from gockpt_jax.window.processes import Processes

FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")


class TwoProcesses(Processes):
    """This one, and another that has said what it knows."""

    def __init__(self, other_bytes):
        super().__init__()
        self.several, self.other_bytes = True, other_bytes

    def least(self, subject, mine):
        return min((n for n in (mine, self.other_bytes[subject]) if n is not None), default=None)


@pytest.fixture
def free(monkeypatch):
    """Bytes that the device tells, by what they are behind."""
    told = {"peak_bytes_in_use": None, "bytes_in_use": None}
    monkeypatch.setattr(
        device_budget, "device_headroom_bytes", lambda used="peak_bytes_in_use": told[used]
    )
    return told


@pytest.mark.parametrize(("left", "allowed"), [(None, 8192 + 512), (1000, 8192 + 1000)])
def test_what_is_in_flight_had_room(free, left, allowed):
    free["bytes_in_use"] = left
    device = DeviceBudget(16384, Processes())
    assert device.allows_less(2048, 8192, FULL)
    assert device.limit_bytes == allowed
    assert not device.allows_less(0, 8192, FULL), "the host's, of what it holds already"
    assert not device.allows_less(1024, 4096, RuntimeError("another"))
    assert device.limit_bytes == allowed


@pytest.mark.parametrize(("left", "allowed"), [(10**9, 1536), (1, 512), (700, 700)])
def test_of_what_did_not_fit_a_fourth_is_left_at_least_and_three_at_most(free, left, allowed):
    free["bytes_in_use"] = left
    device = DeviceBudget(None, Processes())
    assert device.allows_less(2048, 0, FULL)
    assert device.limit_bytes == allowed


@pytest.mark.parametrize("limit_bytes", [2**20, None])
def test_what_is_small_says_nothing_of_the_budget_unless_much_was_in_flight(free, limit_bytes):
    device = DeviceBudget(limit_bytes, Processes())
    device.add(2**20)
    device.release(2**20)
    assert not device.allows_less(4, 0, FULL)
    assert device.limit_bytes == limit_bytes
    assert device.allows_less(4, 2**19, FULL)
    assert device.limit_bytes == 2**19 + 1


def test_devices_are_asked_until_a_step_has_run_and_no_more(free):
    """Their peak would count our own copies, then."""
    device, given = DeviceBudget(None, Processes()), DeviceBudget(500, Processes())
    for left, stepped, limit_bytes in (
        (10_000, False, 10_000),
        (6000, True, 6000),
        (1, True, 6000),
    ):
        free["peak_bytes_in_use"] = left
        device.measure(stepped=stepped)
        given.measure(stepped=stepped)
        assert (device.limit_bytes, given.limit_bytes) == (limit_bytes, 500)


def test_what_has_failed_raises_no_limit(free):
    free["peak_bytes_in_use"] = 10_000
    device = DeviceBudget(None, Processes())
    device.measure(stepped=False)
    assert device.allows_less(8000, 4000, FULL)
    assert device.limit_bytes == 6000
    free["peak_bytes_in_use"] = 5000
    device.measure(stepped=True)
    assert device.limit_bytes == 5000


def test_what_was_counted_already_is_not_in_flight_beside_itself(free):
    """Its error is raised; and what is found later in the same save is never more."""
    device = DeviceBudget(16384, TwoProcesses({"device_room": None}))
    device.add(4096 + 2048)
    with pytest.raises(jax.errors.JaxRuntimeError), device.heeded(2048):
        raise FULL
    assert device._found == 4096 + 512
    assert not device.heed(2048, 8192, FULL), "that had room before"
    assert device._found == 4096 + 512
    assert device.heed(2048, 1024, FULL)
    assert device._found == 1024 + 512


def test_what_was_lowered_before_the_first_step_stays_so(free):
    free["peak_bytes_in_use"] = 10_000
    device = DeviceBudget(None, Processes())
    device.measure(stepped=False)
    assert device.allows_less(8000, 0, FULL)
    assert device.limit_bytes == 2000
    for _ in range(2):
        device.measure(stepped=True)
        assert device.limit_bytes == 2000


def test_what_was_lowered_is_not_forgotten_where_no_step_runs(free):
    free["peak_bytes_in_use"] = 10_000
    device = DeviceBudget(None, Processes())
    device.measure(stepped=False)
    assert device.allows_less(8000, 0, FULL)
    for _ in range(2):  # at each save
        device.measure(stepped=False)
        assert device.limit_bytes == 2000


def test_beside_others_the_next_save_has_less_and_this_one_fails(free):
    here, there = {"device_room": None}, {"device_room": None}
    for limit_bytes in (None, 16384):
        device = DeviceBudget(limit_bytes, TwoProcesses(there))
        other = DeviceBudget(limit_bytes, TwoProcesses(here))
        assert not device.allows_less(2048, 0, FULL)
        assert device.limit_bytes == limit_bytes, "the other one lays out this save as before"
        here["device_room"] = device._found
        for one in (device, other):
            one.agree()
            assert one.limit_bytes == 512
        here["device_room"] = None


def test_all_go_by_the_device_with_least_room(free):
    free["peak_bytes_in_use"] = 9000
    device = DeviceBudget(None, TwoProcesses({"device_headroom": 7000, "device_room": None}))
    device.measure(stepped=True)
    assert device.limit_bytes == 7000
