"""What the processes of a job do; the same function runs in each of them."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from data_position import Position

import gockpt_jax as gockpt
from gockpt_jax import _compat
from gockpt_jax.checks import counted
from gockpt_jax.storage.inspecting.verify import verify
from gockpt_jax.storage.restoring import restore
from gockpt_jax.storage.saving import state_handler, taken
from gockpt_jax.storage.writing import array_handler, leaf_writer
from gockpt_jax.training.program import StepProgram
from gockpt_jax.transfer import block, budget, chunks, meter, pull, replicas, staging
from gockpt_jax.v1 import GoCkptCheckpointable
from gockpt_jax.window import ahead, clock, early, late, processes, units
from gockpt_jax.window.host_budget import HostBudget
from gockpt_jax.window.late_groups import LateGroups
from gockpt_jax.window.open_window import OpenWindow
from gockpt_jax.window.predict import SavePredictor

from .training import INTERVAL, MESHES_OF, WINDOW_STEPS, Loop, abstract, place, shards_of

FAULTY = 1  # The process in which things go wrong, unless a scenario says otherwise.


def say(*words: Any) -> None:
    """Tells the parent."""
    print(*words, flush=True)


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any, only_on: int = FAULTY) -> Iterator[None]:
    """Replaces a function of the library in one process, wherever it was imported by name."""
    old = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == only_on:
            patch.setattr(owner, name, new)
            for module_name, module in list(sys.modules.items()):
                if module_name.startswith("gockpt_jax.") and getattr(module, name, None) is old:
                    patch.setattr(module, name, new)
        yield


def failing(error: BaseException) -> Callable[..., Any]:
    """A function that raises."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def holds_nothing(loop: Loop) -> None:
    """Asserts that no window is open and that all that saves took of the budgets is given back.

    Threads of ours may still do so when a save is visible: of a window that was given up here, say.
    """
    resources = loop.session.resources
    for thread in (resources.worker, resources.watcher):
        thread.wait_until_idle()
    assert loop.session.window_status == "idle"
    assert resources.device.used_bytes == 0 == resources.host.used_bytes


def small_slices() -> contextlib.AbstractContextManager[None]:
    """Replicas share leaves of a few hundred bytes."""
    return replaced(replicas, "MIN_SLICE_ELEMENTS", 16, only_on=jax.process_index())


def meshes(directory: Path) -> None:
    """Trains on meshes, with windows, and restores on another mesh."""
    with small_slices():
        for name in MESHES_OF[jax.process_count()]:
            train_on(name, directory)


def train_on(name: str, directory: Path) -> None:
    """Trains on a mesh."""
    loop = Loop(directory / name, name)
    statuses = []
    for _ in range(2 * INTERVAL + 1):
        statuses.append(loop.manager.window_status)
        loop.update()
        loop.save()
    loop.keep()
    reports = loop.manager.reports
    kinds = {report.step: report.kind for report in reports}
    assert kinds == {0: "snapshot", INTERVAL: "window", 2 * INTERVAL: "window"}, reports
    say("plan", name, [s for s in statuses if "window" in s], loop.session.explain())
    say("written", name, [report.written_bytes for report in reports])
    other = place(loop.state, "tensor" if name == "fsdp" else "fsdp")
    restored = loop.manager.restore(2 * INTERVAL, args=gockpt.GoCkptRestore(abstract(other)))
    expected = shards_of(other)
    for key, shard in shards_of(restored).items():
        assert shard.tobytes() == expected[key].tobytes(), key
    holds_nothing(loop)
    loop.manager.close()


def shared(directory: Path) -> None:
    """Each replica takes and writes its slices, on devices of both processes, whatever happens."""
    with small_slices():
        loop = Loop(directory / "data_parallel", "data_parallel", layout={"use_ocdbt": False})
        share(loop)
        share(Loop(directory / "zero_1", "zero_1"))
    plain = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    with ocp.Checkpointer(plain) as stock:
        stock.save(directory / "data_parallel_stock", args=ocp.args.PyTreeSave(loop.state))


def share(loop: Loop) -> None:
    """A snapshot, windows, one of which a process gives up its part of, and one that fails."""
    pulled: list[int] = []
    start = pull.start_buffer

    def counted(buffer: jax.Array) -> jax.Array:
        pulled.append(buffer.nbytes)
        return start(buffer)

    with replaced(pull, "start_buffer", counted, only_on=jax.process_index()):
        for label in (0, INTERVAL):
            pulled.clear()
            loop.run(label)
            loop.manager.wait_until_finished()
            report = loop.report(label)
            say("shared", loop.directory.name, report.kind, sum(pulled), report.written_bytes)
    assert report.early_bytes > 0, report
    with replaced(HostBudget, "why_no_room", lambda *_: "no room"):
        loop.run(2 * INTERVAL)
        loop.manager.wait_until_finished()
    expected = "snapshot" if jax.process_index() == FAULTY else "window"
    assert loop.report(2 * INTERVAL).kind == expected
    with replaced(early.EarlyChunks, "land_block", failing(RuntimeError("injected"))):
        loop.run(3 * INTERVAL)
        assert f"process {FAULTY}: ReplayError" in failure_of(loop)
    del loop.given[3 * INTERVAL]
    loop.run(4 * INTERVAL)
    loop.keep()
    assert loop.report(4 * INTERVAL).kind == "window"
    holds_nothing(loop)
    loop.manager.close()


def v1(directory: Path) -> None:
    """Under v1's `Checkpointer`: windows, one that fails on one process, and what is loaded."""
    window = gockpt.WindowOptions(steps=WINDOW_STEPS)
    with small_slices():
        windows = GoCkptCheckpointable(window=window)
        loop = Loop(directory / "run", "data_parallel", checkpointable=windows)
        others = failing(RuntimeError("only the primary process completes what all have written"))
        with replaced(state_handler.StateHandler, "finalize", others, only_on=1):
            loop.run(3 * INTERVAL)
            loop.keep()
        kinds = [r.kind for r in windows.reports]
        assert kinds == ["snapshot", "snapshot", "window", "window"], windows.reports
        target = {"state": windows(abstract(place(loop.state, "fsdp")))}
        loaded = loop.manager.checkpointer.load_checkpointables(3 * INTERVAL, target)
        expected = shards_of(place(loop.state, "fsdp"))
        for key, shard in shards_of(loaded["state"].item).items():
            assert shard.tobytes() == expected[key].tobytes(), key
        with replaced(
            state_handler.StateHandler, "finalize", failing(RuntimeError("injected")), only_on=0
        ):
            loop.run(4 * INTERVAL)
            assert "process 0: RuntimeError: injected" in failure_of(loop)
        # Orbax raises it once on each thread, and the response of newer ones has its own.
        with contextlib.suppress(gockpt.ProcessError):
            loop.manager.close()
        assert sorted(ocp.utils.checkpoint_steps(loop.directory)) == [0, 4, 8, 12]
        unasked(directory / "unasked")


