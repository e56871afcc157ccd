"""The time of a step, from when steps have run."""

from __future__ import annotations

import types

import pytest
from window import training_loop

from gockpt_jax.window import clock as clock_module
from gockpt_jax.window import known
from gockpt_jax.window.clock import StepClock
from gockpt_jax.window.facts import Facts


class Probe:
    """Ready when the device has done all that it had been given."""

    def __init__(self, loop, ready_at):
        self._loop, self._ready_at = loop, ready_at

    def block_until_ready(self):
        self._loop.watched_at = self._ready_at


class Loop:
    """A loop and its device: steps take that long there, calls as long here.

    What the watcher is given it does at once: it reads the clock when the probe is ready.
    """

    def __init__(self, monkeypatch):
        self.now = self.device_free_at = self.watched_at = 0.0
        self.version = self.calls = 0
        monkeypatch.setattr(clock_module, "time", types.SimpleNamespace(perf_counter=self.read))
        watcher = types.SimpleNamespace(submit=lambda task: task())
        self.clock = StepClock(watcher, self.probe)

    def read(self):
        return self.watched_at

    def probe(self):
        self.calls += 1
        return Probe(self, max(self.now, self.device_free_at))

    def run(self, steps, device_secs, secs=0.001, reads_every=None):
        for n in range(steps):
            self.clock.tick(self.version)
            self.version += 1
            self.device_free_at = max(self.now, self.device_free_at) + device_secs
            self.now += secs
            if reads_every is not None and n % reads_every == reads_every - 1:
                self.wait()

    def save(self):
        self.clock.pause(self.version)
        self.wait()
        self.now += 1000.0

    def wait(self):
        self.now = max(self.now, self.device_free_at)


@pytest.fixture
def loop(monkeypatch):
    return Loop(monkeypatch)


def test_nothing_is_known_from_a_few_steps(loop):
    loop.run(48, 1.0)
    assert loop.clock.secs is None
    loop.run(1, 1.0)
    assert loop.clock.secs == pytest.approx(1.0)


@pytest.mark.parametrize("reads_every", [None, 1, 8, 100])
def test_however_far_the_loop_is_ahead(loop, reads_every):
    """From call to call it was a thousandth in a loop that reads nothing between its saves."""
    for _ in range(12):
        loop.run(10, 0.2, reads_every=reads_every)
        loop.save()
    assert loop.clock.secs == pytest.approx(0.2, rel=1e-2)


def test_a_loop_that_waits_for_data(loop):
    """The device does in a fifth of the time what comes each second."""
    loop.run(100, 0.2, secs=1.0)
    assert loop.clock.secs == pytest.approx(1.0)


def test_evaluations_and_waits_for_data_are_left_out(loop):
    for n in range(160):
        loop.run(1, 0.2)
        if n in (5, 70):
            loop.wait()
            loop.now += 300.0
    assert loop.clock.secs == pytest.approx(0.2)


def test_pauses_do_not_count(loop):
    for _ in range(4):
        loop.run(20, 0.5)
        loop.save()
    assert loop.clock.secs == pytest.approx(0.5)


def test_stretches_have_parts_where_saves_come_often(loop):
    """Two of ten steps are a stretch, and there are to be three."""
    for _ in range(6):
        assert loop.clock.secs is None
        loop.run(10, 0.5)
        loop.save()
    assert loop.clock.secs == pytest.approx(0.5)


def test_few_probes_are_made(loop):
    """Two for each part, one more for each stretch of a long one."""
    loop.run(161, 1.0)
    assert loop.calls == 11
    for steps, probes in ((0, 0), (1, 2), (10, 2), (16, 2), (17, 3)):
        loop.clock.pause(loop.version)
        loop.calls = 0
        loop.run(steps, 1.0)
        loop.clock.pause(loop.version)
        assert loop.calls == probes


def test_the_newest_steps_count(loop):
    loop.run(400, 1.0)
    loop.run(160, 2.0)
    assert loop.clock.secs == pytest.approx(2.0)


@pytest.mark.parametrize("when", [0, 8, 24])
def test_what_cannot_be_probed_is_left_out(loop, monkeypatch, when):
    """The state was donated, or let go, or a step has failed."""

    def fail():
        raise RuntimeError("Array has been deleted")

    def fail_later():
        raise RuntimeError("a step has failed")

    probe = loop.clock._probe
    loop.run(when, 1.0)
    failed = Probe(loop, 0.0)
    monkeypatch.setattr(failed, "block_until_ready", fail_later)
    for strange in (fail, lambda: None, lambda: failed):
        loop.clock._probe = strange
        loop.run(20, 1.0)
        loop.clock.pause(loop.version)
        loop.clock._probe = probe
        loop.run(20, 1.0)
    loop.run(40, 1.0)
    assert loop.clock.secs == pytest.approx(1.0)


def test_a_stretch_whose_beginning_nobody_has_seen_is_left_out(loop, monkeypatch):
    """Its end was."""

    def fail():
        raise RuntimeError("a step has failed")

    probe, failed = loop.clock._probe, Probe(loop, 0.0)
    monkeypatch.setattr(failed, "block_until_ready", fail)
    loop.clock._probe = lambda: failed
    loop.run(1, 1.0)
    loop.clock._probe = probe
    loop.run(64, 1.0)
    assert loop.clock.secs == pytest.approx(1.0)


def test_a_pause_before_any_step_is_no_steps_time(loop):
    """The first step of a part was refused, and the loop goes on much later."""
    for _ in range(6):
        loop.run(10, 1.0)
        loop.save()
        loop.clock.tick(loop.version)
        loop.wait()
        loop.now += 1000.0
        loop.calls = 0
        loop.clock.pause(loop.version)
        assert loop.calls == 0
    assert loop.clock.secs == pytest.approx(1.0)


def test_what_cannot_be_probed_is_not_tried_at_every_step(loop):
    probe, tried = loop.clock._probe, []
    loop.clock._probe = lambda: tried.append(loop.version)
    loop.run(80, 1.0)
    assert tried == [0, 16, 32, 48, 64]
    loop.clock._probe = probe
    loop.run(49, 1.0)
    assert loop.clock.secs == pytest.approx(1.0)


def test_plans_go_by_it_and_by_the_rate_of_the_link(loop, monkeypatch):
    loop.run(49, 2.0)
    monkeypatch.setattr(known, "LINK", types.SimpleNamespace(bytes_per_sec=5.0))
    assert known.measured_facts(loop.clock) == Facts(step_secs=2.0, link_bytes_per_sec=5.0)


def test_the_time_of_windows_and_saves_is_no_steps(tmp_path, monkeypatch):
    """The clock hears of each before it takes time: at every version at which something leaves."""
    loop, paused = training_loop.Loop(tmp_path, window={"steps": 3}), []
    clock = loop.session.known.clock
    monkeypatch.setattr(
        clock, "pause", lambda at, pause=clock.pause: paused.append(at) or pause(at)
    )
    with loop.manager:
        loop.train(8)
    assert loop.kinds == {0: "snapshot", 4: "window", 8: "window"}
    assert paused == [1, 3, 4, 5, 7, 8, 9]
