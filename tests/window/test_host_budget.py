"""One budget for what saves hold on the host: chunks, retained values, write buffers."""

from __future__ import annotations

import asyncio
import logging
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from window import training_loop
from window.training_loop import (
    BATCH,
    SIZE,
    STATE_BYTES,
    to_host,
)

from gockpt_jax import Audit, GoCkptSave, HostBudgetError, WindowOptions
from gockpt_jax.replay.programs import PIECE_SIZES
from gockpt_jax.storage.saving import taken
from gockpt_jax.storage.writing.leaf_writer import LeafWriter
from gockpt_jax.transfer.block import Block
from gockpt_jax.transfer.host_memory import PinnedPool
from gockpt_jax.window import host_budget, seal
from gockpt_jax.window.host_budget import HostBudget

WAIT_SECS = 60
LEAF = 4 * SIZE
SCRATCH = 2 * 4 * PIECE_SIZES[-1]  # replay's, for two moments


def budget_of(**options: Any) -> HostBudget:
    return HostBudget(WindowOptions(**{"audit": None, "write_limit_bytes": 100, **options}))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the host tells of itself."""
    told: dict[str, Any] = {"free": 10**6, "in_memory": False, "pool": None}
    monkeypatch.setattr(host_budget, "host_headroom_bytes", lambda: told["free"])
    monkeypatch.setattr(host_budget, "is_in_memory", lambda directory: told["in_memory"])
    monkeypatch.setattr(host_budget, "pinned_pool", lambda devices: told["pool"])
    return told


def test_the_default_is_what_a_save_needs_and_a_tenth(host):
    budget = budget_of()
    assert budget.limit_bytes is None  # nothing is known yet
    assert budget.why_no_room(1000, following_bytes=200) is None
    assert budget.limit_bytes == (1000 + 2 * 200 + 100) * 11 // 10
    budget.admit_save(500)  # a smaller one changes nothing
    assert budget.why_no_room(500, following_bytes=100) is None
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
    assert budget.room_bytes(1000) == 1150 - 100
    budget.admit_save(1000)
    assert budget.limit_bytes == 1150
    budget.release(1000)
    assert budget.why_no_room(1000) is not None, "and something else has been, since"
    host["free"] = None
    assert budget.why_no_room(1000) is None
    assert budget.room_bytes(1000) is None


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
    host["free"] = 1050
    assert budget.room_bytes(1000) == 0
    host["free"] = 900
    assert budget.why_no_room(1000) is not None
    assert budget.limit_bytes == 0


def test_a_manager_tells_where_its_files_are(tmp_path):
    with Loop(tmp_path).manager as manager:
        assert manager._gockpt_session.host.directory == str(tmp_path)


def test_the_plan_leaves_room_for_write_buffers_and_the_sample(host):
    """Chunks that are compressed count twice, but no more are written than there are."""
    budget = budget_of(write_limit_bytes=3000, audit=Audit(fraction=0.5))
    assert budget.room_bytes(1000) == 10**6 - 2000 - 500
    assert budget.room_bytes(4000) == 10**6 - 3000 - 2000


@pytest.mark.parametrize("pool", [None, PinnedPool(devices=2, gib=10)])
def test_the_default_refuses_no_save(host, caplog, pool):
    host.update(free=10, pool=pool)
    budget = budget_of()
    with caplog.at_level(logging.WARNING, "gockpt_jax"):
        budget.admit_save(1000)
    assert "a save takes 1 kB of the host's memory, which has 10 B left: the sys" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "gockpt_jax"):
        for _ in range(3):  # what is known already
            budget.admit_save(1000)
    assert not caplog.records


@pytest.mark.parametrize("free", [10**12, None])
def test_the_default_is_never_more_than_is_pinned(host, caplog, free):
    gib = 2**30
    host.update(free=free, pool=PinnedPool(devices=2, gib=10))
    budget = budget_of()
    assert budget.room_bytes(gib) == 20 * gib - 100
    assert budget.why_no_room(19 * gib) is None
    assert budget.limit_bytes == 20 * gib
    budget.add(19 * gib)
    assert budget.why_no_room(19 * gib, freed_bytes=gib) is not None
    with caplog.at_level(logging.WARNING, "gockpt_jax"):
        budget.admit_save(20 * gib)
        assert not caplog.records
        budget.admit_save(30 * gib)
    assert "a save takes 32.2 GB of pinned memory, and XLA has 21.5 GB for transfers" in caplog.text
    assert "Set `XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=17` before JAX starts" in caplog.text


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


@pytest.mark.parametrize(("used", "waiting"), [(0, 300), (50, 250), (100, 200), (500, 200)])
def test_what_may_wait_for_replay(host, used, waiting):
    """What the window was promised, two steps', and whatever is left beside what it saves."""
    budget = budget_of(host_budget_bytes=1000)
    budget.add(used)
    assert budget.waiting_limit_bytes(700, following_bytes=100) == waiting


