"""The time of a step, from calls alone."""

from __future__ import annotations

import types

import numpy as np
import pytest

from gockpt_jax.window import planner
from gockpt_jax.window.clock import StepClock
from gockpt_jax.window.plan import Facts


def told(clock, secs, start=0.0):
    """Calls that far apart; when the last was."""
    for now in start + np.concatenate([[0.0], np.cumsum(secs)]):
        clock.tick(float(now))
    return start + sum(secs)


def test_nothing_is_known_from_a_few_steps():
    clock = StepClock()
    told(clock, [1.0] * 47)
    assert clock.secs is None
    clock.tick(48.0)
    assert clock.secs == 1.0


def test_a_loop_that_reads_its_loss_now_and_then():
    """Seven calls return at once, the eighth waits for all eight steps."""
    clock = StepClock()
    told(clock, ([0.001] * 7 + [1.593]) * 20)
    assert clock.secs == pytest.approx(0.2, rel=1e-3)


def test_evaluations_and_waits_for_data_are_left_out():
    clock = StepClock()
    secs = np.full(160, 0.2)
    secs[[5, 70]] = 300.0
    told(clock, secs)
    assert clock.secs == pytest.approx(0.2)


def test_pauses_do_not_count():
    clock = StepClock()
    end = 0.0
    for _ in range(3):
        end = told(clock, [0.5] * 20, end + 1000.0)
        clock.pause()
    assert clock.secs == pytest.approx(0.5)


def test_stretches_have_parts_where_saves_come_often():
    """Of ten steps from save to save nine are from call to call: 48 of them are enough."""
    clock = StepClock()
    for save in range(6):
        assert clock.secs is None
        told(clock, [0.5] * 9, start=1000.0 * save)
        clock.pause()
    assert clock.secs == pytest.approx(0.5)


def test_the_newest_steps_count():
    clock = StepClock()
    told(clock, [1.0] * 400 + [2.0] * 160)
    assert clock.secs == pytest.approx(2.0)


def test_plans_go_by_it_and_by_the_rate_of_the_link(monkeypatch):
    clock = StepClock()
    told(clock, [2.0] * 48)
    monkeypatch.setattr(planner, "LINK", types.SimpleNamespace(bytes_per_sec=5.0))
    assert planner.measured_facts(clock) == Facts(step_secs=2.0, link_bytes_per_sec=5.0)
