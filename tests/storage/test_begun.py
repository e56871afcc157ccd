"""What has begun of a save: whose bytes are given back, and what the next save waits for."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from gockpt_jax import GoCkptSave
from gockpt_jax.errors import StorageError
from gockpt_jax.storage.files.item_files import TEMPORARY
from gockpt_jax.storage.saving.begun import BegunSave
from gockpt_jax.storage.saving.hand_over import HAND_OVER
from gockpt_jax.storage.saving.state_handler import StateHandler

ERROR = OSError("of which nobody has told")


class Array:
    """One of a save's, of which somebody may give the bytes back."""

    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


class Report:
    """Of one item's save."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.is_finished = False

    def failed(self, error: BaseException) -> None:
        assert not self.is_finished
        self.error, self.is_finished = error, True


class Writing:
    """What a thread of Orbax's has; others may wait for it."""

    def __init__(
        self, *ends: BaseException | None, may_begin: bool = True, has_begun: bool = True
    ) -> None:
        self.ends = list(ends)
        self.waited_secs: list[float | None] = []
        self.may_begin, self.will_not_begin = may_begin, False
        self.is_cancelled = False
        self.is_beginning = self._has_begun = has_begun
        self.has_ended = False

    def wait(self, timeout: float | None) -> None:
        self.waited_secs.append(timeout)
        if (end := self.ends.pop(0)) is not None:
            raise end

    def cancel(self) -> None:
        self.is_cancelled = True
        if not self._has_begun:
            self.may_begin, self.will_not_begin = False, True


def entered(begun: BegunSave, *items: str, folder: str = "7.tmp") -> list[Array]:
    """Items of a save come, with an array each; one that is the save itself by the name ""."""
    arrays = []
    for item in items:
        directory = f"{folder}/{item}" if item else folder
        begun.enter(folder, directory)
        arrays.append(Array())
        taken: Any = SimpleNamespace(arrays=arrays[-1:], pending=Report())
        begun.add(directory, taken)
    return arrays


def test_items_of_one_save_lie_in_one_directory_each_once():
    begun = BegunSave()
    come = [("7.tmp", "a"), ("7.tmp", "b"), ("7.tmp", "a"), ("7.tmp", "b"), ("8.tmp", "b")]
    assert [begun.enter(*each) for each in come] == [True, False, True, False, True]
    begun.expect(8)  # again, as it has been deleted
    assert begun.enter("8.tmp", "c")
    assert begun.label == 8


def test_what_is_being_written_is_its_writers():
    """They begin to write no more of it."""
    begun = BegunSave()
    arrays = entered(begun, "a", "b")
    items = [begun.item(f"7.tmp/{name}") for name in "ab"]
    items[1].stats.peak_inflight_bytes = 1
    begun.give_up(ERROR)
    assert [array.releases for array in arrays] == [1, 0]
    for item in items:
        with pytest.raises(RuntimeError, match="no more of it is written"):
            item.stats.require_wanted()
    assert begun.enter("7.tmp", "7.tmp/c")  # of another attempt


@pytest.mark.parametrize("error", [OSError(), KeyboardInterrupt()], ids=repr)
def test_what_was_left_to_orbax_goes_on_and_is_waited_for(error):
    """An error may come before its writing has begun; behind an interrupt it may have."""
    begun = BegunSave()
    arrays = entered(begun, "a", "b")
    interrupt, failed = KeyboardInterrupt(), Writing(OSError("of which nobody is told"))
    left: Any = Writing(interrupt, None)
    begun._items["7.tmp/a"].handed_over = left
    begun.give_up(error)
    assert [array.releases for array in arrays] == [isinstance(error, OSError), 1]
    assert left.is_cancelled == isinstance(error, OSError)
    assert begun.enter("7.tmp", "7.tmp/c")  # of another attempt
    entered(begun, "a")
    begun._items["7.tmp/a"].handed_over = failed  # type: ignore[assignment]
    begun.give_up(error)
    with pytest.raises(KeyboardInterrupt):
        begun.left.wait()
    begun.left.wait()  # as it was left
    begun.left.wait()
    assert left.ends == failed.ends == []
    # What goes on is waited for to its end, and what has failed for as long as closing may take.
    assert left.waited_secs == [None if isinstance(error, KeyboardInterrupt) else 10] * 2


