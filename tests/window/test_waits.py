"""What the trainer waits for: room in the device budget, and nothing else.

Some tests hold something back until the trainer has come to the end of a window. Were it to wait
for that, nobody would let it go on, and the test would fail when its patience ends.
"""

from __future__ import annotations

import collections
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from alone import FIRST_ALONE

from gockpt_jax import GoCkptManager, GoCkptSave, WindowOptions
from gockpt_jax.compiling import Programs
from gockpt_jax.replay.engine import Replayer
from gockpt_jax.replay.programs import ReplayProgram
from gockpt_jax.telemetry.save_record import SaveRecord
from gockpt_jax.transfer import block, sample
from gockpt_jax.transfer.block import Block
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.window import early, late, units
from gockpt_jax.window.device_budget import DeviceBudget
from gockpt_jax.window.early import EarlyChunks
from gockpt_jax.window.late import take_late
from gockpt_jax.window.processes import Processes
from gockpt_jax.window.resources import Resources

PATIENCE_SECS = 200  # only ends a test that hangs
SIZE = 512
LEAF = SIZE * 4
LEAVES = 12


@pytest.fixture(autouse=True)
def small_scale(monkeypatch):
    """Sizes at which leaves are cut into rows."""
    monkeypatch.setattr(units, "MIN_CHUNK_BYTES", 256)
    monkeypatch.setattr(late, "MIN_CHUNK_BYTES", 256)
    monkeypatch.setattr(block, "_made", functools.cache(block.Block))


def update(state):
    """Momentum of twelve leaves, and eight large ones that are late: a sine is not replayed."""
    g = {k: jnp.sin(3 * w) for k, w in state["w"].items()}
    m = {k: 0.75 * m + g[k] for k, m in state["m"].items()}
    late = [jnp.sin(x) for x in state["late"]]
    return {"late": late, "m": m, "w": {k: w - 0.125 * m[k] for k, w in state["w"].items()}}


def update_by_a_clock(state):
    """The same with a captured scalar: a sine is not replayed."""
    n = state.pop("n")
    new = update(state)
    decay = 0.25 * jnp.sin(n)
    return new | {"m": {k: decay * m + new["m"][k] for k, m in state["m"].items()}, "n": n + 1}


def fresh():
    rng = np.random.default_rng(1)
    w = {f"{n:02}": jnp.asarray(rng.standard_normal(SIZE), jnp.float32) for n in range(LEAVES)}
    late = [jnp.asarray(rng.standard_normal(10 * SIZE), jnp.float32) for _ in range(8)]
    return {"late": late, "m": jax.tree.map(jnp.zeros_like, w), "w": w}


class Loop:
    """A loop that saves every eighth step, in windows of a fixed K."""

    def __init__(self, directory, steps, step=update, **window):
        options = ocp.CheckpointManagerOptions(save_interval_steps=8)
        window = WindowOptions(steps=steps, **window)
        self.manager = GoCkptManager(directory, options=options, window=window)
        self.session = self.manager._gockpt_session
        self.step = self.manager.wrap(jax.jit(step, donate_argnums=0))
        self.state, self.label = fresh(), 0

    def train(self, last):
        while self.label <= last:
            self.state = self.step(self.state)
            self.manager.save(self.label, args=GoCkptSave(self.state))
            self.label += 1

    def run_a_window(self):
        """Up to the next save; what was done before is over by the time it opens."""
        self.train(1)
        self.manager.wait_until_finished()
        self.session.resources.worker.wait_until_idle()
        self.train(8)

    def assert_saved(self, steps):
        wanted, label = jax.tree.map(np.array, self.state), self.label - 1
        self.manager.wait_until_finished()
        report = self.manager.last_report
        assert (report.step, report.kind, report.window_steps) == (label, "window", steps)
        jax.tree.map(np.testing.assert_array_equal, self.manager.restore(label), wanted)
        self.session.resources.worker.wait_until_idle()
        self.session.resources.watcher.wait_until_idle()
        assert (
            self.session.resources.device.used_bytes,
            self.session.host.used_bytes,
        ) == (0, 0)


