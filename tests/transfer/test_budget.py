"""Byte budgets: what waits, and for whom."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import types

import jax
import pytest
from signals import Signals

from gockpt_jax.transfer.budget import ByteBudget, Loan, device_headroom_bytes


def acquire_on_a_thread(budget, num_bytes):
    """Starts acquiring; the returned list is filled once it has."""
    acquired, about_to = [], threading.Event()

    def run():
        about_to.set()
        acquired.append(budget.acquire(num_bytes))

    thread = threading.Thread(target=run)
    thread.start()
    assert about_to.wait(60)
    return thread, acquired


def test_waits_for_room():
    budget = ByteBudget(10)
    budget.acquire(6)
    thread, acquired = acquire_on_a_thread(budget, 5)
    thread.join(0.05)
    assert thread.is_alive()
    assert acquired == []
    assert budget.used_bytes == 6
    budget.release(1)
    thread.join(60)
    assert acquired
    assert budget.used_bytes == 10


def test_of_a_loan_is_given_back_what_it_has_and_no_more():
    """Whoever lost count of what somebody else has given back takes nothing of others."""
    budget, loan = ByteBudget(None), Loan()
    budget.add(7)  # somebody else's
    budget.add(10, loan)
    budget.acquire(5, loan)
    budget.release(4, loan)
    assert (budget.used_bytes, loan.num_bytes) == (18, 11)
    budget.hand_over(3, loan)
    assert (budget.used_bytes, loan.num_bytes) == (18, 8)
    budget.release(100, loan)
    assert (budget.used_bytes, loan.num_bytes) == (10, 0)
    budget.repay(loan)
    assert (budget.used_bytes, loan.num_bytes) == (10, 0)


def test_one_larger_than_the_limit_goes_alone():
    budget = ByteBudget(10)
    budget.acquire(25)
    assert not budget._fits(1)
    thread, acquired = acquire_on_a_thread(budget, 30)
    budget.release(25)
    thread.join(60)
    assert len(acquired) == 1
    assert budget.used_bytes == 30
    assert budget.peak_bytes == 30


@pytest.mark.parametrize(
    ("limit", "used", "asked", "admitted"),
    [(10, 6, 4, True), (10, 6, 5, False), (10, 0, 99, True), (None, 10**12, 10**12, True),
     (10, 10, 0, True)],
)  # fmt: skip
def test_what_is_admitted_at_once(limit, used, asked, admitted):
    budget = ByteBudget(limit)
    budget.add(used)
    assert budget._fits(asked) is admitted


def test_added_bytes_count_but_do_not_wait():
    budget = ByteBudget(10)
    budget.add(8)
    budget.add(8)
    assert (budget.used_bytes, budget.peak_bytes) == (16, 16)
    assert not budget._fits(1)
    budget.release(16)
    budget.add(3)
    assert (budget.used_bytes, budget.peak_bytes) == (3, 16)


@pytest.mark.parametrize(
    ("first", "one", "other", "used"), [(5, 5, 3, 10), (8, 8, 0, 10), (9, 9, 0, 11), (0, 0, 8, 10)]
)
def test_a_loan_becomes_two(first, one, other, used):
    """What is taken beyond it is there already: nobody waits for room, and it counts."""
    budget, loan, loans = ByteBudget(10), Loan(), (Loan(), Loan())
    budget.add(2)
    budget.acquire(8, loan)
    budget.split(loan, first, *loans)
    assert [x.num_bytes for x in (loan, *loans)] == [0, one, other]
    assert (budget.used_bytes, budget.peak_bytes) == (used, used)
    for each in (loan, *loans) * 2:
        budget.repay(each)
    assert budget.used_bytes == 2
    budget.reset_peak()
    assert budget.peak_bytes == 2


class Awaited(ByteBudget):
    """Tells when somebody has to wait for it."""

    def __init__(self, limit_bytes):
        super().__init__(limit_bytes)
        self.is_awaited = threading.Event()

    def _fits(self, num_bytes):
        fits = super()._fits(num_bytes)
        if not fits:
            self.is_awaited.set()
        return fits


@pytest.mark.parametrize("how", ["release", "repay"])
def test_a_small_request_does_not_wait_behind_a_large_one(how):
    budget, loan, threads = Awaited(10), Loan(), []
    budget.acquire(7)
    budget.acquire(3, loan)
    for num_bytes in (8, 2):
        budget.is_awaited.clear()
        threads.append(acquire_on_a_thread(budget, num_bytes)[0])
        assert budget.is_awaited.wait(60)
    budget.release(3) if how == "release" else budget.repay(loan)
    large, small = threads
    small.join(60)
    found = budget.used_bytes
    budget.release(7)
    large.join(60)
    assert (found, budget.used_bytes) == (9, 10)


def test_what_is_lent_is_given_back_where_it_ends_or_could_not_be_begun():
    budget = ByteBudget(10)
    with budget.lent(6) as give_back:
        pass
    assert budget.used_bytes == 6  # what was begun still has them
    give_back()
    give_back()
    assert budget.used_bytes == 0
    with pytest.raises(KeyboardInterrupt), budget.lent(6) as give_back:
        raise KeyboardInterrupt
    assert budget.used_bytes == 0
    give_back()  # it may have come so far that another thread does, too
    assert budget.used_bytes == 0


def test_an_interrupt_of_giving_back_leaves_nothing_taken(monkeypatch):
    """All later saves would wait for it."""
    budget, repay, times = ByteBudget(10), ByteBudget.repay, []

    def interrupted(self, loan):
        times.append(1)
        if len(times) == 1:
            raise KeyboardInterrupt
        repay(self, loan)

    monkeypatch.setattr(ByteBudget, "repay", interrupted)
    with pytest.raises(KeyboardInterrupt), budget.lent(6):
        raise RuntimeError
    assert budget.used_bytes == 0


def test_an_interrupt_as_it_is_lent_leaves_nothing_taken():
    """In the budget, or on the way from there into the `with`."""
    there = (inspect.getsourcefile(ByteBudget), contextlib.__file__)
    for place in itertools.count(1):
        budget, lent, signals = ByteBudget(10), [], Signals([place], inside=there)
        with contextlib.suppress(KeyboardInterrupt), signals.coming(), budget.lent(6) as give_back:
            lent.append(give_back)
        for give_back in lent:  # what was begun ends
            give_back()
        assert budget.used_bytes == 0, signals.came_at
        if not signals.came_at:
            break
    assert place > 5


def test_the_limit_holds_for_many_threads():
    budget, done = ByteBudget(7), []

    def work(num_bytes):
        for _ in range(50):
            budget.acquire(num_bytes)
            done.append(budget.used_bytes)
            budget.release(num_bytes)

    threads = [threading.Thread(target=work, args=(1 + n % 4,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 400
    assert max(done) <= budget.peak_bytes <= 7
    assert budget.used_bytes == 0


def test_the_cpu_backend_does_not_tell_its_free_memory():
    assert device_headroom_bytes() is None


@pytest.mark.parametrize(
    ("stats", "headroom"),
    [
        pytest.param([(1000, 400), (1000, 700)], 270, id="the-fullest"),
        pytest.param([(1000, 1200), (1000, 100)], 0, id="never-below-none"),
        pytest.param([(1000, 400), None], None, id="one-does-not-tell"),
        pytest.param([(1000, None)], None, id="no-peak"),
    ],
)
def test_the_headroom_of_devices_that_tell(monkeypatch, stats, headroom):
    def device(told):
        names = ("bytes_limit", "peak_bytes_in_use")
        found = told and {n: x for n, x in zip(names, told, strict=True) if x is not None}
        return types.SimpleNamespace(memory_stats=lambda: found)

    monkeypatch.setattr(jax, "local_devices", lambda: [device(told) for told in stats])
    assert device_headroom_bytes() == headroom


def test_the_headroom_as_of_now(monkeypatch):
    stats = {"bytes_limit": 1000, "peak_bytes_in_use": 900, "bytes_in_use": 500}
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert device_headroom_bytes("bytes_in_use") == 450
    assert device_headroom_bytes() == 90