@pytest.mark.parametrize("by", ["handed_over", "written"])
def test_only_a_save_of_its_label_waits_for_what_has_failed(by):
    """Where the storage hangs, others go on; nor is it closed for."""
    begun = BegunSave()
    begun.expect(7)
    entered(begun, "a")
    hangs: Any = Writing(*[TimeoutError()] * 3)
    begun._items["7.tmp/a"].stats.peak_inflight_bytes = int(by == "written")
    setattr(begun._items["7.tmp/a"], by, hangs)
    begun.give_up(ERROR)
    begun.expect(8)
    begun.left.wait(8)
    assert hangs.waited_secs == []
    begun.expect(7)
    with pytest.raises(StorageError, match="is still being written after 300 s"):
        begun.left.wait(7)
    begun.left.wait()
    assert hangs.waited_secs == [300, 10]
    assert begun.left._left == []


def test_what_has_stopped_is_forgotten_whatever_is_saved_next():
    begun = BegunSave()
    begun.expect(7)
    entered(begun, "a")
    begun._items["7.tmp/a"].handed_over = stops = Writing()  # type: ignore[assignment]
    begun.give_up(ERROR)
    begun.left.wait(8)
    assert len(begun.left._left) == 1
    stops.may_begin = stops.is_beginning = False
    begun.left.wait(8)
    assert (begun.left._left, stops.waited_secs) == ([], [])


def test_what_is_heard_of_in_the_middle_of_the_next_save_is_waited_for():
    begun = BegunSave()
    begun.expect(7)
    entered(begun, "a")
    writes: Any = Writing(None)
    begun._items["7.tmp/a"].handed_over = writes
    writes.wait = lambda secs: setattr(writes, "is_beginning", False)
    begun.expect(7)
    begun.give_up(ERROR)
    assert not writes.is_beginning


def test_what_is_being_written_may_be_anothers_when_one_is_closed():
    begun, ended = BegunSave(), []
    for name in ("writes", "has ended"):
        ended += entered(begun, "", folder=name)
    begun.item("writes").handed_over = Writing()
    begun.item("has ended").handed_over = Writing(may_begin=False)
    begun.item("has ended").handed_over.is_beginning = False
    begun.give_up_all(ERROR)
    assert [array.releases for array in ended] == [0, 1]
    assert begun.item("writes").pending.error is None


def test_what_cannot_begin_any_more_is_not_waited_for():
    """Its directory may never come, and Orbax's thread waits for that for 300 s."""
    begun = BegunSave()
    entered(begun, "a")
    begun._items["7.tmp/a"].handed_over = Writing(may_begin=False)  # type: ignore[assignment]
    begun.give_up(ERROR)
    begun.left.wait()


@pytest.mark.parametrize(
    ("handed_over", "is_soiled"),
    [
        (Writing(None), True),
        (Writing(may_begin=False, has_begun=False), False),
        (Writing(has_begun=False), False),
    ],
    ids=["written", "has ended", "waits for its directory"],
)
def test_a_save_into_the_directory_of_one_that_is_written(handed_over, is_soiled):
    """Whoever makes the directory has made it before we hear of it."""
    begun = BegunSave()
    array, _ = entered(begun, "a", "never handed over")
    begun._items["7.tmp/a"].handed_over = handed_over
    begun.enter("7.tmp", "7.tmp/a")
    begun.give_up_before(ERROR, one_at_a_time=False)
    assert array.releases == 1
    if is_soiled:
        with pytest.raises(StorageError, match="was still being written into its directory"):
            begun.require_clean()
        begun.left.wait()
        handed_over.may_begin = handed_over.is_beginning = False
        begun.enter("7.tmp", "7.tmp/a")
        begun.give_up_before(ERROR, one_at_a_time=False)
    assert not begun.left._left
    begun.require_clean()


def test_a_directory_is_not_waited_for_for_ever(monkeypatch):
    """Orbax may not have begun to make it, or cannot."""
    waited: list[float | None] = []

    class Made(Writing):
        def __init__(self, coro, name):
            coro.close()

        def result(self, timeout=None):
            waited.append(timeout)
            raise TimeoutError

    monkeypatch.setattr(ocp.future, "CommitFutureAwaitingContractedSignals", Made)
    begun = BegunSave()
    begun.left.leave_directory(RuntimeError())
    for _ in range(2):
        begun.left.wait()
    assert waited == [10]


