"""At which call a save that waits is handed over, played with threads in the place of processes."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from gockpt_jax.errors import ProcessError
from gockpt_jax.storage.managing.turn import MARGIN_CALLS, Turn, told_of_turns
from gockpt_jax.window.processes import Processes

WAIT_SECS = 60
KEY = "ThreadSaveMultiHostValueHolder:set_value_end.7"


class Group:
    """What the processes of a job tell each other."""

    def __init__(self, count: int):
        self.told: dict[int, str] = {}
        self.all_here = threading.Barrier(count)


class Member(Processes):
    """One process of a group; `asked` is set when it has told what it knows."""

    def __init__(self, group: Group, index: int):
        super().__init__()
        self.several = group.all_here.parties > 1
        self.asked = threading.Event()
        self._group, self._index = group, index

    def gather(self, subject: str, mine: str) -> dict[int, str]:
        assert subject == "turn"
        self._group.told[self._index] = mine
        self.asked.set()
        self._group.all_here.wait(WAIT_SECS)
        return dict(self._group.told)


class Trainer:
    """A process that makes calls while a thread of Orbax's hears of the end of a save."""

    def __init__(self, group: Group, index: int):
        self.processes = Member(group, index)
        self.turn = Turn(self.processes)
        self.barrier = self.turn.told_at(lambda **_: None)
        self.calls = 0
        self._orbax = ThreadPoolExecutor(1)

    def call(self, *, anyone_waits: bool = True) -> bool:
        self.calls += 1
        return self.turn.has_come(self.calls, anyone_waits=anyone_waits)

    def end_save(self) -> Future[None]:
        """The save has ended here; returns when this process has told so."""
        ended = self._orbax.submit(self.barrier, key=KEY, timeout_ms=1000)
        assert self.processes.asked.wait(WAIT_SECS)
        return ended

    def until_the_turn(self, calls_before: int) -> int:
        """Makes calls, some before the save has ended here; gives the number of the last."""
        for _ in range(calls_before):
            assert not self.call()
        self.end_save()
        while not self.call():
            pass
        return self.calls


def group_of(count: int) -> list[Trainer]:
    group = Group(count)
    return [Trainer(group, index) for index in range(count)]


@pytest.mark.parametrize(
    ("count", "seed"), [(count, seed) for count in (2, 4) for seed in range(10)] + [(256, 0)]
)
def test_the_turn_is_at_one_call_however_far_they_are(count, seed):
    before = np.random.default_rng(seed).integers(0, 5 * MARGIN_CALLS, count).tolist()
    with ThreadPoolExecutor(count) as pool:
        played = [
            pool.submit(trainer.until_the_turn, calls)
            for trainer, calls in zip(group_of(count), before, strict=True)
        ]
        assert [p.result(WAIT_SECS) for p in played] == [max(before) + MARGIN_CALLS] * count


def test_alone_it_is_the_next_call():
    assert group_of(1)[0].until_the_turn(3) == 4


def test_nobody_waits_for_the_others_within_the_margin():
    fast, slow = group_of(2)
    fast.end_save()
    assert [fast.call() for _ in range(MARGIN_CALLS - 1)] == [False] * (MARGIN_CALLS - 1)
    slow.end_save().result(WAIT_SECS)
    assert fast.call()
    assert [slow.call() for _ in range(MARGIN_CALLS)] == [False] * (MARGIN_CALLS - 1) + [True]


def test_nobody_waits_for_the_others_if_no_save_does():
    fast, slow = group_of(2)
    ended = fast.end_save()
    assert not any(fast.call(anyone_waits=False) for _ in range(3 * MARGIN_CALLS))
    slow.end_save()
    ended.result(WAIT_SECS)


def test_a_save_that_came_late_finds_the_turn_gone_by():
    """At the same call too: all of them have heard."""
    trainers = group_of(2)
    ended = [trainer.end_save() for trainer in trainers]
    assert not any(t.call(anyone_waits=False) for t in trainers for _ in range(2 * MARGIN_CALLS))
    assert [t.call() for t in trainers] == [True, True]
    for each in ended:
        each.result(WAIT_SECS)


def test_a_call_that_is_made_again_is_the_same():
    """It has failed, on one process alone, before it reached a device."""
    first, second = group_of(2)
    for ended in [trainer.end_save() for trainer in (first, second)]:
        ended.result(WAIT_SECS)
    for n in range(MARGIN_CALLS):
        made = [trainer.call() for trainer in (first, second)]
        assert first.turn.has_come(first.calls, anyone_waits=True) == made[0]
        assert made == [n == MARGIN_CALLS - 1] * 2


def test_whatever_else_begins_a_save_makes_the_turn_void():
    trainers = group_of(2)
    for ended in [trainer.end_save() for trainer in trainers]:
        ended.result(WAIT_SECS)
    for trainer in trainers:
        trainer.turn.saving_here()
        trainer.barrier(key=KEY, timeout_ms=1000)
        assert not any(trainer.call() for _ in range(3 * MARGIN_CALLS))


def test_other_barriers_say_nothing():
    (alone,) = group_of(1)
    alone.barrier(key="async_write_complete.7", timeout_ms=1000)
    assert not alone.call()


@pytest.mark.parametrize("kind", [ProcessError, RuntimeError])
def test_where_a_process_is_gone_who_comes_next_hears_of_it(monkeypatch, kind):
    """Or the coordination service, of which JAX says so."""

    def gone(*_: Any) -> Any:
        raise kind("process 1 did not come")

    here, _ = group_of(2)
    monkeypatch.setattr(here.processes, "gather", gone)
    with ThreadPoolExecutor(1) as orbax:  # where the save that has ended has not failed
        orbax.submit(here.barrier, key=KEY, timeout_ms=1000).result()
    assert not any(here.call() for _ in range(MARGIN_CALLS - 1))
    with pytest.raises(ProcessError, match="process 1"):
        here.call()


def test_one_that_is_missing_is_not_waited_for_again():
    here, _ = group_of(2)
    here.processes.is_one_missing = True
    with ThreadPoolExecutor(1) as orbax:
        orbax.submit(here.barrier, key=KEY, timeout_ms=1000).result()
    assert not here.processes.asked.is_set()


@pytest.mark.parametrize("has_barrier", [False, True])
def test_what_else_the_options_say_stays(has_barrier):
    met: list[dict[str, Any]] = []
    barrier = (lambda **said: met.append(said)) if has_barrier else None
    users = ocp.options.AsyncOptions(timeout_secs=11, barrier_sync_fn=barrier)
    (alone,) = group_of(1)
    given = ocp.CheckpointManagerOptions(max_to_keep=3, async_options=users)
    options = told_of_turns(given, alone.turn)
    assert (options.max_to_keep, options.async_options.timeout_secs) == (3, 11)
    assert not alone.call()
    with ThreadPoolExecutor(1) as orbax:
        orbax.submit(options.async_options.barrier_sync_fn, key=KEY, timeout_ms=1000).result()
    assert alone.call()
    assert met == [{"key": KEY, "timeout_ms": 1000}] * has_barrier