def test_what_may_wait_for_replay_by_default(host):
    host["free"] = 10**6
    budget = budget_of()
    assert budget.waiting_limit_bytes(1000, 100) is None
    assert budget.why_no_room(1000, 100) is None
    spare = budget.limit_bytes - (1000 + 2 * 100) - budget._beside_bytes(1000)
    assert spare > 0
    assert budget.waiting_limit_bytes(1000, 100) == 2 * 100 + spare


class Loop(training_loop.Loop):
    """Saves every fourth label, in windows of four steps."""

    def __init__(self, directory: Path, **window: Any):
        # The writer may take no more than replay: else the budget would be all for write buffers.
        options = {"steps": 4, "audit": None, "write_limit_bytes": SCRATCH, **window}
        super().__init__(directory, window=options)
        self.host = self.session.host

    def start(self) -> None:
        """The first save is over before a window for the next one could open."""
        self.train(0)
        self.finish()

    def finish(self) -> None:
        self.manager.wait_until_finished()
        self.settle()
        assert self.host.used_bytes == 0

    def close(self) -> None:
        """All saves are there, bit for bit."""
        self.finish()
        self.assert_saved(*self.given)
        self.manager.close()


@pytest.mark.parametrize("given", [None, 2 * STATE_BYTES])
def test_a_window_without_room_opens_later_with_fewer_steps(tmp_path, caplog, given):
    loop = Loop(tmp_path, host_budget_bytes=given)
    loop.start()
    loop.train(4)
    loop.finish()
    loop.host.add(STATE_BYTES + SCRATCH)  # as if it were still being written
    with caplog.at_level(logging.INFO, "gockpt_jax"):
        loop.train(7)  # returns: nobody waits for room
    assert loop.manager.window_status == "idle"
    assert "the window for version 9 does not open yet: the host budget had no" in caplog.text
    loop.host.release(STATE_BYTES + SCRATCH)
    loop.train(8)
    loop.finish()
    at_4, at_8 = loop.manager.reports[1:]
    assert (at_4.kind, at_4.window_steps, at_4.deferred_steps) == ("window", 4, 0)
    assert (at_8.kind, at_8.window_steps, at_8.deferred_steps) == ("window", 2, 2)
    assert "put off 2 times, for the host budget had no room" in at_8.reason
    loop.train(12)
    loop.close()
    report = loop.manager.last_report
    assert (report.kind, report.window_steps, report.deferred_steps) == ("window", 4, 0)


def test_a_save_that_finds_no_room_in_time_is_a_snapshot(tmp_path):
    loop = Loop(tmp_path)
    loop.start()
    loop.train(4)
    loop.finish()
    loop.host.add(STATE_BYTES + SCRATCH)
    loop.train(8)
    loop.host.release(STATE_BYTES + SCRATCH)
    loop.close()
    report = loop.manager.last_report
    assert (report.kind, report.deferred_steps) == ("snapshot", 3)
    assert report.reason.startswith("the host budget had no room: ")


def test_saves_stay_within_the_default_budget(tmp_path):
    """Each of them: nothing adds up, and no estimate of what a save needs is too low."""
    loop = Loop(tmp_path)
    loop.start()
    for label in range(4, 21, 4):
        loop.train(label)
        loop.finish()
    loop.close()
    assert [r.kind for r in loop.manager.reports[1:]] == ["window"] * 5
    for report in loop.manager.reports:
        assert STATE_BYTES <= report.peak_host_bytes <= report.host_budget_bytes
    retained = 2 * LEAF
    assert loop.manager.last_report.host_budget_bytes == (
        (STATE_BYTES + retained + SCRATCH) * 11 // 10
    )


