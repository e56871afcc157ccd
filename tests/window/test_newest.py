"""A save that finds the previous one still being written waits on the host: `on_busy="newest"`."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import logging
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from window.training_loop import (
    BATCH,
    SIZE,
    STATE_BYTES,
    WAIT_SECS,
    HoldingLoop,
    Loop,
    Options,
    assert_same,
    fresh,
    to_host,
    update,
)

import gockpt_jax as gockpt
from gockpt_jax import GoCkptManager, GoCkptSave, WindowOptions
from gockpt_jax.locks import shared_lock
from gockpt_jax.replay.programs import PIECE_SIZES
from gockpt_jax.storage.managing import waiting as waiting_room
from gockpt_jax.storage.managing.deleting import Deleter
from gockpt_jax.storage.managing.in_turn import SavesInTurn
from gockpt_jax.storage.managing.last_save import LastSave
from gockpt_jax.storage.managing.turn import Turn
from gockpt_jax.storage.saving.state_handler import StateHandler
from gockpt_jax.storage.saving.written import Written
from gockpt_jax.telemetry.save_record import PendingReport
from gockpt_jax.window import seal
from gockpt_jax.window.early import EarlyChunks

LEAF = 4 * SIZE


donating = jax.jit(update.__wrapped__, donate_argnums=0)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loops = []

    def make(*held: int, window: dict[str, Any] | None = None, **options: Any) -> HoldingLoop:
        window = {"steps": 3, "on_busy": "newest", **(window or {})}
        loops.append(
            HoldingLoop(tmp_path, monkeypatch, *held, window=window, step=donating, **options)
        )
        return loops[-1]

    yield make
    for loop in loops:
        loop.finish()
        loop.manager.close()


def on_disk(loop: HoldingLoop) -> list[int]:
    """What another process would find."""
    with ocp.CheckpointManager(loop.manager.directory) as stock:
        return sorted(stock.all_steps())


def on_a_thread(call: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(WAIT_SECS)


def look(manager: GoCkptManager) -> Any:
    return manager.latest_step(), sorted(manager.all_steps()), manager.is_saving_in_progress()


def test_an_accepted_save_stays_visible_while_it_is_handed_over(start, monkeypatch):
    """To other threads, between the place where it waited and Orbax's list."""
    loop = start(4)
    assert loop.train(8)
    accepted = (8, [0, 4, 8], True)
    assert look(loop.manager) == accepted
    room, seen = loop.manager._gockpt_saves._room, []
    waiting = room.waiting
    with monkeypatch.context() as patch:  # it leaves just as somebody looks
        patch.setattr(SavesInTurn, "waiting", property(lambda _: room.leave(waiting)))
        assert look(loop.manager) == accepted
    room.leaving, room.waiting = None, waiting

    def saving(real: Any) -> Any:
        def call(manager: Any, step: int, *args: Any, **kwargs: Any) -> Any:
            seen.append(on_a_thread(lambda: look(loop.manager)))
            return real(manager, step, *args, **kwargs)

        return call

    monkeypatch.setattr(ocp.CheckpointManager, "save", saving(vars(ocp.CheckpointManager)["save"]))
    loop.finish()
    loop.manager.wait_until_finished()
    assert seen == [accepted]
    assert on_disk(loop) == [0, 4, 8]


@pytest.mark.parametrize("is_listed", [False, True])
def test_one_that_is_handed_over_meanwhile_is_seen_once(start, monkeypatch, is_listed):
    loop = start(4)
    assert loop.train(8)
    looks, goes_on = threading.Event(), threading.Event()
    real = ocp.CheckpointManager.all_steps

    def slow(manager: Any, read: bool = False) -> Any:
        before = real(manager, read)
        if threading.current_thread() is not threading.main_thread():
            looks.set()
            assert goes_on.wait(WAIT_SECS)
        return real(manager, read) if is_listed else before

    monkeypatch.setattr(ocp.CheckpointManager, "all_steps", slow)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: list(loop.manager.all_steps()))
        assert looks.wait(WAIT_SECS)
        loop.finish()
        loop.update()
        goes_on.set()
        assert found.result(WAIT_SECS) == [0, 4, 8]


def test_while_one_takes_the_place_of_another_one_is_seen(start, monkeypatch):
    loop = start(4)
    assert loop.train(8)
    real, seen = PendingReport.superseded, []

    def superseded(*args: Any) -> None:
        seen.append(on_a_thread(lambda: look(loop.manager)))
        real(*args)

    monkeypatch.setattr(PendingReport, "superseded", superseded)
    assert loop.train(12)
    assert seen == [(12, [0, 4, 12], True)]
    loop.finish()
    loop.manager.wait_until_finished()
    assert on_disk(loop) == [0, 4, 12]


