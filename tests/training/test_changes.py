"""When a step is traced anew, by what it is told of its calls."""

from __future__ import annotations

import pytest

from gockpt_jax.training.changes import Changes

PROGRAMS = 3


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


def test_where_all_steps_run_armed_one_refused_call_is_a_change_while_programs_are_left():
    changes = Changes(always=True)
    for _ in range(PROGRAMS):
        assert refused(changes)
        changes.traced()
        changes.ran_armed()
    assert not refused(changes)


def test_where_no_programs_are_left_it_goes_by_the_windows():
    """An odd batch now and then costs no more than the window that it comes in."""
    changes = Changes(always=True)
    for _ in range(PROGRAMS):
        changes.traced()
    assert not any(refused(changes, is_asked=False) for _ in range(9))
    assert not refused(changes)
    changes.ran_armed()
    assert [refused(changes), refused(changes)] == [False, True]
    assert changes.why_no_more is not None


@pytest.mark.parametrize("always", [False, True])
def test_programs_that_run_armed_may_follow_each_other_for_ever_unless_all_steps_do(always):
    changes = Changes(always=always)
    for _ in range(PROGRAMS):
        assert changes.why_no_more is None
        changes.traced()
        changes.ran_armed()
    assert (changes.why_no_more is not None) == always


def test_why_it_is_not_traced_any_more_tells_of_the_last_change():
    changes = Changes(always=False)
    for _ in range(PROGRAMS):
        changes.traced()
    assert changes.why_no_more.endswith("for each kind of call")
    refused(changes, why="its batch")
    refused(changes)  # nobody knows why
    assert changes.why_no_more.endswith("for each kind of call (of the last change: its batch)")
