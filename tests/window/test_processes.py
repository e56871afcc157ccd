"""What the processes of a job ask each other, and when: here they are threads of one process."""

from __future__ import annotations

import collections
import functools
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from gockpt_jax import ProcessError, SnapshotOnlyWarning, StepMismatchError, WindowOptions
from gockpt_jax.window import processes
from gockpt_jax.window.agreement import Agreement
from gockpt_jax.window.processes import Processes, attempted, in_short

LIMIT_SECS = 60  # only ends a test that hangs


class Service:
    """The coordination service of a job, of which each process is a client.

    Attributes:
      kept: What it has been told.
      absent: Processes for which the others wait in vain.
      is_gone: Whether it tells nothing any more.
      waited_secs: How long each subject was to be waited for.
    """

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.absent: set[int] = set()
        self.is_gone = False
        self.waited_secs: dict[str, float] = {}
        self._lock = threading.Lock()
        self._barriers: dict[str, threading.Barrier] = {}

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self._lock:
            if key in self.kept and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.kept[key] = value

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        if self.is_gone:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE")
        with self._lock:
            found = [(k, v) for k, v in self.kept.items() if k.startswith(folder)]
        return sorted(found, reverse=True)  # any order is as good as another

    def key_value_delete(self, folder: str) -> None:
        with self._lock:
            self.kept = {k: v for k, v in self.kept.items() if not k.startswith(folder)}

    def wait_at_barrier(self, name: str, timeout_ms: int, process_ids: list[int]) -> None:
        self.waited_secs[name.rpartition("/")[2]] = timeout_ms / 1000
        there = len(set(process_ids) - self.absent)
        with self._lock:
            barrier = self._barriers.setdefault(f"{name} {there}", threading.Barrier(there))
        barrier.wait(LIMIT_SECS)
        if there < len(process_ids):
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: late.\nMore of it")


class Job:
    """Processes of which each does its part on a thread."""

    def __init__(self, patch: pytest.MonkeyPatch, count: int):
        self.service, self.patch, self._count = Service(), patch, count
        patch.setattr(jax, "process_count", lambda: count)
        patch.setattr(processes._compat, "coordination_client", lambda: self.service)

    def made(self, members: set[int] | None = None, before: int = 0) -> dict[int, Processes]:
        """What the processes make, each after so many others of these members have asked."""
        found = {}
        for index in range(self._count) if members is None else members:
            self.patch.setattr(jax, "process_index", lambda index=index: index)
            self.patch.setattr(processes, "_asking", collections.Counter())
            made = [Processes(members) for _ in range(before + 1)]
            assert len({part.prefix for part in made}) == len(made)
            found[index] = made[-1]
        return found


def everywhere(parts: dict[int, Processes], ask: Callable[[int, Processes], Any]) -> dict[int, Any]:
    with ThreadPoolExecutor(len(parts)) as threads:
        asked = {index: threads.submit(ask, index, part) for index, part in parts.items()}
        return {index: future.result(LIMIT_SECS) for index, future in asked.items()}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch, 3)


def test_an_objection_is_the_same_everywhere(job: Job) -> None:
    parts = job.made()
    for against, answers in (
        ({1: "no"}, ["process 1: no"]),
        ({}, [None]),  # that of the question before is not taken for this one's
        ({0: "no", 2: "nor I"}, ["process 0: no", "process 2: nor I"]),
        ({0: ""}, ["process 0: "]),
    ):
        told = everywhere(parts, lambda i, part, a=against: part.objection("window", a.get(i)))
        assert set(told) == {0, 1, 2}
        assert len(set(told.values())) == 1
        assert told[0] in answers


@pytest.mark.parametrize("members", [None, {1, 2}])
def test_what_all_say_is_gathered_and_forgotten_behind_them(job: Job, members) -> None:
    parts, kept = job.made(members), []
    for n in range(5):
        told = everywhere(parts, lambda i, part, n=n: part.gather("facts", f"{n} of {i}"))
        assert [list(x.items()) for x in told.values()] == [
            [(i, f"{n} of {i}") for i in parts]
        ] * len(parts)
        kept.append(len(job.service.kept))
    assert kept[1:] == kept[1:2] * 4


