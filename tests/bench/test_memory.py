"""The memory benchmark: what it takes for growth, and what it takes off."""

from __future__ import annotations

import json
import subprocess
import time

import numpy as np

from bench.memory import benchmark as memory
from bench.memory.way import Way, _sampled, measure
from bench.record import peak_memory, resident_bytes

MIB = 2**20


def test_growth_is_the_most_that_was_held_at_once():
    base = resident_bytes()
    with peak_memory(base - 10 * MIB) as grown:
        held = np.ones(64 * MIB, np.uint8)
        del held
        assert 70 * MIB < grown() < 100 * MIB


def test_what_is_counted_on_the_device_is_taken_off():
    counted, sampled = [], []

    def accounts():
        sampled.append(None)
        return 128 * MIB, 384 * MIB * len(counted)

    base = resident_bytes()
    with _sampled(accounts) as peaks:
        counted.append(None)  # before it is taken, as the library does
        held = np.ones(512 * MIB, np.uint8)  # beside what other threads of the process may take
        seen = len(sampled)
        while len(sampled) < seen + 4:  # two samples since
            time.sleep(0.001)
    assert 100 * MIB < peaks.host - base < 200 * MIB
    assert peaks.accounted == held.nbytes


def test_a_way_to_save_is_measured(tmp_path):
    way = Way({"steps": 2}, interval=3)
    found = measure(way, tmp_path, (1, 64, 100))
    samples = found["samples"]
    assert [save["kind"] for save in found["saves"]] == ["window"] * 5
    assert samples["reported/deferred_steps"] == [0.0] * 5
    assert all(len(values) in (1, 5) for values in samples.values())
    # Its parameters and moments: what one save holds at least.
    assert min(samples["accounted_bytes"]) >= found["state_bytes"] / 2
    assert found["state_bytes"] > 12 * (12 * 64**2 + 100 * 64)


def test_a_way_that_fails_costs_no_other(monkeypatch, capsys):
    answer = {"state_bytes": 10**9, "saves": [], "samples": {"extra_rss_bytes": [2e6, 3e6, 4e6]}}

    def run(words, **_):
        if words[3] == "snapshot":
            return subprocess.CompletedProcess(words, 1, "", "no memory")
        return subprocess.CompletedProcess(words, 0, json.dumps(answer), "")

    monkeypatch.setattr(memory.subprocess, "run", run)
    record = memory.run(False, ways="snapshot,orbax_async")
    assert record.figures == {"orbax_async/extra_rss_bytes": 3e6}
    assert record.details["failures"] == {"snapshot": "no memory"}
    record.show()
    assert "snapshot: failed" in (printed := capsys.readouterr().out)
    assert "process MB" in printed