@pytest.mark.parametrize("has_left", [False, True])
def test_an_interrupt_as_a_save_that_waited_leaves(start, monkeypatch, has_left):
    """It waits on, or its report says that it failed; nothing else is held or seen of it."""
    loop = start(4)
    assert loop.train(8)
    real = waiting_room.WaitingRoom.leave

    def leave(*args: Any) -> None:
        monkeypatch.setattr(waiting_room.WaitingRoom, "leave", real)
        if has_left:
            real(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting_room.WaitingRoom, "leave", leave)
    loop.finish()
    with pytest.raises(KeyboardInterrupt):
        loop.manager.wait_until_finished()
    assert loop.manager._gockpt_saves.unlisted == [8] * (not has_left)
    loop.manager.wait_until_finished()
    assert look(loop.manager) == ((4, [0, 4], False) if has_left else (8, [0, 4, 8], False))
    assert (loop.report(8).error is None) != has_left
    loop.given = {label: loop.given[label] for label in on_disk(loop)}
    loop.assert_saved(*loop.given)


def test_an_interrupt_when_orbax_has_a_save_that_waited_leaves_that_to_its_end(start, monkeypatch):
    loop, real = start(4), LastSave._now_with_orbax
    assert loop.train(8)

    def interrupted(*args: Any) -> None:
        monkeypatch.setattr(LastSave, "_now_with_orbax", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(LastSave, "_now_with_orbax", interrupted)
    loop.finish()
    with pytest.raises(KeyboardInterrupt):
        loop.update()
    loop.manager.wait_until_finished()
    assert loop.report(8).error is None
    loop.assert_saved(0, 4, 8)


def test_one_that_is_superseded_waits_on_after_an_interrupt(start, monkeypatch):
    loop = start(4)
    assert loop.train(8)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(waiting_room.WaitingRoom, "_drop", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.manager._gockpt_saves._room.supersede(9)
    loop.assert_saved(0, 4, 8)


def test_metadata_of_what_somebody_else_has_removed(start):
    """It is not under way: nothing would come of a wait."""
    loop = start()
    loop.train(4)
    loop.manager.wait_until_finished()
    shutil.rmtree(loop.manager.directory / "4")
    with pytest.raises(gockpt.NoCheckpointError, match="has no step `4`"):
        loop.manager.metadata(4)


def test_metadata_of_a_save_under_way(start):
    loop = start(4)
    assert loop.train(8)
    for label in (4, 8):
        with pytest.raises(gockpt.NoCheckpointError, match=r"its save is under way\. Call"):
            loop.manager.metadata(label)
    loop.finish()
    assert loop.manager.metadata(4).item_metadata is not None  # visible, whoever has heard of it
    loop.manager.wait_until_finished()
    assert loop.manager.metadata(8).item_metadata is not None


def test_a_save_waits_and_is_written_by_the_next_step(start, monkeypatch):
    loop, stalls, add_stall = start(4), [], PendingReport.add_stall

    def stall(pending: PendingReport, started_at: float) -> None:
        stalls.append(pending.record.step)
        add_stall(pending, started_at)

    monkeypatch.setattr(PendingReport, "add_stall", stall)
    assert loop.train(8)  # at once: nobody has let the write of 4 go on
    assert on_disk(loop) == [0]
    assert loop.manager.latest_step() == 8
    assert sorted(loop.manager.all_steps()) == [0, 4, 8]
    assert loop.manager.is_saving_in_progress()
    assert loop.session.host.used_bytes >= STATE_BYTES
    loop.update()  # which looks whether it has its turn
    assert stalls.count(8) == 2
    loop.finish()
    assert loop.manager.is_saving_in_progress()  # until the trainer's thread comes by
    clock, paused = loop.session.known.clock, []
    monkeypatch.setattr(
        clock, "pause", lambda at, pause=clock.pause: paused.append(at) or pause(at)
    )
    loop.update()
    assert paused  # what has begun the save was no step
    loop.finish()
    assert on_disk(loop) == [0, 4, 8]
    loop.manager.wait_until_finished()
    assert loop.kinds == {0: "snapshot", 4: "window", 8: "window"}
    report = loop.report(8)
    assert report.waiting_secs > 0
    assert report.error is None
    assert 0 <= report.barrier_secs <= report.stall_secs
    assert loop.report(4).waiting_secs == 0
    loop.assert_saved(0, 4, 8)


@pytest.mark.parametrize("said", [{}, {"force": False}])
def test_it_is_written_by_the_next_call_of_save(start, said):
    loop = start(4)
    loop.train(8, **said)
    loop.finish()
    assert not loop.manager.save(8, args=GoCkptSave(loop.state))  # there is such a save
    loop.finish()
    assert on_disk(loop) == [0, 4, 8]


def test_a_users_own_barrier_is_still_called(start):
    keys = []
    barrier = ocp.options.AsyncOptions(barrier_sync_fn=lambda *, key, timeout_ms: keys.append(key))
    loop = start(4, async_options=barrier)
    loop.train(8)
    loop.finish()
    loop.update()
    loop.finish()
    assert on_disk(loop) == [0, 4, 8]
    assert sum("set_value_end" in key for key in keys) == 6, "each begins and ends"


def test_a_newer_save_takes_its_place(start, caplog):
    loop = start(4)
    with caplog.at_level(logging.INFO, "gockpt_jax"):
        for label in (8, 12, 16):
            assert loop.train(label)
    assert loop.manager.latest_step() == 16
    assert sorted(loop.manager.all_steps()) == [0, 4, 16]
    report = loop.report(8)
    assert (report.kind, report.window_steps, report.error) == ("superseded", 3, None)
    assert report.reason.startswith("superseded by step 12 while it waited")
    assert any("step 8 not saved: superseded" in r.getMessage() for r in caplog.records)
    loop.settle()
    assert loop.written[4].wait(WAIT_SECS)
    held = loop.session.host.used_bytes
    assert held <= STATE_BYTES, "what was superseded, and what is written, is given back"
    loop.finish()
    loop.manager.wait_until_finished()
    assert loop.kinds == {
        0: "snapshot", 4: "window", 8: "superseded", 12: "superseded", 16: "window",
    }  # fmt: skip
    loop.assert_saved(0, 4, 16)


@pytest.mark.parametrize(("on_busy", "read"), [("newest", {12}), ("skip", set())])
def test_what_nobody_will_read_is_not_replayed(start, monkeypatch, on_busy, read):
    """Replay takes longer than all else: superseded saves would keep the newest from its turn."""
    replayed, apply_pending = set(), EarlyChunks._apply_pending

    def noting(early: EarlyChunks) -> None:
        replayed.add(early._record.step)
        apply_pending(early)

    loop = start(4, window={"on_busy": on_busy})
    loop.train(4)
    loop.settle()
    monkeypatch.setattr(EarlyChunks, "_apply_pending", noting)
    gate = threading.Event()
    loop.session.resources.worker.submit_behind(lambda: gate.wait(WAIT_SECS))
    loop.train(12)  # all that these windows take lands, and none of it is replayed yet
    gate.set()
    loop.settle()
    assert replayed == read
    loop.assert_saved(0, 4, *read)


def test_an_older_label_does_not_take_the_place_of_a_newer_one(start, monkeypatch):
    loop = start(4)
    loop.train(8)
    with monkeypatch.context() as patch:
        patch.setattr(loop.manager, "should_save", lambda step: True)
        assert not loop.manager.save(6, args=GoCkptSave(loop.state))
    report = loop.manager.last_report
    assert (report.step, report.kind) == (6, "skipped")
    assert "a newer save waits, of step 8" in report.reason
    loop.assert_saved(0, 4, 8)


@pytest.mark.parametrize(
    "how", ["wait_until_finished", "close", "an exception", "restore", "delete"]
)
def test_whoever_waits_waits_for_it_too(start, how):
    loop = start(4)
    loop.train(8)

    def leave_by_an_exception() -> None:
        with pytest.raises(LookupError), loop.manager:
            raise LookupError("the loop failed")

    calls = {
        "wait_until_finished": loop.manager.wait_until_finished,
        "close": loop.manager.close,
        "an exception": leave_by_an_exception,
        "restore": lambda: assert_same(loop.manager.restore(None), loop.given[8]),
        "delete": lambda: loop.manager.delete(8),
    }
    loop.gates[4].set()
    calls[how]()
    assert on_disk(loop) == ([0, 4] if how == "delete" else [0, 4, 8])


def test_a_script_that_ends_without_close_writes_it(start):
    loop = start(4)
    loop.train(8)
    loop.gates[4].set()
    from gockpt_jax.manager import _finish_saves

    _finish_saves(lambda: loop.manager)  # as before the interpreter's end
    assert on_disk(loop) == [0, 4, 8]


@pytest.mark.parametrize("preempted", [False, True])
def test_forced_saves_and_preemptions_wait_and_supersede(start, monkeypatch, preempted):
    loop = start(4)
    loop.train(8)
    hear = loop.manager._gockpt_saves.last.hear

    def waiting() -> None:
        loop.gates[4].set()
        hear()

    monkeypatch.setattr(loop.manager._gockpt_saves.last, "hear", waiting)
    if preempted:
        monkeypatch.setattr(loop.manager, "reached_preemption", lambda step: step == 9)
    assert loop.train(9, force=not preempted)
    assert loop.gates[4].is_set(), "it has waited"
    assert loop.kinds[8] == "superseded"
    loop.assert_saved(0, 4, 9)


def test_a_forced_save_of_an_older_label_does_not_supersede(start, monkeypatch):
    loop = start(4)
    loop.train(8)
    last = loop.manager._gockpt_saves.last
    monkeypatch.setattr(last, "hear", lambda hear=last.hear: (loop.gates[4].set(), hear()))
    assert loop.manager.save(6, args=GoCkptSave(loop.state), force=True)
    loop.given[6] = loop.given[8]
    assert loop.manager._gockpt_saves.waiting.step == 8
    loop.assert_saved(0, 4, 6, 8)


def test_a_forced_save_of_the_same_label_is_refused(start):
    loop = start(4)
    loop.train(8)
    loop.gates[4].set()
    with pytest.raises(ValueError, match="already exists"):
        loop.manager.save(8, args=GoCkptSave(loop.state), force=True)
    loop.assert_saved(0, 4, 8)


def test_nothing_is_thought_to_be_written_after_a_refused_save(start):
    loop = start(4)
    loop.train(8)
    loop.gates[4].set()
    with pytest.raises(ValueError, match="already exists"):
        loop.manager.save(4, args=GoCkptSave(loop.state), force=True)
    loop.update()
    loop.finish()
    assert on_disk(loop) == [0, 4, 8], "the next step has begun the one that waited"
    with pytest.raises(ValueError, match="already exists"):
        loop.manager.save(8, args=GoCkptSave(loop.state), force=True)
    assert not loop.manager.is_saving_in_progress()


def test_it_counts_as_a_save_for_policies(start):
    asked = []

    def should_save(label: int, last: int | None) -> bool:
        asked.append((label, last))
        return last is None or label - last >= 4

    # With windows it is asked ahead, and then told of what it has accepted itself.
    loop = start(4, window={"steps": None, "max_steps": 1}, should_save_fn=should_save)
    loop.train(9)
    assert (9, 8) in asked
    assert sorted(loop.given) == [0, 4, 8]
    loop.gates[4].set()
    loop.manager.close()
    assert on_disk(loop) == [0, 4, 8]


class Every4:
    """A policy of a user's own, by what has been saved."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        return not previous_steps or step.step - previous_steps[-1].step >= 4


def test_it_counts_for_policies_of_a_users_own(start):
    loop = start(4, save_interval_steps=1, save_decision_policy=Every4())
    loop.train(11)
    assert sorted(loop.given) == [0, 4, 8]
    loop.gates[4].set()
    loop.manager.close()
    assert on_disk(loop) == [0, 4, 8]


def test_it_counts_with_its_metrics(start):
    losses = [9, 9, 9, 9, 5, 5, 5, 5, 3, 4]

    class Better:
        def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
            return not previous_steps or losses[step.step] < previous_steps[-1].metrics["loss"]

    best = {"best_fn": lambda metrics: -metrics["loss"]}
    loop = start(4, save_interval_steps=1, save_decision_policy=Better(), **best)
    for label, loss in enumerate(losses):
        loop.train(label, metrics={"loss": loss})
    assert sorted(loop.given) == [0, 4, 8]
    loop.gates[4].set()
    loop.manager.close()
    assert on_disk(loop) == [0, 4, 8]


def test_what_is_given_to_save_may_change_afterwards(start):
    """All that is not on a device is taken with the state."""
    best = {"best_fn": lambda metrics: metrics["loss"]}
    loop = start(4, **best)
    loop.train(7)
    loop.update()
    notes, metrics, table = {"seen": [8]}, {"loss": 0.5}, np.arange(4)
    metadata = {"run": ["a"]}
    given = to_host(loop.state)
    args = ocp.args.Composite(
        state=GoCkptSave({"state": loop.state, "table": table}, custom_metadata=metadata),
        notes=ocp.args.JsonSave(notes),
    )
    assert loop.manager.save(8, args=args, metrics=metrics)
    notes["seen"].append(9)
    metrics["loss"] = 7.0
    metadata["run"].append("b")
    table += 1
    loop.label = 9
    loop.update()  # donates the state
    loop.gates[4].set()
    loop.manager.wait_until_finished()
    assert loop.report(8).kind == "window"
    restored = loop.manager.restore(8)
    assert_same(restored["state"]["state"], given)
    assert restored["state"]["table"].tolist() == [0, 1, 2, 3]
    assert restored["notes"] == {"seen": [8]}
    assert loop.manager.metrics(8) == {"loss": 0.5}
    assert loop.manager.item_metadata(8)["state"].custom_metadata["run"] == ["a"]


def test_items_that_cannot_be_taken_beforehand_are_skipped(start):
    loop = start(4)
    loop.train(7)
    loop.update()
    args = ocp.args.Composite(state=GoCkptSave(loop.state), data=ocp.args.ArraySave(np.arange(3)))
    assert not loop.manager.save(8, args=args)
    report = loop.manager.last_report
    assert (report.step, report.kind) == (8, "skipped")
    assert "`data` (`ArraySaveArgs`) cannot be taken beforehand" in report.reason


def test_what_is_being_written_is_known_beside_what_is_skipped(start, monkeypatch):
    """Whoever deletes it waits for it; a save that was not made is another one."""
    loop, found = start(4), []
    loop.train(7)
    loop.update()
    args = ocp.args.Composite(state=GoCkptSave(loop.state), data=ocp.args.ArraySave(np.arange(3)))
    assert not loop.manager.save(8, args=args)
    wait, delete = ocp.CheckpointManager.wait_until_finished, Deleter.delete

    def waits(manager: Any) -> None:
        loop.gates[4].set()
        wait(manager)

    def deletes(deleter: Deleter, step: int) -> None:
        found.append(loop.manager.is_saving_in_progress())
        loop.gates[4].set()
        delete(deleter, step)

    monkeypatch.setattr(ocp.CheckpointManager, "wait_until_finished", waits)
    monkeypatch.setattr(Deleter, "delete", deletes)
    loop.manager.delete(4)
    assert found == [False]
    assert on_disk(loop) == [0]


def test_items_are_taken_all_or_none(start):
    loop = start(4)
    loop.train(7)
    loop.update()
    assert loop.written[4].wait(WAIT_SECS)  # else its writer may be about to take room
    loop.settle()
    used_bytes = loop.session.host.used_bytes
    gone = jax.numpy.ones(3)
    gone.delete()
    args = ocp.args.Composite(state=GoCkptSave(loop.state), other=GoCkptSave({"gone": gone}))
    with pytest.raises(ValueError, match="donated to a later step, or deleted"):
        loop.manager.save(8, args=args)
    assert loop.manager._gockpt_saves.waiting is None
    loop.settle()
    assert loop.session.host.used_bytes <= used_bytes
    loop.assert_saved(0, 4)


def test_what_was_taken_is_given_back_where_another_item_cannot_be(start, monkeypatch):
    """And the save that waits is still there."""
    loop = start(4)
    loop.train(11)
    loop.update()
    assert loop.written[4].wait(WAIT_SECS)
    loop.settle()
    used_bytes, take = loop.session.host.used_bytes, StateHandler.take

    def refuse(handler: Any, args: Any, *when: float) -> Any:
        if "other" in args.item:
            loop.settle()
            assert loop.session.host.used_bytes > used_bytes
            raise MemoryError("injected")
        return take(handler, args, *when)

    monkeypatch.setattr(StateHandler, "take", refuse)
    other = GoCkptSave({"other": jax.numpy.ones(3)})
    args = ocp.args.Composite(state=GoCkptSave(loop.state), other=other)
    with pytest.raises(MemoryError, match="injected"):
        loop.manager.save(12, args=args)
    assert loop.manager._gockpt_saves.waiting.step == 8
    loop.settle()
    assert loop.session.host.used_bytes <= used_bytes
    loop.assert_saved(0, 4, 8)


def test_what_has_no_arrays_does_not_wait(start):
    """Orbax takes it from the caller, and writes it later."""
    loop = start(4)
    loop.train(7)
    loop.update()
    args = ocp.args.Composite(notes=ocp.args.JsonSave({"a": 1}))
    assert not loop.manager.save(8, args=args)
    report = loop.manager.last_report
    assert (report.step, report.kind) == (8, "skipped")
    assert "there is no tree of arrays in it" in report.reason
    loop.assert_saved(0, 4)


def test_other_items_are_superseded_with_it(start):
    loop = start(4)
    loop.train(7)
    loop.update()
    state = GoCkptSave(loop.state)
    args = ocp.args.Composite(before=ocp.args.JsonSave({"a": 1}), state=state)
    assert loop.manager.save(8, args=args)
    loop.label = 9
    assert loop.train(12)
    assert loop.kinds[8] == "superseded"
    loop.assert_saved(0, 4, 12)


def test_without_room_it_is_skipped(start, monkeypatch):
    budget = 2 * STATE_BYTES + 100  # for two states, or a window
    loop = start(4, window={"host_budget_bytes": budget, "audit": None})
    host = loop.session.host
    loop.train(4)
    assert loop.written[4].wait(WAIT_SECS)
    host.add(STATE_BYTES)  # as if it were still being written
    assert loop.train(8)
    waiting = loop.manager._gockpt_saves.waiting.pending.record
    assert (waiting.kind, waiting.deferred_steps) == ("snapshot", 2)
    assert "the host budget had no room" in waiting.reason
    loop.settle()
    with monkeypatch.context() as context:
        context.setattr(waiting_room, "_own", lambda args: copy.copy(threading.Lock()))
        with pytest.raises(TypeError, match="pickle"):  # it cannot be copied
            loop.train(12)
    assert loop.manager._gockpt_saves.waiting.step == 8
    host.reset_peak()
    assert loop.train(12), "room is made by the one that it supersedes"
    assert loop.report(8).kind == "superseded"
    loop.settle()
    assert host.peak_bytes <= budget, "before its own state is taken"
    host.add(200)  # something else has come
    assert not loop.train(16)
    report = loop.manager.last_report
    assert (report.step, report.kind) == (16, "skipped")
    assert "the save of step 4 was still being written, and the host budget had no room" in (
        report.reason
    )
    host.release(200 + STATE_BYTES)
    loop.assert_saved(0, 4, 12)


def test_an_array_that_a_save_holds_twice_takes_room_once(start):
    """And as much comes free where such a save is superseded."""
    budget = 2 * LEAF + 100  # one that is being written, and one that waits
    loop = start(4, window={"host_budget_bytes": budget, "audit": None})
    host = loop.session.host

    def save(label: int, *names: str) -> bool:
        array = jax.numpy.full(SIZE, float(label))
        loop.given[label] = dict.fromkeys(names, np.asarray(array))
        return loop.manager.save(label, args=GoCkptSave(dict.fromkeys(names, array)))

    loop.update()
    assert save(4, "a")
    assert loop.written[4].wait(WAIT_SECS)
    host.add(LEAF)  # as if it were still being written
    assert save(8, "a", "b")
    assert save(12, "a", "b"), "room is made by the one that it supersedes"
    loop.settle()
    assert host.used_bytes == 2 * LEAF
    host.add(200)  # something else has come
    assert not save(16, "a", "b")
    host.release(200 + LEAF)
    loop.assert_saved(4, 12)
    array = jax.numpy.ones(SIZE)
    taken = loop.manager._gockpt_handler.take(GoCkptSave(dict.fromkeys("ab", array)))
    loop.settle()
    for written, left in zip(taken.arrays, (LEAF, 0), strict=True):
        written.release()
        assert host.used_bytes == left


@pytest.mark.parametrize("heard_by", ["step", "save", "wait_until_finished", "close"])
def test_the_previous_save_fails_and_the_waiting_one_is_written(start, monkeypatch, heard_by):
    loop = start(4)
    loop.train(3)
    fail_writing_of(monkeypatch, 4)
    loop.train(8)
    loop.finish()
    calls = {
        "step": loop.update,
        "save": lambda: loop.manager.save(8, args=GoCkptSave(loop.state)),
        "wait_until_finished": loop.manager.wait_until_finished,
        "close": loop.manager.close,
    }
    with pytest.raises(RuntimeError, match="injected"):
        calls[heard_by]()
    loop.update()  # the state is alive, and training goes on
    if heard_by != "close":
        loop.manager.close()
    assert on_disk(loop) == [0, 8]
    assert "injected" in loop.report(4).error
    assert loop.report(8).error is None


def test_one_that_waits_goes_before_a_save_that_finds_nothing_busy_any_more(start, monkeypatch):
    """What was being written has ended just behind the turn of the one that waits."""
    loop = start(4)
    loop.train(11)

    def objection(subject, mine, *_):
        if subject == "busy":
            loop.finish()
            return None
        return mine

    with monkeypatch.context() as patch:
        patch.setattr(loop.session.processes, "objection", objection)
        assert loop.train(12)
    loop.assert_saved(0, 4, 8, 12)


def test_one_that_waits_is_the_newest_where_orbax_has_none(start, monkeypatch):
    loop = start(4)
    loop.train(3)
    loop.manager.delete(0)
    fail_writing_of(monkeypatch, 4)
    loop.train(8)
    loop.finish()
    with pytest.raises(RuntimeError, match="injected"):
        loop.update()
    assert look(loop.manager) == (8, [8], True)
    refused = loop.manager._gockpt_saves._is_refused
    assert [refused(label) for label in (7, 8, 9)] == [True, True, False]
    del loop.given[0], loop.given[4]
    loop.assert_saved(8)


def test_the_waiting_save_fails(start, monkeypatch):
    loop = start(4)
    loop.train(7)
    fail_writing_of(monkeypatch, 8)
    assert loop.train(8)
    loop.gates[4].set()
    with pytest.raises(RuntimeError, match="injected"):
        loop.manager.wait_until_finished()
    assert loop.manager.latest_step() == 4
    assert "injected" in loop.report(8).error
    loop.train(12)
    loop.assert_saved(0, 4, *(x for x in loop.given if x > 8))


def test_one_that_had_failed_before_it_was_superseded_is_reported_as_both(start, monkeypatch):
    loop = start(4)
    loop.train(7)
    loop.settle()  # what left early for 4 is final
    with monkeypatch.context() as patch:
        patch.setattr(EarlyChunks, "finish", _fail)
        assert loop.train(8)
        loop.settle()
    assert loop.train(12)
    report = loop.report(8)
    assert "injected" in report.error
    assert (report.kind, report.window_steps) == ("superseded", 3)
    loop.assert_saved(0, 4, 12)


def _fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("injected")


def test_a_failed_save_is_told_by_a_save_that_the_policy_leaves_out(start, monkeypatch):
    loop = start(4)
    loop.train(3)
    fail_writing_of(monkeypatch, 4)
    loop.train(4)
    loop.finish()
    with pytest.raises(RuntimeError, match="injected"):
        loop.train(5)


def test_a_warning_is_enough_if_so_asked(start, monkeypatch):
    loop = start(4, window={"on_save_error": "warn"})
    loop.train(3)
    fail_writing_of(monkeypatch, 4)
    loop.train(8)
    loop.finish()
    with pytest.warns(gockpt.SaveFailedWarning, match="injected"):
        loop.update()
    loop.manager.close()
    assert on_disk(loop) == [0, 8]


@pytest.mark.parametrize("held", [(4,), ()], ids=["busy", "idle"])
def test_a_window_that_had_failed_is_told_of_beside_its_save(start, monkeypatch, held):
    """By this call, for no other may come; a warning is enough for either."""
    loop = start(*held, window={"on_save_error": "warn"})
    loop.train(7)
    if not held:
        loop.manager.wait_until_finished()
    monkeypatch.setattr(EarlyChunks, "land_cut", _fail)  # of what follows its last step
    loop.update()
    loop.settle()
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")
    monkeypatch.setattr(seal, "take_late", lambda *_: (_ for _ in ()).throw(full))
    with pytest.warns(gockpt.SaveFailedWarning) as told:
        assert not loop.manager.save(8, args=GoCkptSave(loop.state))
    words = [str(warning.message) for warning in told]
    assert [("no room" in text, "injected" in text) for text in words] == [
        (True, False),
        (False, True),
    ]
    loop.finish()
    assert on_disk(loop) == [0, 4]


def test_one_that_cannot_be_taken_is_told_of_once(start, monkeypatch):
    """A warning is enough for it, too: it is not skipped besides."""
    loop = start(4, window={"on_save_error": "warn"})
    loop.train(7)
    with monkeypatch.context() as context:
        full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")
        context.setattr(seal, "take_late", lambda *_: (_ for _ in ()).throw(full))
        with pytest.warns(gockpt.SaveFailedWarning, match="injected"):
            assert not loop.train(8)
    assert ["injected" in r.error for r in loop.manager.reports if r.step == 8] == [True]
    loop.train(12)
    loop.assert_saved(0, 4, 12)


def test_calls_that_fail_count_once(start):
    """Where one fails on one process alone, and is made again or left out, all count alike."""
    loop = start()
    turn = loop.manager._gockpt_saves._turn

    def calls(*, fails: bool = False, again: bool = True, saved: int = 1) -> int:
        before = turn._calls
        if fails:
            with pytest.raises(TypeError):
                loop.step(loop.state, "no batch")
        if again:
            loop.update()
        for _ in range(saved):
            loop.manager.save(loop.label, args=GoCkptSave(loop.state))
        loop.label += 1
        return turn._calls - before

    assert calls() == calls(fails=True) == calls(fails=True, again=False) == 2
    assert calls(saved=3) == 4


def test_orbax_refuses_the_waiting_save(start, monkeypatch):
    """Another process has put something there meanwhile."""
    loop = start(4)
    loop.train(8)
    loop.finish()
    monkeypatch.setattr(
        ocp.CheckpointManager, "save", lambda *_, **__: (_ for _ in ()).throw(OSError("refused"))
    )
    with pytest.raises(gockpt.StorageError, match="refused"):
        loop.update()
    monkeypatch.undo()
    assert "refused" in loop.report(8).error
    assert not loop.manager.is_saving_in_progress()
    loop.assert_saved(0, 4)


@pytest.mark.parametrize("heard_by", ["the last save", "the turn"])
def test_beside_a_process_that_is_gone_the_one_that_waits_is_given_up(start, monkeypatch, heard_by):
    """It would wait for that one, too."""
    loop = start(4)
    loop.train(3)
    error = "injected" if heard_by == "the last save" else "process 1 did not come"
    if heard_by == "the last save":
        fail_writing_of(monkeypatch, 4)
    loop.train(8)
    loop.finish()

    def gone(*_: Any, **__: Any) -> bool:
        raise gockpt.ProcessError(error)

    with monkeypatch.context() as patch:
        if heard_by == "the last save":
            patch.setattr(loop.session.processes, "is_one_missing", True)
        else:
            patch.setattr(Turn, "has_come", gone)
        hear = loop.update if heard_by == "the turn" else loop.manager.wait_until_finished
        with pytest.raises(RuntimeError, match=error):
            hear()
    assert loop.manager._gockpt_saves.waiting is None
    assert error in loop.report(8).error
    loop.assert_saved(*([0] if heard_by == "the last save" else [0, 4]))


def fail_writing_of(monkeypatch: pytest.MonkeyPatch, label: int) -> None:
    held = Written.result

    def failing(written: Written, timeout: float | None = None) -> None:
        held(written, timeout)
        if written._record.step == label:
            raise RuntimeError("injected")

    monkeypatch.setattr(Written, "result", failing)


def test_a_donated_state_is_refused_and_nothing_waits_for_it(start):
    loop = start(4)
    loop.train(7)
    old = loop.state
    loop.update()
    loop.update()
    with pytest.raises(ValueError, match="donated"):
        loop.manager.save(8, args=GoCkptSave(old))
    assert loop.manager._gockpt_saves.waiting is None
    loop.assert_saved(0, 4)


def test_the_default_budget_holds_two_states_more(start):
    """Beside what one save needs; replay's scratch is what its write buffers may be here."""
    scratch = 2 * 4 * PIECE_SIZES[-1]
    loop = start(4, window={"write_limit_bytes": scratch, "audit": None})
    loop.train(8)
    loop.settle()  # with what replay takes
    loop.train(12)
    loop.gates[4].set()
    loop.manager.close()
    assert loop.kinds == {0: "snapshot", 4: "window", 8: "superseded", 12: "window"}
    for report in loop.manager.reports:
        assert report.peak_host_bytes <= report.host_budget_bytes
    assert loop.report(12).host_budget_bytes == (3 * STATE_BYTES + 2 * LEAF + scratch) * 11 // 10


@pytest.mark.parametrize("seed", range(2))
def test_whatever_the_storage_s_pace_each_checkpoint_is_the_state_of_its_label(
    tmp_path, monkeypatch, seed
):
    """Windows open, saves wait, are handed over and superseded in whatever order comes."""
    rng, go_on = np.random.default_rng(seed), threading.Event()
    result = Written.result

    def at_some_pace(written: Written, timeout: float | None = None) -> None:
        result(written, timeout)
        assert go_on.wait(WAIT_SECS)

    monkeypatch.setattr(Written, "result", at_some_pace)
    options = Options(save_interval_steps=3)
    window = WindowOptions(steps=3, on_busy="newest")
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        step, state, given = manager.wrap(donating), jax.tree.map(jax.numpy.array, fresh()), {}
        for label in range(49):
            state = step(state, BATCH)
            if manager.save(label, args=GoCkptSave(state)):
                given[label] = to_host(state)
            (go_on.set if rng.random() < 0.5 else go_on.clear)()
        go_on.set()
        manager.wait_until_finished()
        reports = {report.step: report for report in manager.reports}
        assert sorted(reports) == sorted(given) == list(range(0, 49, 3))
        superseded = {n for n, report in reports.items() if report.kind == "superseded"}
        assert superseded, "or nothing was tried"
        steps = manager.all_steps()
        assert sorted(steps) == sorted(given.keys() - superseded)
        for label in steps:
            assert_same(manager.restore(label), given[label])
        manager._gockpt_session.resources.worker.wait_until_idle()
        assert manager._gockpt_session.host.used_bytes == 0


class Contended:
    """A lock that tells when a thread waits for it."""

    def __init__(self, lock: Any, waited_for: threading.Event):
        self._lock, self._waited_for = lock, waited_for

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waited_for.set()
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


@pytest.mark.usefixtures("its_own_garbage")
def test_a_forgotten_manager_lives_until_its_save_is_written(tmp_path, monkeypatch):
    """As where a notebook's cell runs again: the end of the script writes what it finds alive."""
    may_end, result = threading.Event(), Written.result
    monkeypatch.setattr(Written, "result", lambda *a: (result(*a), may_end.wait(WAIT_SECS)))
    loop = Loop(tmp_path, window={"on_busy": "newest"}, save_interval_steps=1)
    loop.train(1)
    manager, given = weakref.ref(loop.manager), loop.given[1]
    del loop
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "save_finalize":  # it knows the manager, too
            thread.join(WAIT_SECS)
    gc.collect()
    manager().close()
    gc.collect()
    assert manager() is None
    with GoCkptManager(tmp_path) as manager:
        assert_same(manager.restore(1), given)


@pytest.mark.parametrize("call", ["wait", "restore", "delete"])
def test_another_thread_begins_the_save_that_waits(start, monkeypatch, call):
    """Nothing else begins one meanwhile: checkpoints were torn, and both threads raised."""
    loop = start(4)
    assert loop.train(8)
    entered, go_on, take = threading.Event(), threading.Event(), StateHandler._write

    async def writes(handler, directory, taken, begun):
        if threading.current_thread() is other:
            entered.set()
            assert go_on.wait(WAIT_SECS)
        return await take(handler, directory, taken, begun)

    calls = {
        "wait": loop.manager.wait_until_finished,
        "restore": lambda: loop.manager.restore(0),
        "delete": lambda: loop.manager.delete(0),
    }
    raised = []

    def run():
        try:
            calls[call]()
        except BaseException as error:
            raised.append(error)

    monkeypatch.setattr(StateHandler, "_write", writes)
    other = threading.Thread(target=run)
    other.start()
    loop.finish()
    assert entered.wait(WAIT_SECS)
    # Until the trainer waits, or does what it must not.
    save = ocp.AsyncCheckpointer.save
    monkeypatch.setattr(ocp.AsyncCheckpointer, "save", lambda *a, **k: go_on.set() or save(*a, **k))
    loop.session.lock = Contended(loop.session.lock, go_on)
    assert loop.train(12)
    other.join(WAIT_SECS)
    assert not other.is_alive()
    assert not raised
    loop.assert_saved(*(label for label in (0, 4, 8, 12) if label or call != "delete"))
    assert loop.kinds == {0: "snapshot", 4: "window", 8: "window", 12: "window"}


def test_a_step_does_not_wait_for_a_save_that_another_thread_has_begun_meanwhile(
    start, monkeypatch
):
    loop = start(4)
    assert loop.train(8)
    loop.finish()
    saves, has_come, hear, by = loop.manager._gockpt_saves, Turn.has_come, LastSave.hear, set()

    def late(*args, **kwargs):
        come = has_come(*args, **kwargs)
        if threading.current_thread() is threading.main_thread() and saves.waiting is not None:
            on_a_thread(saves.give_turn)
        return come

    monkeypatch.setattr(Turn, "has_come", late)
    monkeypatch.setattr(
        LastSave, "hear", lambda last: by.add(threading.current_thread()) or hear(last)
    )
    loop.update()
    assert by
    assert threading.main_thread() not in by
    loop.assert_saved(0, 4, 8)


def test_whoever_is_interrupted_as_they_wait_waits_for_no_other_save(start, monkeypatch):
    loop, real = start(4), LastSave.hear
    loop.train(8)

    def interrupted(_: LastSave) -> None:
        monkeypatch.setattr(LastSave, "hear", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(LastSave, "hear", interrupted)
    loop.finish()
    with pytest.raises(KeyboardInterrupt):
        loop.manager.wait_until_finished()
    assert loop.manager._gockpt_saves.waiting.step == 8
    loop.manager.close()
    assert on_disk(loop) == [0, 4, 8]


@pytest.mark.parametrize("call", ["wait_until_finished", "close"])
def test_a_wait_inside_a_lock_is_refused_where_a_save_waits(start, call):
    """Its threads would wait for the line that a signal handler has interrupted."""
    loop = start(4)
    assert loop.train(8)
    loop.finish()
    assert not loop.manager._gockpt_saves.last.is_writing
    with shared_lock(), pytest.raises(RuntimeError, match="lock which a save needs"):
        getattr(loop.manager, call)()
    assert on_disk(loop) == [0, 4]
    getattr(loop.manager, call)()
    assert on_disk(loop) == [0, 4, 8]


def test_a_wait_in_the_middle_of_a_step_begins_no_save(start):
    """A signal handler's: what it has interrupted goes on only after it."""
    loop = start(4)
    with loop.manager as manager:
        loop.train(8)
        loop.finish()
        with loop.session.lock:  # as a step's hook holds it
            manager.wait_until_finished()
            assert manager._gockpt_saves.waiting.step == 8
        manager.wait_until_finished()
        loop.assert_saved(0, 4, 8)