def test_the_least_of_what_has_a_bound(job: Job) -> None:
    parts = job.made()
    for numbers, least in (((None, 5, 13), 5), ((None,) * 3, None), ((0, None, 7), 0)):
        told = everywhere(parts, lambda i, part, n=numbers: part.least("room", n[i]))
        assert list(told.values()) == [least] * 3


def test_subjects_members_and_managers_are_apart(job: Job) -> None:
    """None of them waits for another, or is told of its answers."""
    some, all_of_them, second = job.made({1, 2}), job.made(), job.made(before=1)
    assert [part.several for part in some.values()] == [True, True]
    for index, mine in ((1, "first"), (2, "second")):
        told = everywhere(some, lambda i, part, m=mine: part.gather("facts", f"{m} of {i}"))
        assert told[index] == {1: f"{mine} of 1", 2: f"{mine} of 2"}
    assert len({parts[1].prefix for parts in (some, all_of_them, second)}) == 3
    for parts in (all_of_them, second):
        assert set(everywhere(parts, lambda i, part: part.objection("facts", None))) == {0, 1, 2}
        assert len({part.prefix for part in parts.values()}) == 1
    everywhere(all_of_them, lambda _, part: part.barrier("other"))


def test_what_one_process_makes_alone_and_asks_nothing_of_is_not_counted(job: Job) -> None:
    """A manager that only reads, or a handler of which it wants the metadata."""
    asking = {}
    for index in range(3):
        job.patch.setattr(jax, "process_index", lambda index=index: index)
        job.patch.setattr(processes, "_asking", collections.Counter())
        _, asking[index] = Processes() if index == 0 else None, Processes()
        if index:  # nor do these count, which are others
            assert Processes({1, 2}).prefix == "gockpt_1_2_0"
        assert asking[index].prefix == "gockpt_all_0"
    assert everywhere(asking, lambda i, part: part.least("room", i)) == dict.fromkeys(range(3), 0)


def test_each_question_says_how_long_it_waits(job: Job) -> None:
    """Where others read a checkpoint, for hours."""
    parts = job.made()
    everywhere(parts, lambda _, part: part.objection("read", None, processes.READING_SECS))
    everywhere(parts, lambda _, part: part.gather("met", "", processes.MEETING_SECS))
    everywhere(parts, lambda _, part: part.objection("armed", None))
    assert job.service.waited_secs == {
        "read": processes.READING_SECS, "met": processes.MEETING_SECS,
        "armed": processes.PATIENCE_SECS,
    }  # fmt: skip


def test_what_is_attempted_may_be_interrupted() -> None:
    error = OSError("a line\nand more " + "of it" * 1000)
    found, failure = attempted(functools.partial(raises, error))
    assert (found, failure) == (None, error)
    told = in_short(failure)
    assert told is not None
    assert told.startswith("OSError: a line and more of it")
    assert len(told) < 1000  # each process is told of it
    with pytest.raises(KeyboardInterrupt):
        attempted(functools.partial(raises, KeyboardInterrupt()))


def raises(error: BaseException) -> None:
    raise error


def test_settings_are_compared_once(job: Job) -> None:
    parts, told = job.made(), {"steps": 3, "arm": "window"}
    odd = {**told, "arm": "always"}

    def refused(index: int, part: Processes) -> str:
        with pytest.raises(ProcessError) as raised:
            part.require_alike(odd if index == 1 else told)
        return str(raised.value)

    for text in everywhere(parts, refused).values():
        assert "arm is window on process 0, always on process 1, window on process 2" in text
    everywhere(parts, lambda _, part: part.require_alike(told))
    everywhere(parts, lambda _, part: part.least("room", 1))
    # Until then one may have compiled its first step, and another found it in a cache.
    waited_secs = job.service.waited_secs
    assert waited_secs["settings"] == processes.MEETING_SECS > 2 * waited_secs["room"]
    assert waited_secs["room"] == processes.PATIENCE_SECS
    job.service.absent = {1, 2}
    parts[0].require_alike(told)  # not asked again
    Processes({0}).require_alike(told)


