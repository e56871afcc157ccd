"""How `bench storage` cuts the time of a save into phases."""

import os

import pytest

from bench.storage.phases import Call, phases, recorded

MIB = 2**20


def test_phases_of_a_save():
    calls = [
        Call("pwrite", 0.5, 0.6, 160),  # metadata
        Call("pwrite", 2, 4, 8 * MIB),
        Call("pwrite", 3, 5, 4 * MIB),
        Call("fsync", 5, 6, 0),
        Call("pwrite", 7, 10, 8 * MIB),
        Call("fsync", 9, 12, 0),
        Call("rename", 13, 14, 0),
        Call("fsync", 14, 15, 0),
    ]
    found = phases(calls, began_at=1, ended_at=16)
    assert found == {
        "first_write_secs": 1,
        "writing_secs": 8,
        "idle_secs": 2,
        "tail_secs": 6,
        "sync_secs": 2,
        "rename_secs": 2,
    }
    whole = found["first_write_secs"] + found["writing_secs"] + found["tail_secs"]
    assert whole == pytest.approx(15)


def test_what_others_write_has_none():
    assert phases([Call("rename", 1, 2, 0)], 0, 3) == {}


def test_calls_are_recorded(tmp_path):
    before = os.pwrite
    with recorded() as calls:
        fd = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT)
        os.pwrite(fd, bytes(3), 0)
        os.fsync(fd)
        os.close(fd)
        os.rename(tmp_path / "x", tmp_path / "y")
    assert [(call.name, call.nbytes) for call in calls] == [
        ("pwrite", 3),
        ("fsync", 0),
        ("rename", 0),
    ]
    assert all(call.began_at <= call.ended_at for call in calls)
    assert os.pwrite is before
