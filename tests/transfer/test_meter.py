"""The link's rate: only what was watched from its beginning counts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from gockpt_jax.transfer import meter as meter_module
from gockpt_jax.transfer import pull
from gockpt_jax.transfer.meter import LinkMeter

MIB = 2**20


class Clock:
    """Time that stands still unless something takes time."""

    now = 100.0

    def perf_counter(self):
        return self.now


class Source:
    """A device buffer that becomes ready when it is waited for, after some seconds."""

    def __init__(self, clock, *, ready_in=0.0):
        self.clock, self.ready_in = clock, ready_in

    def is_ready(self):
        return self.ready_in == 0.0

    def block_until_ready(self):
        self.clock.now += self.ready_in
        self.ready_in = 0.0
        return self


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", clock)
    return clock


def land(meter, clock, source, secs, *, mib=64, devices=1, done=False):
    meter.begin([source], done)
    clock.now += secs
    meter.end([np.empty(mib * MIB, np.int8)], devices)


def test_the_wait_for_the_source_is_not_the_links(clock):
    meter = LinkMeter()
    for secs in (0.5, 1.0, 2.0):
        assert meter.bytes_per_sec is None
        land(meter, clock, Source(clock, ready_in=30.0), secs)
    assert meter.bytes_per_sec == 64 * MIB


def test_pulls_that_were_late_to_be_looked_at_do_not_count(clock):
    meter = LinkMeter()
    for _ in range(5):
        clock.now += 10.0
        land(meter, clock, Source(clock), 1.0)  # its source was ready: begun nobody knows when
        land(meter, clock, Source(clock), 0.0, done=True)
    assert meter.bytes_per_sec is None


def test_pulls_that_stand_behind_a_watched_one_count(clock):
    meter = LinkMeter()
    land(meter, clock, Source(clock, ready_in=3.0), 1.0)
    land(meter, clock, Source(clock), 2.0)
    land(meter, clock, Source(clock), 2.0)
    assert meter.bytes_per_sec == 32 * MIB
    clock.now += 5.0  # the worker replays: whatever came next has had time of its own
    for _ in range(5):
        land(meter, clock, Source(clock), 0.01)
    assert meter.bytes_per_sec == 32 * MIB


def test_what_had_come_already_takes_no_part_in_a_watched_time(clock):
    """Together they are large enough to count, and much faster than the link."""
    meter = LinkMeter()
    for _ in range(7):
        land(meter, clock, Source(clock, ready_in=3.0), 1.0, mib=16)
        land(meter, clock, Source(clock), 0.0, mib=48, done=True)
    assert meter.bytes_per_sec is None


def test_a_pull_that_no_device_sends_may_come_behind_a_watched_one(clock):
    """Of what the host holds, and still copies: it tells nothing."""
    meter = LinkMeter()
    for _ in range(3):
        land(meter, clock, Source(clock, ready_in=3.0), 1.0)
        meter.begin([], False)
        meter.end([], 0)
    assert meter.bytes_per_sec == 64 * MIB


def test_a_link_that_becomes_slower_is_learned_of():
    meter = LinkMeter()
    for secs in (1.0, 2.0):
        for _ in range(32):
            meter.pulled(64 * MIB, secs)
    assert meter.bytes_per_sec == 32 * MIB


def test_small_pulls_count_together_and_devices_apart(clock):
    meter = LinkMeter()
    for _ in range(3):
        source = Source(clock, ready_in=1.0)
        for _ in range(8):
            land(meter, clock, source, 0.25, mib=16, devices=2)
    assert meter.bytes_per_sec == 32 * MIB


def test_a_worker_watches_its_own_pulls_alone(clock):
    """The link is shared by all managers; what one worker comes too late for, another has seen."""
    meter = LinkMeter()
    with ThreadPoolExecutor(1) as other:
        for _ in range(3):
            meter.begin([Source(clock, ready_in=3.0)], False)
            clock.now += 1.0
            other.submit(land, meter, clock, Source(clock), 0.5, done=True).result()
            clock.now += 0.5
            meter.end([np.empty(64 * MIB, np.int8)], 1)
    assert meter.bytes_per_sec == 32 * MIB


def test_views_of_host_memory_are_no_transfers():
    meter = LinkMeter()
    for _ in range(5):
        meter.pulled(2**30, 1e-6)
        meter.pulled(2**10, 1.0)
    assert meter.bytes_per_sec is None


def test_landing_a_pull_tells_the_meter(monkeypatch):
    """The hook itself: bytes of one device, with the pull's own sources."""
    seen = []

    class Meter(LinkMeter):
        def begin(self, sources, is_done):
            seen.append([s.nbytes for s in sources])

        def end(self, chunks, num_devices):
            seen.append((sum(c.nbytes for c in chunks), num_devices))

    monkeypatch.setattr(pull, "LINK", Meter())
    pull.Pull([jnp.ones(1024)], list).result()
    assert seen == [[4096], (4096, 1)]