@pytest.mark.parametrize(
    ("absent", "named"), [({1}, "process 1"), ({1, 2}, "processes 1, 2"), ({0}, "process 0")]
)
def test_who_does_not_come_is_named_and_may_come_again(
    job: Job, absent: set[int], named: str
) -> None:
    parts = job.made()
    assert [part.is_one_missing for part in parts.values()] == [False] * 3

    def wait(index: int, part: Processes) -> str:
        with pytest.raises(ProcessError) as raised:
            part.barrier("verified")
        return str(raised.value)

    def come_too_late(index: int, part: Processes) -> None:
        job.service.absent = set(here)
        told = wait(index, part)
        if len(absent) == 1:  # else it may be told of the other
            assert told.startswith(f"process {index} came to `verified` when others had ceased")

    for _ in range(2):
        job.service.absent = set()
        everywhere(parts, lambda _, part: part.barrier("verified"))
        assert [part.is_one_missing for part in parts.values()] == [False] * 3
        job.service.absent = absent
        here = {i: part for i, part in parts.items() if i not in absent}
        for told in everywhere(here, wait).values():
            assert re.match(rf"{named} did not come to `verified` within \d\d? s: DEADLINE", told)
            assert "DEADLINE_EXCEEDED: late. Look at its log" in told
            assert "is saved" not in told  # it may be a restore that waits
        assert [part.is_one_missing for part in here.values()] == [True] * len(here)
        everywhere({i: parts[i] for i in absent}, come_too_late)


def test_a_service_that_is_gone_names_nobody(job: Job) -> None:
    parts = job.made()
    job.service.absent, job.service.is_gone = {1, 2}, True
    with pytest.raises(ProcessError, match=r"^a process did not come"):
        parts[0].barrier("turn")