def unasked(directory: Path) -> None:
    """A failure under v1's `Checkpointer` that nobody has asked for is raised by `close`."""
    loop = Loop(directory, "data_parallel", checkpointable=GoCkptCheckpointable())
    injected = failing(RuntimeError("injected"))
    with replaced(state_handler.StateHandler, "finalize", injected, only_on=0):
        loop.run(0)
        with pytest.raises(gockpt.ProcessError, match="process 0: RuntimeError: injected"):
            loop.manager.close()
    assert ocp.utils.checkpoint_steps(loop.directory) == []


def elsewhere(directory: Path) -> None:
    """A leaf on the devices of processes 0 and 1 alone is saved beside the state, and restored."""
    loop = Loop(directory / "run", "fsdp_tensor")
    leaf = half_of_the_devices()
    loop.run(INTERVAL - 1)
    loop.update()
    assert loop.save(args=gockpt.GoCkptSave({"state": loop.state, "half": leaf}))
    loop.manager.wait_until_finished()
    report = loop.report(INTERVAL)
    say("kind", report.kind, report.early_bytes > 0, len(leaf.addressable_shards))
    target = abstract({"state": loop.state, "half": leaf})
    for args in (gockpt.GoCkptRestore(target), gockpt.GoCkptRestore()):
        restored = loop.manager.restore(INTERVAL, args=args, verify=True)
        assert restored["half"].sharding == leaf.sharding
        for before, after in zip(
            leaf.addressable_shards, restored["half"].addressable_shards, strict=True
        ):
            assert np.array_equal(before.data, after.data)
    holds_nothing(loop)
    loop.manager.close()


def half_of_the_devices() -> jax.Array:
    """An array on the devices of processes 0 and 1 of four; in each row the process that has it."""
    half = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("half",))
    sharding = jax.sharding.NamedSharding(half, jax.sharding.PartitionSpec("half"))
    rows = [np.full((2, 3), d.process_index, np.float32) for d in half.local_devices]
    parts = [jax.device_put(x, d) for x, d in zip(rows, half.local_devices, strict=True)]
    return jax.make_array_from_single_device_arrays((8, 3), sharding, parts, dtype=np.float32)


class MadeBehindOwn1(ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]  # untyped
    """Process 0 makes its own directory when process 1 has saved into its own."""

    async def create(self) -> Any:
        if self.get_final().parent.name == "own_0":
            client().blocking_key_value_get("own_1 is saved", 100_000)
        return await super().create()


def client() -> Any:
    """The job's coordination service."""
    return _compat.coordination_client()


def some(directory: Path) -> None:
    """Processes 0 and 1 save without the others: together, and each into storage of its own."""
    leaf, index = half_of_the_devices(), jax.process_index()
    if index > 1:
        return
    places = {
        "together": {"primary_host": 0, "active_processes": {0, 1}},
        f"own_{index}": {"primary_host": None, "active_processes": {index}},
    }
    for name, together in places.items():
        options = ocp.CheckpointManagerOptions(
            create=False,
            temporary_path_class=MadeBehindOwn1,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                barrier_sync_key_prefix=name, **together
            ),
        )
        root = directory / name
        root.mkdir(exist_ok=True)
        with gockpt.GoCkptManager(root, options=options) as manager:
            assert manager.save(0, args=gockpt.GoCkptSave({"half": leaf}))
            target = gockpt.GoCkptRestore(abstract({"half": leaf}))
            restored = manager.restore(0, args=target, verify=True)["half"]
            assert [v.state for v in verify(root)] == ["whole", "whole"], [*verify(root)]
            if name == "together":
                spoiled_is_found(manager, target)
        client().key_value_set(f"{name} is saved", "yes", allow_overwrite=True)
        for before, after in zip(leaf.addressable_shards, restored.addressable_shards, strict=True):
            assert np.array_equal(before.data, after.data)


def spoiled_is_found(manager: gockpt.GoCkptManager, target: Any) -> None:
    """Between them the processes that restore read all chunks, and both say what one has found."""
    barrier = manager._gockpt_session.processes.barrier
    barrier("not spoiled yet")
    if jax.process_index() == 0:
        one, two = (np.float32(x).tobytes() for x in (1, 2))
        files = [p for p in Path(manager.directory, "0/state").rglob("*") if p.is_file()]
        (file,) = (p for p in files if one * 6 in p.read_bytes())
        at = (data := file.read_bytes()).rfind(one)
        file.write_bytes(data[:at] + two + data[at + len(one) :])
    barrier("spoiled")
    with pytest.raises(gockpt.VerifyError, match="is damaged"):
        manager.restore(0, args=target, verify=True)


def queue(directory: Path) -> None:
    """Steps of process 0 that wait for process 1 are still in its queue when `save` returns.

    Process 1 dispatches its part of them when process 0 has looked: a save that waited for the
    devices would never return.
    """
    loop = Loop(directory / "run")
    loop.run(3)
    is_first, dispatch = jax.process_index() == 0, queue_of(loop)
    queued = dispatch() if is_first else []
    assert loop.save(force=True)
    if is_first:
        say("running", not any(x.is_ready() for x in queued))
    loop.session.processes.barrier("looked")
    jax.block_until_ready(queued if is_first else dispatch())
    loop.keep()
    report = loop.manager.last_report
    assert 0 < report.barrier_secs <= report.stall_secs, report
    holds_nothing(loop)
    loop.manager.close()


