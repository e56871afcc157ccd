"""When a step is traced anew, by what it is told of its calls."""

from __future__ import annotations

import pytest

from gockpt_jax.training.changes import Changes

PROGRAMS, AT_ONCE = 3, 2


def refused(changes, *, last=False, why="", is_asked=True):
    changes.called()
    return changes.refused(why, last=last, is_asked=is_asked)


def test_two_refused_calls_in_a_row_are_a_change():
    changes = Changes(always=False)
    assert [refused(changes) for _ in range(5)] == [False, True, False, True, False]
    changes.called()
    changes.ran_armed()
    assert [refused(changes), refused(changes)] == [False, True]


def test_a_call_counts_once_however_often_it_is_told_of():
    changes = Changes(always=False)
    assert not refused(changes)
    assert not changes.refused("", last=False, is_asked=True)
    assert not refused(changes, last=True)  # of the one that was told of before
    assert changes.refused("", last=False, is_asked=True)


def followed_at_once(changes):
    """Where all steps run armed: the first changes, each a program."""
    changes.traced()
    for _ in range(AT_ONCE):
        assert refused(changes, is_asked=False)
        changes.traced()


def test_where_all_steps_run_armed_the_first_refused_calls_are_changes_at_once():
    """Later it goes by the windows: an odd batch costs no more than the one that it comes in."""
    changes = Changes(always=True)
    followed_at_once(changes)
    for _ in range(3):
        assert not any(refused(changes, is_asked=False) for _ in range(9))
        assert not refused(changes)
        changes.ran_armed()
        assert [refused(changes), refused(changes)] == [False, True]
        changes.traced()
        changes.ran_armed()


def test_changes_that_were_followed_at_once_leave_the_programs_for_windows():
    """The last of them may have been for an odd batch."""
    changes = Changes(always=True)
    followed_at_once(changes)
    for _ in range(PROGRAMS - 1):  # the first call had one
        assert changes.why_no_more is None
        changes.traced()
    assert changes.why_no_more is not None


@pytest.mark.parametrize("always", [False, True])
def test_programs_that_run_armed_may_follow_each_other_for_ever(always):
    changes = Changes(always=always)
    for _ in range(3 * PROGRAMS):
        assert changes.why_no_more is None
        changes.traced()
        changes.ran_armed()


def test_why_it_is_not_traced_any_more_tells_of_the_last_change():
    changes = Changes(always=False)
    for _ in range(PROGRAMS):
        changes.traced()
    assert changes.why_no_more.endswith("for each kind of call")
    refused(changes, why="its batch")
    refused(changes)  # nobody knows why
    assert changes.why_no_more.endswith("for each kind of call (of the last change: its batch)")