@pytest.mark.parametrize("call", ["set", "delete", "dir_get"])
def test_a_service_that_goes_between_barriers_is_told_as_a_process_that_is_gone(
    job: Job, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    parts = job.made()
    everywhere(parts, lambda i, part: part.gather("facts", str(i)))

    def gone(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: Connection reset.\nMore of it")

    monkeypatch.setattr(job.service, f"key_value_{call}", gone)
    asked: dict[str, Callable[[Processes], Any]] = {
        "set": lambda part: part.objection("facts", "no"),
        "delete": lambda part: part.gather("facts", "x"),
        "dir_get": lambda part: part.least("facts", 3),
    }

    def ask(_: int, part: Processes) -> None:
        if call == "delete" and part is not parts[0]:  # the lead alone forgets
            assert asked[call](part)
            return
        with pytest.raises(ProcessError, match=r"service does not answer.*Connection reset\. It"):
            asked[call](part)
        assert part.is_one_missing

    everywhere(parts, ask)


def test_several_need_a_service(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes._compat, "coordination_client", lambda: None)
    with pytest.raises(RuntimeError, match="3 processes save together, and nothing connects them"):
        Processes()


def test_one_process_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes._compat, "coordination_client", lambda: None)
    alone = Processes({0})
    assert alone.prefix == Processes({0}).prefix, "what they write into one directory is one's"
    assert alone.share == (0, 1)
    alone.barrier("commit")
    assert alone.gather("facts", "mine") == {0: "mine"}
    assert (alone.least("room", 7), alone.least("room", None)) == (7, None)
    assert (alone.objection("armed", "no"), alone.objection("armed", None)) == ("no", None)
    # What is compiled a step later is ready then, though it was not when it was first asked for.
    asking, program = agreement(alone), Program("still compiling")
    assert asking.why_not_ready(program, 7) == "still compiling"
    program.why_not = None
    assert asking.why_not_ready(program, 7) is None


# --- What a program is asked for -----------------------------------------------------------------


class Program:
    """One that is armed, or being so."""

    def __init__(self, why_not: str | None = None):
        self.why_not, self.waited = why_not, 0

    def wait_until_ready(self) -> None:
        self.waited += 1

    def why_not_ready(self) -> str | None:
        return self.why_not


class Step:
    def __init__(self, program: Program | None, why_not: str | None = None):
        self.program, self.why_not = program, why_not

    def give_up(self, why: str) -> None:
        self.program, self.why_not = None, why


class Told:
    """Two processes, of which the other says what it is told to."""

    several = True

    def __init__(self, *answers: str | None):
        self.answers, self.asked = list(answers), []

    def objection(self, subject: str, mine: str | None) -> str | None:
        self.asked.append((subject, mine))
        other = self.answers.pop(0)
        return other if mine is None else f"process 0: {mine}"


def agreement(told: Any, **options: Any) -> Agreement:
    return Agreement(WindowOptions(**options), told)


def test_a_step_is_settled_once_and_again_with_each_plan() -> None:
    told, step = Told(None, None, "process 1: no"), Step(None)
    settled = agreement(told)
    settled.settle(step, planned=False)  # nothing is known of it yet
    assert told.asked == []
    step.program = Program()
    for planned in (False, False, True):
        settled.settle(step, planned=planned)
    step.program = None  # called in another way
    settled.settle(step, planned=False)
    assert told.asked == [("program", None)] * 2
    step.program = Program()  # traced anew
    settled.settle(step, planned=False)
    assert (step.program, step.why_not) == (None, "process 1: no")
    settled.settle(step, planned=False)
    assert told.asked == [("program", None)] * 3


def test_a_step_that_cannot_be_armed_here_is_told_once() -> None:
    told, step = Told(None), Step(None, "no program")
    settled = agreement(told)
    for _ in range(2):
        settled.settle(step, planned=False)
    assert told.asked == [("program", "no program")]
    assert step.why_not == "no program"


@pytest.mark.parametrize("agreed", [False, True])
def test_a_step_that_all_have_agreed_on_is_not_given_up_by_one(agreed) -> None:
    """The others would run it armed: an error here alone ends this process."""
    told, step = Told(None), Step(Program())
    held = agreement(told)
    if agreed:
        held.settle(step, planned=True)
    expected: tuple[type[Exception], str] = (OSError, "^injected")
    if agreed:
        expected = (ProcessError, "so it ends: OSError: injected")
    with pytest.raises(expected[0], match=expected[1]), held.held(step):
        raise OSError("injected")


@pytest.mark.parametrize(
    "error",
    [ProcessError("of all"), StepMismatchError("the user's"), SnapshotOnlyWarning("an error")],
)
def test_what_is_raised_anyway_is_raised_as_it_is(error) -> None:
    held, step = agreement(Told(None)), Step(Program())
    held.settle(step, planned=True)
    with pytest.raises(type(error)) as raised, held.held(step):
        raise error
    assert raised.value is error


def test_readiness_is_asked_once_for_each_save_until_all_are_ready() -> None:
    told, program, other = Told("busy", None), Program(), Program()
    asking = agreement(told)
    assert [asking.why_not_ready(program, n) for n in (7, 7, 7)] == ["busy"] * 3
    assert told.asked == [("armed", None)]
    assert [asking.why_not_ready(program, n) for n in (8, 8, 9)] == [None] * 3
    assert told.asked == [("armed", None)] * 2
    told.answers.append("busy too")
    assert asking.why_not_ready(other, 9) == "busy too"
    assert program.waited == 0


def test_what_is_not_ready_here_is_told() -> None:
    told = Told(None)
    asked = agreement(told).why_not_ready(Program("still compiling"), 7)
    assert asked == "process 0: still compiling"
    assert told.asked == [("armed", "still compiling")]


def test_a_fixed_k_waits_for_the_armed_step() -> None:
    program = Program()
    assert agreement(Told(None), steps=3).why_not_ready(program, 7) is None
    assert program.waited == 1