class Held:
    """Whoever calls a method waits until it may go on."""

    def __init__(self, monkeypatch, owner, name):
        self._may_go, method = threading.Event(), getattr(owner, name)

        def held(*args, **kwargs):
            assert self._may_go.wait(PATIENCE_SECS), "nobody let it go on"
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, held)

    def let_go(self):
        self._may_go.set()


BUDGET = 32 * LEAF
"""A block of 8 leaves beside what a step retains, 12, and copies of it; and no more of the late
leaves, 80, than this."""


def test_nothing_waits_for_replay(tmp_path, monkeypatch):
    """What lands behind it gives device memory back: blocks, cuts, and the late leaves."""
    loop = Loop(tmp_path, 4, device_budget_bytes=BUDGET)
    with loop.manager:
        loop.train(0)
        held = Held(monkeypatch, Replayer, "apply")
        loop.run_a_window()
        has_landed, drained = threading.Event(), SaveRecord.drained
        loop.session.resources.worker.submit(has_landed.set)
        assert has_landed.wait(PATIENCE_SECS)
        drained_again = []
        monkeypatch.setattr(SaveRecord, "drained", lambda r: (drained_again.append(r), drained(r)))
        held.let_go()
        loop.assert_saved(4)
        assert drained_again  # it is not drained before its early leaves are final
        report = loop.manager.last_report
        assert BUDGET // 2 < report.peak_device_bytes <= BUDGET
        assert report.gradient_bytes == (4 + 8 + 12) * LEAF


def test_nor_does_a_step_for_which_a_device_has_no_room(tmp_path, monkeypatch):
    """It waits for what is on its way to the host, of this save and of those before."""
    loop = Loop(tmp_path, 4)
    with loop.manager:
        loop.train(0)
        held = Held(monkeypatch, Replayer, "apply")
        loop.run_a_window()
        worker, is_awaited, landed = loop.session.resources.worker, threading.Event(), []
        worker.submit(lambda: landed.append(is_awaited.wait(PATIENCE_SECS)))
        wait = worker.wait_until_idle
        try:
            with monkeypatch.context() as patch:
                patch.setattr(
                    worker, "wait_until_idle", lambda **how: (is_awaited.set(), wait(**how))
                )
                patch.setattr(worker._behind, "wait_until_idle", lambda: pytest.fail("of replay"))
                loop.session.no_room(MemoryError("injected"))
            assert landed == [True]
            assert loop.session.resources.device.used_bytes == 0
        finally:  # the end of the manager waits for both
            is_awaited.set()
            held.let_go()
        loop.assert_saved(4)


def test_landing_waits_for_replay_where_the_host_has_no_room(tmp_path, monkeypatch):
    """Of what follows seven steps, 48 leaves, two of the largest may wait."""
    state, follows = (24 + 80) * LEAF, 12 * LEAF
    rooms, is_awaited = [], threading.Event()

    class Room(ByteBudget):
        def __init__(self, limit_bytes):
            super().__init__(limit_bytes)
            rooms.append(self)

        def acquire(self, num_bytes, loan=None):
            if not self._fits(num_bytes):
                is_awaited.set()
            super().acquire(num_bytes, loan)

    loop = Loop(tmp_path, 8, host_budget_bytes=state + 2 * follows)
    with loop.manager:
        loop.train(0)
        monkeypatch.setattr(early, "ByteBudget", Room)
        held = Held(monkeypatch, Replayer, "apply")
        loop.run_a_window()
        assert is_awaited.wait(PATIENCE_SECS)
        (room,) = rooms
        assert room.limit_bytes == 2 * follows
        assert room.used_bytes <= 2 * follows
        held.let_go()
        loop.assert_saved(8)
        assert (room.used_bytes, room.peak_bytes <= 2 * follows) == (0, True)


def test_no_number_of_blocks_is_waited_for(tmp_path, monkeypatch):
    """Bytes are what is bounded, by the device budget; here there is none."""
    loop = Loop(tmp_path, 5)
    with loop.manager:
        loop.train(0)
        held = Held(monkeypatch, EarlyChunks, "land_block")
        loop.run_a_window()
        assert loop.session.resources.device.used_bytes > 24 * LEAF
        held.let_go()
        loop.assert_saved(5)