def queue_of(loop: Loop) -> Callable[[], list[jax.Array]]:
    """A function that queues steps; one process's wait for the other's. It is compiled."""
    add = jax.jit(lambda state: jax.tree.map(lambda x: x + x.sum(), state))  # a collective

    def dispatch() -> list[jax.Array]:
        queued = loop.state
        for _ in range(3):
            queued = add(queued)
        return [x for x in jax.tree.leaves(queued) if x.dtype == np.float32]

    jax.block_until_ready(dispatch())
    return dispatch


# --- A process that gives up its part ------------------------------------------------------------


def parts(directory: Path) -> None:
    """One process gives up its part of a window; the others' windows, and the save, go on."""
    loop = Loop(directory / "run")
    armed, call = [], StepProgram.call

    def counted(self: Any, *args: Any) -> Any:
        armed.append(loop.label)
        return call(self, *args)

    with replaced(StepProgram, "call", counted, only_on=jax.process_index()):
        give_up(loop)
    say("armed", armed)
    loop.keep()
    holds_nothing(loop)
    loop.manager.close()


def give_up(loop: Loop) -> None:
    """Gives parts up, for one reason after the other."""
    loop.run(INTERVAL)
    is_faulty = jax.process_index() == FAULTY

    def next_save(label: int, reason: str | None) -> None:
        loop.run(label)
        loop.manager.wait_until_finished()
        report = loop.report(label)
        assert report.kind == ("snapshot" if is_faulty and reason else "window"), report
        assert not is_faulty or (reason or "") in report.reason, report

    no_room = "the host budget had no room"
    with replaced(HostBudget, "why_no_room", lambda *_: no_room):
        next_save(8, no_room)
    with replaced(staging, "stage", failing(MemoryError("the device is full"))):
        loop.run(11)
    next_save(12, "the device is full")
    loop.run(15)
    if is_faulty:  # after its block has left, one leaf is another array of the same values
        first = loop.state["opt"][1][0].mu["w"]
        shards = [jax.device_put(np.array(s.data), s.device) for s in first.addressable_shards]
        same = jax.make_array_from_single_device_arrays(first.shape, first.sharding, shards)
        loop.state = jax.tree.map(lambda x: same if x is first else x, loop.state)
    next_save(16, None)
    assert bool(loop.report(16).late_leaves) == is_faulty
    slow(loop)
    holds_nothing(loop)


def slow(loop: Loop) -> None:
    """What one process took at the seal lands there only some steps later."""
    go_on = threading.Event()
    result = pull.Pull.result

    def late(self: Any) -> Any:
        go_on.wait()
        return result(self)

    with replaced(pull.Pull, "result", late):
        loop.run(20)
        for _ in range(2):
            loop.update()
            loop.save()
        assert loop.manager.all_steps()[-1] == 20
        assert 20 not in ocp.utils.checkpoint_steps(loop.directory)
        go_on.set()
        loop.manager.wait_until_finished()
    assert loop.report(20).kind == "window"


def unstaged(directory: Path) -> None:
    """An error of ours before a step of a window costs one process its part; the job goes on.

    Gradients lie otherwise than their parameters: to bring them there is a program of all.
    """
    loop = Loop(directory / "run", "cut_across")
    loop.run(INTERVAL)
    places = [(LateGroups, "look_for_replaced"), (OpenWindow, "make_room")]
    for number, (owner, name) in enumerate(places, 2):
        loop.run(number * INTERVAL - 2)
        with replaced(owner, name, failing(RuntimeError("injected"))):
            loop.update()
        window = loop.session._current.window
        assert window._left[-1].following.is_resharded
        assert (window.given_up is not None) == (jax.process_index() == FAULTY)
        loop.run(number * INTERVAL)
        loop.manager.wait_until_finished()
        expected = "snapshot" if jax.process_index() == FAULTY else "window"
        assert loop.report(number * INTERVAL).kind == expected, loop.manager.reports
    loop.run(4 * INTERVAL)
    loop.keep()
    assert loop.report(4 * INTERVAL).kind == "window"
    holds_nothing(loop)
    loop.manager.close()


