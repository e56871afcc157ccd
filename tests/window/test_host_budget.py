"""One budget for what saves hold on the host: chunks, retained values, write buffers."""

from __future__ import annotations

import logging
import threading
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from window.training_loop import BATCH, SIZE, STATE_BYTES, Options, assert_same, fresh, to_host, update

from gockpt_jax import Audit, GoCkptManager, GoCkptSave, HostBudgetError, WindowOptions
from gockpt_jax.replay.programs import CHUNK_SIZES
from gockpt_jax.storage.leaf_writer import LeafWriter
from gockpt_jax.transfer.block import Block
from gockpt_jax.window import host_budget
from gockpt_jax.window.host_budget import HostBudget

WAIT_SECS = 60
LEAF = 4 * SIZE
SCRATCH = 2 * 4 * CHUNK_SIZES[-1]  # replay's, for two moments
GIB = 2**30


def budget_of(**options: Any) -> HostBudget:
    return HostBudget(WindowOptions(**{"audit": None, "write_limit_bytes": 100, **options}))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the host tells of itself."""
    told: dict[str, Any] = {"free": 10**6, "in_memory": False}
    monkeypatch.setattr(host_budget, "host_headroom_bytes", lambda: told["free"])
    monkeypatch.setattr(host_budget, "is_in_memory", lambda directory: told["in_memory"])
    return told


def test_the_default_is_what_a_save_needs_and_a_tenth(host):
    budget = budget_of()
    assert budget.limit_bytes is None  # nothing is known yet
    assert budget.why_no_room(1000, following_bytes=200) is None
    assert budget.limit_bytes == (1000 + 2 * 200 + 100) * 11 // 10
    budget.admit_save(500)  # a smaller one changes nothing
    assert budget.limit_bytes == 1650
    budget.admit_save(2000)
    assert budget.limit_bytes == (2000 + 2 * 200 + 100) * 11 // 10
    sampled = budget_of(audit=Audit(fraction=0.5))
    sampled.admit_save(1000)
    assert sampled.limit_bytes == (1000 + 500 + 100) * 11 // 10
    queueing = budget_of(on_busy="newest")  # one is written, one waits
    queueing.admit_save(1000)
    assert queueing.limit_bytes == (3 * 1000 + 100) * 11 // 10


def test_there_is_room_for_one_save_at_a_time(host):
    budget = budget_of()
    assert budget.why_no_room(1000) is None
    budget.add(1000)
    assert budget.why_no_room(1000) == (
        "the host budget had no room: 1 kB of 1.21 kB were taken, and 1.1 kB are needed"
    )
    assert budget.why_no_room(1000, freed_bytes=1000) is None
    budget.release(890)
    assert budget.why_no_room(1000) is None
    budget.add(1)
    assert budget.why_no_room(1000) is not None


def test_the_default_is_never_more_than_the_host_has_left(host):
    host["free"] = 1150
    budget = budget_of()
    assert budget.why_no_room(1000) is None
    assert budget.limit_bytes == 1150
    budget.add(1000)
    host["free"] = 150  # for these are taken
    budget.admit_save(1000)
    assert budget.limit_bytes == 1150
    budget.release(1000)
    assert budget.why_no_room(1000) is not None, "and something else has been, since"
    host["free"] = None
    assert budget.why_no_room(1000) is None


def test_files_in_memory_take_from_the_same(host):
    host["free"] = 1500
    budget = budget_of()
    budget.directory = "/dev/shm/run"
    assert budget.why_no_room(1000) is None
    assert budget.room_bytes(1000) == 1400
    host["in_memory"] = True
    assert budget.why_no_room(1000) is not None
    assert budget.limit_bytes == 500
    assert budget.room_bytes(1000) == 400


def test_the_default_refuses_no_save(host, caplog):
    host["free"] = 10
    budget = budget_of()
    with caplog.at_level(logging.WARNING, "gockpt_jax"):
        budget.admit_save(1000)
    assert "a save takes 1 kB of the host's memory, which has 10 B left" in caplog.text


def test_a_number_of_the_users_is_kept(host):
    host["free"] = 10  # whatever the host has
    budget = budget_of(host_budget_bytes=1000)
    assert budget.room_bytes(1000) == 1000
    budget.admit_save(1000)
    assert budget.why_no_room(600, following_bytes=200) is None
    assert budget.why_no_room(601, following_bytes=200) is not None
    with pytest.raises(HostBudgetError, match="`host_budget_bytes=1000` cannot hold"):
        budget.admit_save(1001)
    assert budget.limit_bytes == 1000


class Loop:
    """Saves every fourth label; the chunks of one label's `w` are held back from the disk."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, **window: Any):
        self.go_on, self.holding = threading.Event(), threading.Event()
        self.go_on.set()
        write_shard = LeafWriter.write_shard

        async def held(writer: LeafWriter, shard: Any, box: Any) -> None:
            if "params" in writer.name and not self.go_on.is_set():
                while not shard.data.done():
                    await asyncio.sleep(0.001)
                self.holding.set()
                await asyncio.to_thread(self.go_on.wait, WAIT_SECS)
            await write_shard(writer, shard, box)

        monkeypatch.setattr(LeafWriter, "write_shard", held)
        # Write buffers may be no more than replay's scratch: else the budget would be all theirs.
        options = {"steps": 4, "audit": None, "write_limit_bytes": SCRATCH, **window}
        self.manager = GoCkptManager(
            directory, options=Options(save_interval_steps=4), window=WindowOptions(**options)
        )
        self.host = self.manager._gockpt_session.host
        self.step, self.state, self.label = self.manager.wrap(update), fresh(), 0
        self.saved: dict[int, Any] = {}