class Link:
    """Lands what is on its way only when somebody waits for room; one after another."""

    def __init__(self):
        self._tasks = collections.deque()
        self.landed_bytes = 0

    def submit(self, task, failed=None):
        self._tasks.append(task)

    def land_one(self, device):
        before = device.used_bytes
        self._tasks.popleft()()
        self.landed_bytes += before - device.used_bytes

    def land_all(self, device):
        while self._tasks:
            self.land_one(device)


class Device(DeviceBudget):
    def __init__(self, limit_bytes, link):
        super().__init__(limit_bytes, Processes())
        self._link = link

    def acquire(self, num_bytes, loan=None):
        while not self._fits(num_bytes):
            self._link.land_one(self)
        super().acquire(num_bytes, loan)


@pytest.mark.parametrize(
    ("leaves", "percent"),
    [((9,) * 11, 200), ((60, 40), 99), ((1,) * 99, 90), ((3, 1) * 25, 50), ((100,), 30)],
)
def test_late_leaves_wait_until_what_exceeds_the_budget_has_gone(leaves, percent):
    """As the cost model has it: not until all of what was staged before has gone."""
    unit = 1024
    arrays = [jnp.arange(n * unit // 4, dtype=jnp.int32) for n in leaves]
    total = sum(a.nbytes for a in arrays)
    limit = total * percent // 100
    link = Link()
    device = Device(limit, link)
    slots = take_late(arrays, Resources(link, link, device, ByteBudget(None), FIRST_ALONE))
    largest = max(n for n in (*leaves, 0) if n * unit <= limit // 2) * unit
    # Blocks are filled as far as leaves allow, and the part that makes room may be one, too.
    part = total // 16 + largest if limit < total else 0
    assert link.landed_bytes <= max(0, total - limit) + part
    assert device.peak_bytes <= limit
    link.land_all(device)
    for array in arrays:
        (slot,) = slots[id(array)]
        np.testing.assert_array_equal(slot.data.result(), array)


def split_over(mesh, x):
    spec = jax.sharding.PartitionSpec(*mesh.axis_names[: x.ndim])
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))


def compiled_and_staged(monkeypatch):
    ahead, staged = [], []
    compile_ahead, stage = Block.compile_ahead, Block.stage

    def noting(self):
        ahead.append(self)
        compile_ahead(self)

    def noting_too(self, arrays):
        staged.append(self)
        return stage(self, arrays)

    monkeypatch.setattr(Block, "compile_ahead", noting)
    monkeypatch.setattr(Block, "stage", noting_too)
    return ahead, staged


@pytest.mark.parametrize(
    ("steps", "budget", "devices"),
    [(1, None, 1), (1, BUDGET, 1), (4, None, 1), (4, BUDGET, 1), (4, None, 8)],
)
def test_nobody_waits_for_a_copy_program_to_be_compiled(
    tmp_path, monkeypatch, steps, budget, devices
):
    """All but the first save's, before which no step is known."""
    ahead, staged = compiled_and_staged(monkeypatch)
    loop = Loop(tmp_path, steps, update_by_a_clock, device_budget_bytes=budget, audit=None)
    loop.state["n"] = jnp.float32(0)
    if devices > 1:
        mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        loop.state = jax.tree.map(lambda x: split_over(mesh, x), loop.state)
    with loop.manager:
        loop.train(0)
        staged.clear()
        loop.run_a_window()
        assert any(c.everywhere for b in staged for c in b.chunks) == (steps > 1)
        assert {id(b) for b in staged} <= {id(b) for b in ahead}
        assert staged


SAID = {"device_budget_bytes": 36 * LEAF, "step_secs": 0.5, "link_bytes_per_sec": 10.4 * LEAF}
"""Then some of the leaves leave early in part: in five steps others than in three or two."""


def test_nor_for_one_that_stages_the_rows_which_stayed(tmp_path, monkeypatch):
    at_seal, stage = [], late.stage_and_pull
    ahead, staged = compiled_and_staged(monkeypatch)
    loop = Loop(tmp_path, None, update_by_a_clock, audit=None, **SAID)
    loop.state["n"] = jnp.float32(0)
    with loop.manager:
        loop.train(2)
        loop.manager.wait_until_finished()
        loop.step.program.wait_until_ready()
        in_time = {id(b) for b in ahead}
        staged.clear()
        monkeypatch.setattr(
            late, "stage_and_pull", lambda b, a: (at_seal.append(b), stage(b, a))[1]
        )
        loop.train(8)
        assert any(not chunk.is_whole for b in at_seal for chunk in b.chunks)
        assert {id(b) for b in staged} <= in_time
        loop.assert_saved(5)


@pytest.mark.parametrize("steps", [3, 2])
@pytest.mark.parametrize(("planned", "said"), [(5, {}), (None, SAID)])
def test_a_shorter_window_waits_for_what_it_stages_first_alone(
    tmp_path, monkeypatch, planned, said, steps
):
    """Its blocks are others than those that were planned: all are asked for when it opens."""
    programs = Programs("gockpt-compile-samples", sample._compile)
    monkeypatch.setattr(sample, "_programs", programs)
    ahead, staged = compiled_and_staged(monkeypatch)
    loop = Loop(tmp_path, planned, update_by_a_clock, **said)
    loop.state["n"] = jnp.float32(0)
    with loop.manager:
        loop.train(2)
        loop.manager.wait_until_finished()
        before = {id(b) for b in ahead}
        loop.step.program.wait_until_ready()
        staged.clear()
        loop.manager.expect_save(in_steps=steps - 1)
        loop.state = loop.step(loop.state)
        in_time, samples = {id(b) for b in ahead}, set(programs._found)
        for _ in range(steps - 2):
            loop.state = loop.step(loop.state)
        loop.manager.save(2 + steps, args=GoCkptSave(loop.state), force=True)
        assert not {id(b) for b in staged} <= before
        assert {id(b) for b in staged} <= in_time
        loop.manager.wait_until_finished()
        assert set(programs._found) == samples
        report = loop.manager.last_report
        assert (report.window_steps, report.audit.chunks > 0) == (steps, True)


def test_nobody_waits_for_a_replay_program_to_be_compiled(tmp_path, monkeypatch):
    ahead, used = set(), set()
    compile_ahead, compiled = ReplayProgram.compile_ahead, ReplayProgram.compiled
    monkeypatch.setattr(
        ReplayProgram, "compile_ahead", lambda p: (ahead.add(p), compile_ahead(p))[1]
    )
    monkeypatch.setattr(ReplayProgram, "compiled", lambda p: (used.add(p), compiled(p))[1])
    loop = Loop(tmp_path, 4, device_budget_bytes=BUDGET, audit=None)
    with loop.manager:
        loop.run_a_window()
        loop.assert_saved(4)
    assert used
    assert used <= ahead


def test_nobody_waits_for_a_program_of_the_audit_to_be_compiled(tmp_path, monkeypatch):
    programs = Programs("gockpt-compile-samples", sample._compile)
    monkeypatch.setattr(sample, "_programs", programs)
    loop = Loop(tmp_path, 4, device_budget_bytes=BUDGET)
    with loop.manager:
        loop.train(7)
        before = set(programs._found)
        loop.train(8)
        loop.assert_saved(4)
        assert loop.manager.last_report.audit.chunks > 0
    assert set(programs._found) == before


@pytest.mark.parametrize("budget", [None, BUDGET])
def test_the_first_save_stages_by_programs_that_were_compiled_beside_the_step(
    tmp_path, monkeypatch, budget
):
    """Nobody has planned yet; but the state that goes into the first step tells what comes out."""
    ahead, staged = compiled_and_staged(monkeypatch)
    loop = Loop(tmp_path, 4, device_budget_bytes=budget, audit=None)
    with loop.manager:
        jitted = loop.step.step
        monkeypatch.setattr(
            loop.step, "step", lambda state: (noted.append(ahead[:]), jitted(state))[1]
        )
        noted = []
        loop.train(0)
        assert (len(staged) > 1) == (budget is not None)
        assert {id(b) for b in staged} <= {id(b) for b in noted[0]}