def in_vain(directory: Path) -> None:
    """A call of the step fails on one process in a window, and is made again: armed, as elsewhere.

    With the plan of all: one for what is left of the window would bring other gradients elsewhere.
    """
    loop = Loop(directory / "run", "cut_across")
    loop.run(INTERVAL)
    is_faulty = jax.process_index() == FAULTY
    dispatch = failing(RuntimeError("a failed dispatch"))
    calls = [(7, "first"), (12, "last"), (15, "dispatched"), (20, "dispatched")]
    for label, kind in calls:
        loop.run(label - 1)
        for _ in range(2 * is_faulty):
            if kind == "dispatched":
                with replaced(StepProgram, "call", dispatch), pytest.raises(RuntimeError):
                    loop.step(loop.state, loop.batch())
            else:
                with pytest.raises(TypeError):
                    loop.step(loop.state, "no batch")
        last = -(-label // INTERVAL) * INTERVAL
        loop.run(last)
        loop.manager.wait_until_finished()
        assert loop.report(last).kind == ("snapshot" if is_faulty else "window")
    loop.run(6 * INTERVAL)
    loop.keep()
    assert loop.report(6 * INTERVAL).kind == "window"
    holds_nothing(loop)
    loop.manager.close()


def taken_away(directory: Path) -> None:
    """The loop takes leaves to the host, in a window of which one process has given up its part.

    To bring the gradients where they are replayed is a program of all: so that one has to leave out
    what the others do.
    """
    loop = Loop(directory / "run", "whole_across")
    loop.run(INTERVAL)
    for last, places in ((8, (HostBudget, "why_no_room", lambda *_: "no room")), (12, None)):
        with replaced(*places) if places else contextlib.nullcontext():
            loop.run(last - 1)
        window = loop.session._current.window
        assert window._left[-1].following.is_resharded
        loop.state = loop.state | {"opt": jax.tree.map(np.asarray, loop.state["opt"])}
        if places is None and jax.process_index() == FAULTY:  # it is given up by a call in vain
            with pytest.raises(TypeError):
                loop.step(loop.state, "no batch")
        loop.run(last)
        loop.manager.wait_until_finished()
        assert loop.report(last).kind == "snapshot"  # nothing of it was left
        say("taken_away", window._left[-1].units)
    loop.run(16)
    loop.keep()
    assert loop.report(16).kind == "window"
    holds_nothing(loop)
    loop.manager.close()


def unarmed(directory: Path) -> None:
    """A step that one process cannot arm runs armed on none, and all say who and why."""

    def reasons(name: str, owner: Any, attribute: str, new: Any) -> Loop:
        loop = Loop(directory / name)
        with replaced(owner, attribute, new):
            loop.run(INTERVAL)
        loop.manager.wait_until_finished()
        report = loop.report(INTERVAL)
        assert report.kind == "snapshot", report
        say("reason", name, report.reason)
        return loop

    with pytest.warns(gockpt.SnapshotOnlyWarning, match="contracts multiply-adds"):
        loop = reasons("contracts", ahead, "cpu_contracts", lambda: True)
    loop.keep()
    holds_nothing(loop)
    loop.manager.close()
    no_room = "the armed step did not compile: no room"
    loop = reasons("compile", StepProgram, "why_not_ready", lambda self: no_room)
    loop.keep()
    holds_nothing(loop)
    loop.manager.close()
    compiling = "the armed step was still compiling"
    loop = reasons("compiling", StepProgram, "why_not_ready", lambda self: compiling)
    loop.run(2 * INTERVAL)  # it has been compiled meanwhile
    loop.keep()
    assert loop.report(2 * INTERVAL).kind == "window"
    holds_nothing(loop)
    loop.manager.close()


def planned(directory: Path) -> None:
    """Processes that have measured other times, rates and free memory make one plan."""
    is_slow = jax.process_index() == 0
    secs, rate, free = (10.0, 1e3, 10220) if is_slow else (100.0, 1e9, 10**9)
    here = jax.process_index()
    with (
        replaced(clock.StepClock, "secs", property(lambda _: secs), only_on=here),
        replaced(type(meter.LINK), "bytes_per_sec", property(lambda _: rate), only_on=here),
        replaced(budget, "device_headroom_bytes", lambda: free, only_on=here),
        # As in large models, of which small arrays, copied before they travel, are a small part.
        replaced(units, "LARGE_BYTES", 0, only_on=here),
    ):
        loop = Loop(directory / "run", window=gockpt.WindowOptions(max_steps=4))
        loop.run(3)
        loop.step.program.wait_until_ready()
        loop.run(2 * INTERVAL)
    loop.keep()
    planned = [(r.step, r.kind, r.window_steps, r.reason) for r in loop.manager.reports]
    say("planned", planned)
    assert planned[-1][1] == "window", planned
    holds_nothing(loop)
    loop.manager.close()


def kinds(directory: Path) -> None:
    """Batches of three lengths, each a program of its own, of which all have agreed once."""
    asked: list[str] = []
    ask = processes.Processes.objection

    def counted(self: Any, name: str, *args: Any) -> Any:
        asked.append(name)
        return ask(self, name, *args)

    loop = Loop(directory / "run")
    loop.rows_of = lambda label: {0: 16, 3: 8}.get(label % INTERVAL, 24)
    here = jax.process_index()
    with replaced(processes.Processes, "objection", counted, only_on=here):
        loop.run(10 * INTERVAL)
    loop.keep()
    told = [(r.step, r.kind, r.window_steps) for r in loop.manager.reports]
    assert told[-5:] == [(n * INTERVAL, "window", WINDOW_STEPS) for n in range(6, 11)], told
    assert asked.count("program") == 3, asked
    holds_nothing(loop)
    loop.manager.close()


def reviewed(directory: Path) -> None:
    """A plan that was made anew is the first to arm the step, and one process cannot: none does."""
    here, rate = jax.process_index(), [1e12]
    with (
        replaced(clock.StepClock, "secs", property(lambda _: 10.0), only_on=here),
        replaced(type(meter.LINK), "bytes_per_sec", property(lambda _: rate[0]), only_on=here),
        replaced(budget, "device_headroom_bytes", lambda: 10220, only_on=here),
        replaced(units, "LARGE_BYTES", 0, only_on=here),
        replaced(ahead, "cpu_contracts", lambda: True),
    ):
        loop = Loop(directory / "run", window=gockpt.WindowOptions(max_steps=4))
        loop.run(INTERVAL)
        assert loop.session.window_steps == 1
        assert "snapshots only" not in loop.session.explain()
        rate[0] = 1e3
        loop.run(2 * INTERVAL)
    loop.keep()
    assert loop.report(2 * INTERVAL).kind == "snapshot", loop.manager.reports
    assert "contracts multiply-adds" in loop.session.explain()
    holds_nothing(loop)
    loop.manager.close()


def partly(directory: Path) -> None:
    """Windows carry what saves take, of which one process has not seen all."""
    here = jax.process_index()
    with (
        replaced(clock.StepClock, "secs", property(lambda _: 10.0), only_on=here),
        replaced(type(meter.LINK), "bytes_per_sec", property(lambda _: 1e3), only_on=here),
        replaced(budget, "device_headroom_bytes", lambda: 10220, only_on=here),
        replaced(units, "LARGE_BYTES", 0, only_on=here),
    ):
        loop = Loop(directory / "run", window=gockpt.WindowOptions(max_steps=4))

        def run(last: int, *parts: str) -> None:
            while loop.label <= last:
                loop.update()
                if loop.step.program is not None and loop.step.program.is_armed:
                    loop.step.program.wait_until_ready()
                state = {name: loop.state[name] for name in parts or loop.state}
                loop.save(args=gockpt.GoCkptSave(state))
            say("partly", loop.session.window_steps)

        run(INTERVAL, "params")
        loop.manager.wait_until_finished()
        with replaced(taken, "leaves_to_save", failing(ValueError("injected"))):
            run(2 * INTERVAL)
            assert f"process {FAULTY}: ValueError: injected" in failure_of(loop)
        run(5 * INTERVAL, "params")
        loop.manager.wait_until_finished()
        assert "no leaf that the last saves took" in loop.report(5 * INTERVAL).reason
        run(7 * INTERVAL)
        loop.manager.wait_until_finished()
    assert loop.report(7 * INTERVAL).kind == "window"
    for label in (0, *(n * INTERVAL for n in (1, 3, 4, 5))):
        loop.manager.delete(label)
        del loop.given[label]
    del loop.given[2 * INTERVAL]
    loop.keep()
    holds_nothing(loop)
    loop.manager.close()


# --- A process that fails ------------------------------------------------------------------------


def failures(directory: Path) -> None:
    """One process fails in or after a window: none saves, all say who and why, and go on."""
    loop = Loop(directory / "run")
    loop.run(INTERVAL)
    injected = RuntimeError("injected")

    def spoil(self: Any, *args: Any) -> Any:
        next(iter(self._leaves.values())).flat[0][0] += 1.0
        return finish(self, *args)

    finish = early.EarlyChunks.finish
    faults: list[tuple[str, Any, str, Any, int]] = [
        ("ReplayError", early.EarlyChunks, "land_block", failing(injected), 1),
        ("AuditError", early.EarlyChunks, "finish", spoil, 1),
        ("RuntimeError: injected", leaf_writer, "_check_data", failing(injected), 1),
        ("HostBudgetError", HostBudget, "admit_save",
         failing(gockpt.HostBudgetError("injected")), 1),
        ("RuntimeError: injected", array_handler, "collected_here", failing(injected), 1),
        ("RuntimeError: injected", state_handler.StateHandler, "finalize", failing(injected), 0),
    ]  # fmt: skip
    for n, (cause, owner, name, new, where) in enumerate(faults):
        label = (2 * n + 2) * INTERVAL
        with replaced(owner, name, new, only_on=where):
            loop.run(label)
            error = failure_of(loop)
        assert f"process {where}: {cause}" in error, error
        del loop.given[label]
        assert loop.manager.latest_step() == max(loop.given)
        loop.run(label + INTERVAL)
        loop.manager.wait_until_finished()
        assert loop.report(label + INTERVAL).kind == "window", loop.manager.reports
        assert loop.report(label).error is not None
    assert sorted(loop.manager.all_steps()) == sorted(loop.given)
    failed = {r.step for r in loop.manager.reports if r.error is not None}
    assert failed.isdisjoint(loop.given), loop.manager.reports
    again(loop)
    loop.keep()
    holds_nothing(loop)
    loop.manager.close()


def forced(directory: Path) -> None:
    """A window has failed on one process as all force a save before its end: that one is theirs.

    The failure costs nothing then: all of it is a snapshot, and nobody is told of an error.
    """
    loop = Loop(directory / "run", window=gockpt.WindowOptions(steps=4))
    loop.run(INTERVAL)
    is_faulty = jax.process_index() == FAULTY
    # The next step of a window notices what has failed; or the save, if that comes first.
    for last, early_by in ((2 * INTERVAL, 2), (3 * INTERVAL, 1)):
        loop.run(last - 3)
        with replaced(early.EarlyChunks, "land_block", failing(RuntimeError("injected"))):
            while loop.label <= last - early_by:
                loop.update()
                loop.session.resources.worker.wait_until_idle()
            window = loop.session._current.window
            assert (window.error is not None) == is_faulty
            assert (window.given_up is not None) == (is_faulty and early_by == 1)
            assert loop.save(force=True)
        loop.manager.wait_until_finished()
        report = loop.report(last - early_by)
        assert (report.kind, report.error) == ("snapshot", None), report
        why = "injected" if is_faulty else f"the save came {counted(early_by, 'step')} early"
        assert why in report.reason, report
        loop.run(last)
        loop.manager.wait_until_finished()
        found = loop.report(last)
        assert (found.kind, found.window_steps) == (("snapshot", 1), ("window", 2))[early_by - 1]
    loop.run(4 * INTERVAL)
    loop.keep()
    assert loop.report(4 * INTERVAL).kind == "window"
    holds_nothing(loop)
    loop.manager.close()


def refused(directory: Path) -> None:
    """What one process refuses to take fails on all, and then all look at their plans again."""
    loop = Loop(directory / "run", window=gockpt.WindowOptions(max_steps=4))
    loop.run(INTERVAL)
    loop.manager.wait_until_finished()
    refusing = failing(ValueError("injected"))
    with replaced(taken, "leaves_to_save", refusing):
        loop.run(2 * INTERVAL)
        assert f"process {FAULTY}: ValueError: injected" in failure_of(loop)
    del loop.given[2 * INTERVAL]
    loop.run(3 * INTERVAL)
    loop.keep()
    holds_nothing(loop)
    loop.manager.close()


def items(directory: Path) -> None:
    """A window fails on one process, and its save is of two items: all ask as often as the others.

    The first fails there at the seal, and the second finds no seal.
    """
    loop = Loop(directory / "run")

    def run(last: int) -> None:
        while loop.label <= last:
            loop.update()
            loop.session.resources.worker.wait_until_idle()
            parts = {name: gockpt.GoCkptSave(part) for name, part in loop.state.items()}
            loop.save(args=ocp.args.Composite(**parts))

    run(INTERVAL)
    loop.manager.wait_until_finished()
    with replaced(early.EarlyChunks, "land_block", failing(RuntimeError("injected"))):
        run(2 * INTERVAL)
        assert f"process {FAULTY}: ReplayError" in failure_of(loop)
    run(4 * INTERVAL)
    loop.manager.wait_until_finished()
    told = {r.step: (r.kind, r.error is None) for r in loop.manager.reports}
    assert told[3 * INTERVAL] == told[4 * INTERVAL] == ("window", True), told
    assert sorted(loop.manager.all_steps()) == [n * INTERVAL for n in (0, 1, 3, 4)]
    found = loop.manager.restore(4 * INTERVAL, args=ocp.args.Composite(
        **{name: gockpt.GoCkptRestore(abstract(part)) for name, part in loop.state.items()}
    ))  # fmt: skip
    given = shards_of({name: found[name] for name in loop.state})
    for where, shard in loop.given[4 * INTERVAL].items():
        np.testing.assert_array_equal(given[where], shard)
    holds_nothing(loop)
    loop.manager.close()


def full(directory: Path) -> None:
    """A device of one process has no room for a save's copies: all plan the next for what it has.

    The save itself fails: what is copied is a program of all processes.
    """
    here, take, stage = jax.process_index(), late.take_late, block.stage_and_pull
    taken_bytes: list[int] = []  # by copies at the save step; of the first, the whole state

    def taking(*args: Any) -> Any:
        with replaced(block, "stage_and_pull", staging, only_on=here):
            return take(*args)

    def staging(copies: Any, arrays: Any) -> Any:
        taken_bytes.append(copies.staged_bytes)
        if is_full and copies.staged_bytes > taken_bytes[0] // 6:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: injected")
        return stage(copies, arrays)

    for steps in (None, WINDOW_STEPS):
        # What is in flight had room: here nothing is, nor a sample of the audit's.
        window = gockpt.WindowOptions(steps=steps, audit=None)
        loop = Loop(directory / str(steps), window=window)
        is_full = False
        taken_bytes.clear()
        with (
            replaced(late, "take_late", taking, only_on=here),
            replaced(chunks, "MIN_CHUNK_BYTES", 256, only_on=here),
        ):
            loop.run(INTERVAL)
            loop.manager.wait_until_finished()
            is_full = here == FAULTY
            loop.run(2 * INTERVAL - 1)
            loop.update()
            loop.session.resources.worker.wait_until_idle()
            loop.save()
            assert f"process {FAULTY}: DeviceMemoryError: save" in failure_of(loop)
            del loop.given[2 * INTERVAL]
            loop.run(4 * INTERVAL)
            loop.keep()
        device = loop.session.resources.device
        saved = [r.reason for r in loop.manager.reports if r.error is None]
        say("room", steps, device.limit_bytes, saved)
        holds_nothing(loop)
        loop.manager.close()


def unlike(directory: Path) -> None:
    """Options that differ are told of at once: such processes waited for each other in vain."""
    here = jax.process_index()
    differ: dict[str, tuple[Any, Any]] = {
        "steps": (3, 2), "arm": ("window", "always"), "device_budget_bytes": (None, 10**9),
        "on_busy": ("wait", "skip"), "audit": (gockpt.Audit(max_ulps=1), gockpt.Audit()),
    }  # fmt: skip
    for name, values in differ.items():
        loop = Loop(directory / name, window=gockpt.WindowOptions(**{name: values[here]}))
        for call in (functools.partial(loop.run, 2), functools.partial(loop.save, force=True)):
            with pytest.raises(gockpt.ProcessError, match="`WindowOptions` differ") as caught:
                call()
            shown = ("False", "True") if name == "audit" else values
            for index, value in enumerate(shown):
                assert f"{value} on process {index}" in str(caught.value)
        assert not loop.manager.all_steps()
        loop.manager.close()
    budget_bytes = 10**9 * (1 + here)
    loop = Loop(directory / "alike", window=gockpt.WindowOptions(host_budget_bytes=budget_bytes))
    loop.run(INTERVAL + 1)
    loop.keep()
    holds_nothing(loop)
    loop.manager.close()


def apart(directory: Path) -> None:
    """Processes that save different labels, or of which one cannot read, are all told at once."""
    here = jax.process_index()
    loop = Loop(directory / "run")
    loop.run(INTERVAL)
    with pytest.raises(gockpt.ProcessError) as caught:
        loop.manager.save(90 + here, args=gockpt.GoCkptSave(loop.state), force=True)
    assert "different labels: 90 on process 0, 91 on process 1" in str(caught.value)
    with (
        replaced(loop.session, "version", loop.session.version - 1),  # as a label that was left out
        pytest.raises(gockpt.ProcessError, match="5 by process 0, 4 by process 1"),
    ):
        loop.manager.save(90, args=gockpt.GoCkptSave(loop.state), force=True)
    loop.run(2 * INTERVAL)
    loop.keep()
    assert sorted(loop.manager.all_steps()) == [0, INTERVAL, 2 * INTERVAL]
    assert loop.report(2 * INTERVAL).kind == "window"
    args = gockpt.GoCkptRestore(abstract(loop.state))
    error = OSError if here == FAULTY else gockpt.ProcessError
    with (
        replaced(restore, "known_arrays", failing(OSError("injected"))),
        pytest.raises(error, match="injected"),
    ):
        loop.manager.restore(INTERVAL, args=args)
    with pytest.raises(gockpt.ProcessError, match="step 4 on process 0, step 8 on process 1"):
        loop.manager.restore(INTERVAL * (1 + here), args=args)
    error = gockpt.NoCheckpointError if here == FAULTY else gockpt.ProcessError
    with pytest.raises(error, match="no step `5`"):
        loop.manager.restore(INTERVAL + here, args=args)
    found = shards_of(loop.manager.restore(INTERVAL, args=args))
    for where, shard in loop.given[INTERVAL].items():
        np.testing.assert_array_equal(found[where], shard)
    holds_nothing(loop)
    loop.manager.close()


def beside(directory: Path) -> None:
    """An item that is not ours cannot be read on one process: all hear of it, and may go on.

    Where no item was named the others waited for that one in vain.
    """
    loop = Loop(directory / "run", "fsdp_tensor")  # replicas of some leaves are on both
    loop.run(0)
    loop.keep()
    loop.update()
    names = ("data", "zeal")  # read before the state, and behind it
    others = {name: ocp.args.JsonSave({"name": name}) for name in names}
    state = gockpt.GoCkptSave(loop.state)
    assert loop.manager.save(1, args=ocp.args.Composite(state=state, **others), force=True)
    loop.manager.wait_until_finished()
    read = ocp.JsonCheckpointHandler.restore
    wanted = {name: ocp.args.JsonRestore() for name in names}
    error = OSError if jax.process_index() == FAULTY else gockpt.ProcessError
    cases = (
        ("data", "reads"),
        ("data", "checks"),
        ("data", "sends"),
        ("zeal", "checks"),
        ("zeal", "reads none of ours"),
        ("data", "names nothing"),
        ("zeal", "names nothing"),
    )
    for name, what in cases:

        def reading(self: Any, item: Any, *args: Any, name: str = name, **kwargs: Any) -> Any:
            if item.name == name:
                raise OSError("injected")
            return read(self, item, *args, **kwargs)

        target = gockpt.GoCkptRestore(
            abstract(loop.state), verify=what == "checks", single_replica=what == "sends"
        )
        is_alone = what == "reads none of ours"
        items = ocp.args.Composite(**(wanted if is_alone else wanted | {"state": target}))
        asked = {} if what == "names nothing" else {"args": items}
        with (
            replaced(ocp.JsonCheckpointHandler, "restore", reading),
            pytest.raises(error, match="injected"),
        ):
            loop.manager.restore(1, **asked)
        found = loop.manager.restore(1, **asked)
        assert found["data"] == {"name": "data"}
        given, is_like_it = shards_of(loop.state), "args" in asked and not is_alone
        for where, shard in shards_of(found["state"] if is_like_it else {}).items():
            np.testing.assert_array_equal(shard, given[where])
    loop.manager.delete(1)
    holds_nothing(loop)
    loop.manager.close()


def again(loop: Loop) -> None:
    """A save that has failed is tried again under its label, fails once more, and is made."""
    with replaced(leaf_writer, "_check_data", failing(RuntimeError("injected"))):
        loop.run(INTERVAL * (1 + max(loop.given) // INTERVAL))
        assert f"process {FAULTY}: RuntimeError: injected" in failure_of(loop)
        assert loop.save(force=True)
        assert f"process {FAULTY}: RuntimeError: injected" in failure_of(loop)
    assert loop.save(force=True)
    loop.manager.wait_until_finished()
    assert loop.manager.latest_step() == max(loop.given)


def failure_of(loop: Loop) -> str:
    """What the save under way ends with; the next accepted `save` would raise the same."""
    with pytest.raises(gockpt.ProcessError) as caught:
        loop.manager.wait_until_finished()
    say("failure", str(caught.value))
    return str(caught.value)


def others(directory: Path) -> None:
    """Saves that start windows, stock managers, saves that wait, leaves on some devices only."""
    started(directory / "started")
    stock(directory / "stock")
    stock(directory / "elsewhere", primary_host=1)
    waiting(directory / "waiting")
    busy(directory / "busy")
    positions(directory / "positions")


def started(directory: Path, *, asks: bool = False) -> None:
    """A policy that says yes by load defers its saves to the same labels everywhere."""
    policies = ocp.checkpoint_managers
    loop = Loop(directory, save_decision_policy=policies.ContinuousCheckpointingPolicy())
    kinds = run(loop, 24, asks=asks, waits_every=6)  # else one save may outlast the loop
    say("labels", sorted(loop.given), kinds)
    assert "window" in kinds.values()
    loop.keep()
    holds_nothing(loop)
    loop.manager.close()


def run(loop: Loop, last: int, *, asks: bool = True, waits_every: int = 99) -> dict[int, str]:
    """Updates, and saves where the manager says so, asked before or in `save`; the kinds so far."""
    while loop.label <= last:
        loop.update()
        if not asks or loop.manager.should_save(loop.label - 1):
            assert loop.save() or not asks
        if loop.label % waits_every == 0:
            loop.manager.wait_until_finished()
    loop.manager.wait_until_finished()
    return {r.step: r.kind for r in loop.manager.reports}


class Told(ocp.checkpoint_managers.ContinuousCheckpointingPolicy):
    """A policy by load that says yes from given labels on, until one is saved; it asks nobody."""

    def __init__(self, labels: list[int]) -> None:
        super().__init__()
        self._labels = labels

    def should_save(self, step: Any, previous_steps: Any, **_: Any) -> bool:
        """Whether there is a label since the last save."""
        saved = previous_steps[-1].step if previous_steps else -1
        return any(saved < label <= step.step for label in self._labels)


def asked(directory: Path) -> None:
    """A loop that asks first: the policy's yes starts a window, everywhere or nowhere."""
    started(directory / "load", asks=True)
    loop = Loop(directory / "told", save_decision_policy=Told([0, 1, 2, 5, 12, 15, 19]))
    armed, call = [], StepProgram.call

    def counted(self: Any, *args: Any) -> Any:
        armed.append(loop.label)
        return call(self, *args)

    with replaced(StepProgram, "call", counted, only_on=jax.process_index()):
        kinds = {0: "snapshot", 1: "snapshot", 4: "window", 7: "window", 14: "window"}
        assert run(loop, 14) == kinds
        # One process does not know when it will ask again: all save at once.
        with replaced(SavePredictor, "updates_between_calls", None):
            assert run(loop, 16) == (kinds := kinds | {15: "snapshot"})
        assert run(loop, 22) == kinds | {21: "window"}
    assert armed == [3, 4, 6, 7, 13, 14, 20, 21]  # none for the period that saves seemed to have
    loop.keep()
    holds_nothing(loop)
    loop.manager.close()
    by_label(directory / "labels")


def by_label(directory: Path) -> None:
    """A rule of labels, asked at each: all say at a save that they have, and foresee the next."""
    loop = Loop(directory, should_save_fn=lambda label, _: label in (0, 5, 9, 16, 20, 26))
    kinds = {0: "snapshot", 5: "snapshot", 9: "window", 16: "window"}
    assert run(loop, 16) == kinds
    while loop.label < 20:
        loop.update()
        # One asks for another label too, and all know at the save only that they disagree.
        assert not loop.manager.should_save(loop.label - 1)
        if jax.process_index() == FAULTY:
            loop.manager.should_save(99)
    loop.update()
    assert loop.save()
    assert run(loop, 26) == kinds | {20: "window", 26: "snapshot"}
    loop.keep()
    holds_nothing(loop)
    loop.manager.close()


def expected(directory: Path) -> None:
    """A save that all processes expect has a window; one that they do not agree on has none."""
    loop = Loop(directory / "run", save_interval_steps=100)
    is_faulty = jax.process_index() == FAULTY
    for label, in_steps in ((4, 3), (9, 3 + is_faulty), (14, 3)):
        loop.run(label - 3)
        loop.manager.expect_save(in_steps=in_steps)
        loop.run(label - 1)
        loop.update()
        assert loop.save(force=True)
    loop.keep()
    kinds = {r.step: r.kind for r in loop.manager.reports}
    assert kinds == {0: "snapshot", 4: "window", 9: "snapshot", 14: "window"}
    holds_nothing(loop)
    loop.manager.close()
    expected_later(directory / "later")


def expected_later(directory: Path) -> None:
    """What is expected behind them hides none of the policy's saves, all of which are called at."""
    loop = Loop(directory)
    loop.run(6)
    loop.manager.expect_save(in_steps=9)
    loop.run(14)
    loop.update()
    assert loop.save(force=True)
    loop.keep()
    kinds = {r.step: r.kind for r in loop.manager.reports}
    assert kinds == {0: "snapshot", **dict.fromkeys((4, 8, 12, 15), "window")}
    holds_nothing(loop)
    loop.manager.close()


def alone(directory: Path) -> None:
    """Where one process asks or expects alone, it opens no window alone, and nobody hangs."""

    def alone(call: Callable[[], Any]) -> None:
        loop.update()
        if (other := 1 - FAULTY) == jax.process_index():
            with (
                replaced(processes, "PATIENCE_SECS", 1.0, only_on=other),
                pytest.raises(gockpt.ProcessError, match=f"process {FAULTY} did not come"),
            ):
                call()

    if jax.process_index() == 0:  # it only looks, and asks nothing of the others
        read_only = ocp.CheckpointManagerOptions(read_only=True, save_root_metadata=False)
        with gockpt.GoCkptManager(directory.parent, options=read_only) as looks:
            assert looks.latest_step() is None
        ocp.Checkpointer(gockpt.GoCkptHandler()).close()
    loop = Loop(directory / "run", save_decision_policy=Told([0, 1]))
    assert run(loop, 0) == {0: "snapshot"}
    alone(lambda: loop.manager.should_save(1))
    alone(lambda: loop.manager.expect_save(in_steps=2))
    loop.update()
    assert loop.manager.window_status == "idle"
    assert loop.save(force=True)
    loop.keep()
    assert {r.step: r.kind for r in loop.manager.reports} == {0: "snapshot", 3: "snapshot"}
    holds_nothing(loop)
    loop.manager.close()


def stock(directory: Path, primary_host: int = 0) -> None:
    """With a stock manager the item itself takes the vote; the primary host alone finalizes."""
    if jax.process_index() == 0:
        directory.mkdir()
    active = set(range(jax.process_count()))
    together = ocp.options.MultiprocessingOptions(
        primary_host, active_processes=active, barrier_sync_key_prefix=directory.name
    )
    handler_ = gockpt.GoCkptHandler(
        window=gockpt.WindowOptions(steps=3), multiprocessing_options=together
    )
    loop = Loop(directory, handler=handler_, multiprocessing_options=together, create=False)
    loop.run(INTERVAL)
    loop.manager.wait_until_finished()
    with replaced(leaf_writer, "_check_data", failing(RuntimeError("injected"))):
        loop.run(2 * INTERVAL)
        error = failure_of(loop)
    assert f"process {FAULTY}: RuntimeError: injected" in error
    del loop.given[2 * INTERVAL]
    loop.manager.reload()
    loop.run(3 * INTERVAL)
    loop.keep()
    assert loop.report(3 * INTERVAL).kind == "window"
    assert [r.step for r in loop.face.reports if r.error is None] == [0, INTERVAL, 3 * INTERVAL]
    holds_nothing(loop)
    loop.manager.close()


def waiting(directory: Path) -> None:
    """Without asynchronous checkpointing `save` itself raises, everywhere."""
    loop = Loop(directory, enable_async_checkpointing=False)
    loop.run(2 * INTERVAL - 1)
    with (
        replaced(leaf_writer, "_check_data", failing(RuntimeError("injected"))),
        pytest.raises(gockpt.ProcessError, match=f"process {FAULTY}: RuntimeError: injected"),
    ):
        loop.run(2 * INTERVAL)
    loop.run(3 * INTERVAL)
    loop.keep()
    holds_nothing(loop)
    loop.manager.close()


def busy(directory: Path) -> None:
    """A save that finds one process still writing is skipped by all."""
    loop = Loop(directory, window=gockpt.WindowOptions(steps=3, on_busy="skip"))
    loop.run(INTERVAL - 1)
    loop.manager.wait_until_finished()
    go_on, result = threading.Event(), pull.Pull.result

    def late(self: Any) -> Any:
        go_on.wait()
        return result(self)

    with replaced(pull.Pull, "result", late):
        loop.run(2 * INTERVAL)
        go_on.set()
        loop.manager.wait_until_finished()
    loop.run(3 * INTERVAL)
    loop.keep()
    kinds = {report.step: report.kind for report in loop.manager.reports}
    assert kinds == {0: "snapshot", 4: "window", 8: "skipped", 12: "window"}
    holds_nothing(loop)
    loop.manager.close()


# --- A process that is gone ----------------------------------------------------------------------


def death(directory: Path) -> None:
    """A process dies while it writes: the other ends, in time, with an error that names it."""
    window = gockpt.WindowOptions(steps=WINDOW_STEPS, on_busy="newest")
    in_time = ocp.options.AsyncOptions(timeout_secs=20)
    loop = Loop(directory / "run", window=window, async_options=in_time)
    loop.run(INTERVAL)
    loop.keep()
    returned = threading.Event()

    def die(*_: Any) -> None:
        returned.wait()  # before, the other may still wait for this process inside `save`
        os.kill(os.getpid(), signal.SIGKILL)

    with replaced(leaf_writer, "_check_data", die):
        loop.run(3 * INTERVAL)  # that one waits
        jax.block_until_ready(loop.state)
        loop.session.processes.barrier("waits")
        returned.set()
        failure_of(loop)
    for label in (2 * INTERVAL, 3 * INTERVAL):  # the latter is not tried
        assert "process 1 did not come" in str(loop.report(label).error), loop.manager.reports
    say("steps", loop.manager.all_steps())
    holds_nothing(loop)
    loop.manager.close()
    print("done death", flush=True)
    os._exit(0)  # `jax.distributed` would wait for the dead one


def positions(directory: Path) -> None:
    """Of a data iterator each process writes its own file, and `verify` knows all of them."""
    loop = Loop(directory, save_interval_steps=1)
    for label in range(2):
        loop.update()
        items = {
            "state": gockpt.GoCkptSave(loop.state),
            "data": Position({"next": 10 * label + jax.process_index()}),
        }
        assert loop.manager.save(label, args=ocp.args.Composite(**items))
    loop.manager.wait_until_finished()
    files = sorted(file.name for file in (directory / "1" / "data").glob("process_*"))
    count = jax.process_count()
    assert files == [f"process_{n}-of-{count}.json" for n in range(count)]
    assert {(found.state, *found.notes) for found in verify(directory)} == {("whole",)}
    holds_nothing(loop)
    loop.manager.close()
