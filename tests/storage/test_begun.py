"""What has begun of a save: whose bytes are given back, and what the next save waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import orbax.checkpoint as ocp
import pytest

from gockpt_jax.storage.saving.begun import BegunSave


class Array:
    """One of a save's, of which somebody may give the bytes back."""

    def __init__(self) -> None:
        self.releases = 0

    def release(self) -> None:
        self.releases += 1


class Writing:
    """What a thread of Orbax's has; others may wait for it."""

    def __init__(self, *ends: BaseException | None):
        self.ends = list(ends)

    def result(self, timeout: float | None = None) -> None:
        assert timeout is None
        if (end := self.ends.pop(0)) is not None:
            raise end


def entered(begun: BegunSave, *items: str, folder: str = "7.tmp") -> list[Array]:
    """Items of a save come, with an array each."""
    arrays = []
    for item in items:
        begun.enter(folder, f"{folder}/{item}")
        arrays.append(Array())
        taken: Any = SimpleNamespace(arrays=arrays[-1:])
        begun.add(f"{folder}/{item}", taken)
    return arrays


def test_items_of_one_save_lie_in_one_directory_each_once():
    begun = BegunSave()
    come = [("7.tmp", "a"), ("7.tmp", "b"), ("7.tmp", "a"), ("7.tmp", "b"), ("8.tmp", "b")]
    assert [begun.enter(*each) for each in come] == [True, False, True, False, True]
    begun.expect(8)  # again, as it has been deleted
    assert begun.enter("8.tmp", "c")
    assert (begun.label, begun.number) == (8, 4)


def test_what_is_being_written_is_its_writers():
    begun = BegunSave()
    arrays = entered(begun, "a", "b")
    begun._items["7.tmp/b"].stats.peak_inflight_bytes = 1
    begun.give_back()
    assert [array.releases for array in arrays] == [1, 0]
    begun.give_back()
    assert [array.releases for array in arrays] == [1, 0]
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
    assert begun.enter("7.tmp", "7.tmp/c")  # of another attempt
    entered(begun, "a")
    begun._items["7.tmp/a"].handed_over = failed  # type: ignore[assignment]
    begun.give_up(error)
    with pytest.raises(KeyboardInterrupt):
        begun.wait_for_what_was_left()
    begun.wait_for_what_was_left()  # as it was left
    begun.wait_for_what_was_left()
    assert left.ends == failed.ends == []
    begun.give_back()
    assert [array.releases for array in arrays] == [isinstance(error, OSError), 1]


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
    begun.leave_directory()
    for _ in range(2):
        begun.wait_for_what_was_left()
    assert waited == [10]


def test_what_a_save_before_has_left_unwritten_is_given_back():
    """Stock's managers do not say that its directory could not be made."""
    begun = BegunSave()
    arrays = entered(begun, "a", "b")
    begun.give_back_before()
    assert [array.releases for array in arrays] == [0, 0]
    arrays += entered(begun, "a", folder="8.tmp")
    begun.give_back_before()
    begun.give_back_before()
    assert [array.releases for array in arrays] == [1, 1, 0]


def test_what_nobody_accounts_for_is_given_back():
    """An interrupt comes just before: its host arrays are held by nobody else."""
    taken: Any = Array()
    with pytest.raises(AttributeError):  # as good as an interrupt there
        BegunSave().add("7.tmp/a", taken)
    assert taken.releases == 1