def test_who_may_be_making_the_directory_of_an_interrupted_save(monkeypatch):
    """A thread of Orbax's that came with it; not what ends another save, nor what waits for it."""
    go_on = threading.Event()

    class Orbaxs(threading.Thread):
        __module__ = "orbax.checkpoint"

        def __init__(self, name: str):
            super().__init__(target=go_on.wait, args=(60,), name=name)

    def made(coro, name):
        coro.close()
        return SimpleNamespace(result=None)

    monkeypatch.setattr(ocp.future, "CommitFutureAwaitingContractedSignals", made)
    begun = BegunSave()
    ends_another, makes, writes = map(Orbaxs, ("save_finalize", "directory", f"{HAND_OVER}_0"))
    ends_another.start()
    begun.expect(7)
    makes.start()
    writes.start()
    begun.left.leave_directory(KeyboardInterrupt())
    go_on.set()
    assert [left.wait for left in begun.left._left] == [makes.join, None]
    for thread in (ends_another, makes, writes):
        thread.join()


@pytest.mark.parametrize(
    ("folders", "one_at_a_time", "given_back"),
    [
        (("best/7", "best/8"), True, [1, 1, 0]),
        (("best/7", "best/8"), False, [0, 0, 0]),
        (("best/7", "last/7"), True, [0, 0, 0]),
        (("run/best_7", "run/last_8"), True, [0, 0, 0]),
        (("best/7", "last/7", "best/8"), True, [1, 1, 0, 0]),
        ((f"best/7{TEMPORARY}-1", f"best/8{TEMPORARY}-2"), True, [1, 1, 0]),
    ],
)
def test_what_a_manager_has_waited_for_is_given_back(folders, one_at_a_time, given_back):
    """Stock's do not say that a directory could not be made; others' saves may overlap."""
    begun, first = BegunSave(), folders[0]
    arrays = entered(begun, "a", "b", folder=first)
    pending = begun.item(f"{first}/a").pending
    for folder in folders[1:]:
        arrays += entered(begun, "a", folder=folder)
        for _ in range(2):
            begun.give_up_before(ERROR, one_at_a_time=one_at_a_time)
    assert [array.releases > 0 for array in arrays] == [bool(n) for n in given_back]
    assert pending.error is (ERROR if given_back[0] else None)
    begun.give_up_all(ERROR)
    assert all(array.releases for array in arrays)


def test_what_its_manager_has_not_waited_for_is_let_be():
    """An interrupt has ended its wait, and the save is healthy."""
    begun = BegunSave()
    (array,) = entered(begun, "a", folder="best/7")
    item: Any = begun.item("best/7/a")
    item.written = Writing()
    entered(begun, "a", folder="best/8")
    begun.give_up_before(ERROR, one_at_a_time=True)
    assert (array.releases, item.pending.error, item.stats.is_given_up) == (0, None, False)


def test_what_nobody_will_begin_to_write_is_given_back():
    """A checkpointer alone: each save lies in another directory, and any may overlap."""
    begun, of_each = BegunSave(), {}
    for name in ("began", "waits", "refused", "committed"):
        of_each[name] = entered(begun, "", folder=name)[0]
    saves = {name: begun.item(name) for name in of_each}
    for name in ("began", "waits", "refused"):
        handed_over: Any = Writing(may_begin=name == "waits", has_begun=name == "began")
        handed_over.will_not_begin = name == "refused"
        saves[name].handed_over = handed_over
    saves["committed"].pending.is_finished = True
    entered(begun, "", folder="next")
    begun.give_up_before(ERROR, one_at_a_time=True)
    assert [name for name, array in of_each.items() if array.releases] == ["refused"]
    assert [name for name, save in saves.items() if save.pending.error] == ["refused"]
    entered(begun, "", folder="after it")
    assert [name for name, _ in begun._before] == ["began", "waits", "next"]
    saves["waits"].pending.is_finished = True  # it has failed, and may yet begin
    assert begun.item("waits") is saves["waits"]
    assert not saves["waits"].is_over
    assert begun.item("refused") is None


def test_nothing_is_taken_where_what_was_left_has_been_written(monkeypatch):
    def refuse(begun):
        raise StorageError("it has stopped by now")

    monkeypatch.setattr(BegunSave, "require_clean", refuse)
    handler = StateHandler()
    with pytest.raises(StorageError, match="it has stopped by now"):
        handler.take(GoCkptSave({"w": jnp.ones(3)}))
    assert handler._gockpt_session.host.used_bytes == 0
    handler.close()