def test_a_number_of_the_users_bounds_no_write_buffers(tmp_path):
    """Nor is a save refused for them; they are counted, and at most as many as they may be."""
    loop = Loop(tmp_path, host_budget_bytes=STATE_BYTES, write_limit_bytes=STATE_BYTES // 2)
    loop.train(8)
    loop.close()
    assert loop.kinds == dict.fromkeys((0, 4, 8), "snapshot")
    for report in loop.manager.reports:
        assert STATE_BYTES < report.peak_host_bytes <= STATE_BYTES + max(STATE_BYTES // 2, 2 * LEAF)


def test_what_follows_is_counted_on_all_devices(tmp_path):
    """As much is retained on two of them as on one."""

    @jax.jit
    def momentum(state, batch):
        m = 0.5 * state["m"] + jnp.sin(state["w"] + batch)
        return {"m": m, "w": jnp.sin(state["w"] - m)}

    reports = []
    for count in (1, 2):
        loop = Loop(tmp_path / str(count))
        rows = jax.NamedSharding(jax.make_mesh((count,), ("a",)), jax.P("a"))
        loop.state = {name: jax.device_put(jnp.ones(SIZE), rows) for name in "mw"}
        loop.step = loop.manager.wrap(momentum)
        loop.start()
        loop.train(4)
        loop.close()
        reports.append(loop.report(4))
    one, two = reports
    assert (one.kind, one.gradient_bytes) == (two.kind, two.gradient_bytes) == ("window", 3 * LEAF)
    assert one.host_budget_bytes == two.host_budget_bytes


@pytest.mark.parametrize("label", [0, 4], ids=["snapshot", "window"])
def test_a_chunk_is_given_back_as_soon_as_it_is_written(tmp_path, monkeypatch, label):
    """While another of the same save has not been: its memory, and its part of the budget."""
    go_on, others_are_written = threading.Event(), threading.Event()
    written: dict[str, weakref.ref[np.ndarray]] = {}
    write_shard = LeafWriter.write_shard

    async def held(writer: LeafWriter, shard: Any, box: Any) -> None:
        if "params" in writer.layout.name:
            await asyncio.to_thread(go_on.wait, WAIT_SECS)
        landed = shard.data.result()
        found = weakref.ref(landed)
        del landed
        await write_shard(writer, shard, box)
        written[writer.layout.name] = found
        if len(written) == 3:
            others_are_written.set()

    loop = Loop(tmp_path)
    if label:
        loop.start()
    loop.train(label - 1)
    monkeypatch.setattr(LeafWriter, "write_shard", held)
    loop.train(label)
    assert others_are_written.wait(WAIT_SECS)
    loop.session.resources.worker.wait_until_idle()
    assert loop.manager.is_saving_in_progress()
    assert {name: found() for name, found in written.items()} == dict.fromkeys(written)
    assert loop.host.used_bytes == LEAF
    go_on.set()
    loop.close()


def test_a_snapshot_is_counted_before_it_lands(tmp_path):
    """Else the next window would be promised the room that it is about to take."""
    loop, go_on = Loop(tmp_path), threading.Event()
    loop.session.resources.worker.submit(lambda: go_on.wait(WAIT_SECS) and None)
    loop.train(0)
    assert loop.host.used_bytes == STATE_BYTES
    go_on.set()
    loop.close()


def test_the_writer_s_bytes_are_counted(tmp_path, monkeypatch):
    used = []
    loop = Loop(tmp_path)
    sync = LeafWriter._written

    def looking(writer: LeafWriter, *chunk: Any) -> Any:
        used.append(loop.host.used_bytes)
        return sync(writer, *chunk)

    monkeypatch.setattr(LeafWriter, "_written", looking)
    loop.train(0)
    loop.close()
    assert max(used) > STATE_BYTES


@pytest.mark.parametrize("where", ["staging", "landing"])
def test_what_could_not_be_taken_is_given_back(tmp_path, monkeypatch, where):
    """A snapshot in several batches, of which one fails."""
    loop = Loop(tmp_path, device_budget_bytes=2 * LEAF)
    loop.train(0)
    loop.finish()
    name, method = {"staging": (Block, "stage"), "landing": (Block, "start_pull")}[where]
    real, calls = getattr(name, method), []

    def second_fails(block: Block, staged: Any) -> Any:
        calls.append(block)
        if len(calls) != 2:
            return real(block, staged)
        if where == "staging":
            raise RuntimeError("injected")
        return FailedPull()

    monkeypatch.setattr(name, method, second_fails)
    with pytest.raises(RuntimeError, match="injected"):
        save_and_wait(loop)
    loop.finish()
    assert len(calls) >= 2
    assert loop.manager.all_steps() == [0]
    loop.close()


@pytest.mark.parametrize("where", ["late", "metadata"])
def test_what_left_early_is_given_back_if_its_save_fails(tmp_path, monkeypatch, where):
    """Else no window would ever have room again."""
    loop = Loop(tmp_path)
    loop.start()
    loop.train(3)
    loop.state = loop.step(loop.state, BATCH)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        if where == "late":
            patch.setattr(seal, "take_late", fail)
        else:
            patch.setattr(taken, "copy", types.SimpleNamespace(deepcopy=fail))
        with pytest.raises(RuntimeError, match="injected"):
            loop.manager.save(4, args=GoCkptSave(loop.state))
    loop.finish()
    loop.label = 5
    loop.train(8)
    loop.finish()  # else the next window may find replay's scratch still taken
    loop.train(12)
    loop.close()
    assert loop.report(12).kind == "window"


@pytest.mark.parametrize("budget", [None, 3 * LEAF // 2])
def test_an_array_that_is_saved_twice_is_counted_once(tmp_path, budget):
    loop = Loop(tmp_path, host_budget_bytes=budget)
    loop.state = {"a": loop.state["params"]["w"], "b": loop.state["params"]["w"]}
    save_and_wait(loop)
    loop.given[1] = to_host(loop.state)
    loop.close()


def save_and_wait(loop: Loop) -> None:
    loop.manager.save(1, args=GoCkptSave(loop.state), force=True)
    loop.manager.wait_until_finished()


class FailedPull:
    """One that cannot be landed."""

    def is_ready(self) -> bool:
        return True

    def result(self) -> Any:
        raise RuntimeError("injected")
