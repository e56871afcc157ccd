"""Plans are made anew between windows when time or rate move; only blocks do."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec
from window.training_loop import BATCH, Options, assert_restores, assert_same, to_host

from gockpt_jax import GoCkptManager, GoCkptSave, WindowOptions
from gockpt_jax.transfer.probe import probe
from gockpt_jax.window import clock as clock_module
from gockpt_jax.window import host_budget, units
from gockpt_jax.window import known as known_module
from gockpt_jax.window import planned as planned_module
from gockpt_jax.window import ran as ran_module
from gockpt_jax.window.ahead import Ahead
from gockpt_jax.window.facts import Facts, SavedBytes
from gockpt_jax.window.host_budget import HostBudget
from gockpt_jax.window.processes import Processes

SIZE = 64
LEAF = SIZE * 4


@jax.jit
def update(state, x):
    """Adam's two moments of eight leaves, and what they do to them."""

    grads = jax.tree.map(lambda w: jnp.sin(w + x), state["w"])
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
    v = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * (g * g), state["v"], grads)
    w = jax.tree.map(lambda w, m, v: w - 0.01 * m / (jnp.sqrt(v) + 1e-8), state["w"], m, v)
    return {"m": m, "v": v, "w": w}


def fresh():
    def leaves(value):
        return {str(i): jnp.full(SIZE, value) for i in range(8)}

    return {"m": leaves(0.0), "v": leaves(0.0), "w": leaves(0.5)}


def run(
    tmp_path, facts, monkeypatch, *, interval=10, leaves=20, at=lambda label: None, **options
):  # fmt: skip
    """Saves every so many steps, each at other measured facts; tells of each label."""
    # As in large models: small arrays are copied before they travel, and here all are small.
    monkeypatch.setattr(units, "LARGE_BYTES", 0)
    now = iter(facts)
    current = [next(now)]
    monkeypatch.setattr(known_module, "measured_facts", lambda clock: current[0])
    # Of 24 leaves; a step retains 8, beside what follows the one before it and a block.
    window = WindowOptions(device_budget_bytes=leaves * LEAF, **options)
    executables, saved = set(), {}
    saves = Options(save_interval_steps=interval)
    with GoCkptManager(tmp_path, options=saves, window=window) as manager:
        step, state = manager.wrap(update), fresh()
        for label in range(interval * len(facts) + 1):
            at(label)
            state = step(state, BATCH)
            if manager.save(label, args=GoCkptSave(state)):
                saved[label] = to_host(state)
                manager.wait_until_finished()  # what a save holds is not free
                if label:
                    current[0] = next(now, current[0])
            if step.program is not None and step.program.is_armed:
                step.program.wait_until_ready()
                executables.add((id(step.program), id(step.program._executable)))
        manager.wait_until_finished()
        assert_restores(manager, saved)
        return manager.reports, executables


RATE = 24 * LEAF / 10  # ten seconds for the whole state


def test_a_drift_moves_blocks_and_recompiles_nothing(tmp_path, monkeypatch):
    slow, alike, fast = Facts(20.0, RATE), Facts(18.0, RATE), Facts(2.0, RATE)
    reports, executables = run(tmp_path, [Facts(), slow, alike, fast], monkeypatch)
    by_size, for_slow, for_alike, for_fast = reports[1:]
    assert "3 steps keep within the device budget" in by_size.reason
    assert "2 steps: predicted stall 0.000 s" in for_slow.reason
    assert for_alike.reason == for_slow.reason
    assert "predicted stall" in for_fast.reason != for_slow.reason
    assert [r.kind for r in reports[1:]] == ["window"] * 4
    assert [r.window_steps for r in reports[1:4]] == [3, 2, 2]
    assert len(executables) == 1


def test_a_drift_that_moves_no_block_makes_nothing_anew(tmp_path, monkeypatch, caplog):
    """Steps and the link are both slower: the plan says so, and that is all."""
    made, make = [], planned_module.make_departure

    def noting(*args):
        made.append(args)
        return make(*args)

    monkeypatch.setattr(planned_module, "make_departure", noting)
    facts = [Facts(20.0, RATE)] * 2 + [Facts(40.0, RATE / 2)] * 2
    with caplog.at_level(logging.INFO, logger="gockpt_jax"):
        (_, *reports), _ = run(tmp_path, facts, monkeypatch)
    assert [(r.kind, r.window_steps) for r in reports] == [("window", 2)] * 4
    assert reports[0].reason == reports[1].reason != reports[2].reason == reports[3].reason
    assert len(made) == 1
    assert not any("made anew" in message for message in caplog.messages)


def test_a_window_of_fewer_steps_than_planned_keeps_the_device_budget(tmp_path, monkeypatch):
    """All that was to leave in several blocks left in one, which was larger than the budget."""
    facts = [Facts(4.0, RATE)] * 4
    reports, _ = run(tmp_path, facts, monkeypatch, interval=2, leaves=15)
    assert [(r.kind, r.window_steps) for r in reports[2:]] == [("window", 2)] * 3
    assert "the save was 1 step away" in reports[-1].reason
    assert max(r.peak_device_bytes for r in reports) <= 15 * LEAF


def test_a_window_that_stopped_to_gain_is_a_snapshot(tmp_path, monkeypatch):
    (_, window, snapshot), _ = run(tmp_path, [Facts(), Facts(1e-4, RATE)], monkeypatch)
    assert (window.kind, snapshot.kind) == ("window", "snapshot")
    assert "no window gains 0.03 s: predicted stall at least" in snapshot.reason


def test_a_window_that_begins_to_gain_is_armed(tmp_path, monkeypatch):
    facts = [Facts(1e-4, RATE), Facts(20.0, RATE), Facts(20.0, RATE)]
    (_, *reports), executables = run(tmp_path, facts, monkeypatch)
    assert [r.kind for r in reports] == ["snapshot", "window", "window"]
    assert len(executables) == 1


def test_what_the_user_says_is_not_measured(tmp_path, monkeypatch):
    said = {"step_secs": 20.0, "link_bytes_per_sec": RATE}
    reports, _ = run(tmp_path, [Facts(1e-3, 1.0), Facts(9.0, 9.0)], monkeypatch, **said)
    assert "2 steps: predicted stall 0.000 s" in reports[1].reason
    assert reports[1].reason == reports[-1].reason


def test_a_fixed_k_stays(tmp_path, monkeypatch):
    facts = [Facts(), Facts(20.0, RATE)]
    reports, _ = run(tmp_path, facts, monkeypatch, steps=4)
    assert [r.window_steps for r in reports[1:]] == [4, 4]


@pytest.mark.parametrize(
    ("room", "in_memory", "kind"),
    [(48, False, "window"), (48, True, "snapshot"), (25, False, "snapshot")],
)
def test_windows_need_host_memory(tmp_path, monkeypatch, room, in_memory, kind):
    """A window holds the 24 leaves of state, and two steps' values for 2 of them at the least."""
    monkeypatch.setattr(host_budget, "host_headroom_bytes", lambda: room * LEAF)
    monkeypatch.setattr(host_budget, "is_in_memory", lambda directory: in_memory)
    said = {"step_secs": 20.0, "link_bytes_per_sec": RATE, "write_limit_bytes": 1, "audit": None}
    reports, _ = run(tmp_path, [Facts()], monkeypatch, **said)
    assert reports[-1].kind == kind
    assert ("the host budget" in reports[-1].reason) == (kind == "snapshot")


@pytest.mark.parametrize("room", [27, 30, 34])
def test_a_window_that_was_planned_for_the_host_s_room_has_it(tmp_path, monkeypatch, room):
    """Of 8 groups some leave early; had all, what follows them would not fit."""
    said = {"step_secs": 20.0, "link_bytes_per_sec": RATE, "write_limit_bytes": 1, "audit": None}
    said["host_budget_bytes"] = room * LEAF
    (_, *reports), _ = run(tmp_path, [Facts()] * 2, monkeypatch, **said)
    assert [(r.kind, r.deferred_steps) for r in reports] == [("window", 0)] * 2
    assert all(0 < r.early_bytes < 16 * LEAF for r in reports)


@pytest.mark.parametrize("later", [10**9, None])
def test_windows_come_back_with_the_host_s_room(tmp_path, monkeypatch, later):
    """It was short for a moment, when the plan was made."""
    room = [25 * LEAF] * 2 + [later] * 3  # as often as it is looked at for a plan
    monkeypatch.setattr(
        HostBudget, "room_bytes", lambda budget, n: room.pop(0) if len(room) > 1 else room[0]
    )
    said = {"step_secs": 20.0, "link_bytes_per_sec": RATE}
    (_, *reports), executables = run(tmp_path, [Facts()] * 5, monkeypatch, **said)
    assert [r.kind for r in reports] == ["snapshot"] * 2 + ["window"] * 3
    assert "no window fits the host budget" in reports[1].reason
    assert len(executables) == 1


def test_a_window_that_the_host_refuses_is_planned_smaller(tmp_path, monkeypatch):
    """It has less room for good: for the 24 leaves, and two steps' values for one group."""
    room = [48 * LEAF]
    monkeypatch.setattr(host_budget, "host_headroom_bytes", lambda: room[0])
    said = {"step_secs": 20.0, "link_bytes_per_sec": RATE, "write_limit_bytes": 1, "audit": None}

    def shrinks(label):
        room[0] = (48 if label <= 10 else 27) * LEAF

    (_, *reports), _ = run(tmp_path, [Facts()] * 4, monkeypatch, at=shrinks, **said)
    assert [r.kind for r in reports] == ["window", "snapshot", "window", "window"]
    assert "the host budget had no room" in reports[1].reason
    assert 0 < reports[2].early_bytes < reports[0].early_bytes


def test_a_window_that_the_host_refuses_before_any_save_has_come(tmp_path):
    """It was announced: its plan is looked at behind that save."""
    with GoCkptManager(tmp_path) as manager:
        known, step, state = manager._gockpt_session.known, manager.wrap(update), fresh()
        for _ in range(3):
            state = step(state, BATCH)
        known.was_refused(step.program)
        assert [known.facts(step.program, 1, 1).was_refused for _ in range(2)] == [True, False]


def test_a_plan_stays_where_no_state_was_returned_last(tmp_path, monkeypatch):
    """By an evaluation, just before the save after which the plan would have been made anew."""
    monkeypatch.setattr(units, "LARGE_BYTES", 0)
    facts = [Facts()]
    monkeypatch.setattr(known_module, "measured_facts", lambda clock: facts[0])
    jitted = jax.jit(
        lambda state, x, train=True: update(state, x) if train else x, static_argnames="train"
    )
    window = WindowOptions(device_budget_bytes=20 * LEAF)
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=10), window=window) as manager:
        step, state = manager.wrap(jitted), fresh()
        for label in range(41):
            state = step(state, BATCH)
            if step.program is not None and step.program.is_armed:
                step.program.wait_until_ready()
            if label == 20:
                facts[0] = Facts(20.0, RATE)
                step(state, BATCH, train=False)
            if manager.save(label, args=GoCkptSave(state)):
                manager.wait_until_finished()
        by_label = {r.step: (r.kind, r.window_steps) for r in manager.reports}
        assert [by_label[n] for n in (10, 30, 40)] == [("window", n) for n in (3, 3, 2)]
        assert_same(manager.restore(40), to_host(state))


def test_the_plan_of_every_step_is_made_anew(tmp_path, monkeypatch):
    """Not that alone of the step which happens to come first after a save."""
    monkeypatch.setattr(units, "LARGE_BYTES", 0)
    facts = [Facts()]
    monkeypatch.setattr(known_module, "measured_facts", lambda clock: facts[0])
    window = WindowOptions(device_budget_bytes=20 * LEAF)
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=10), window=window) as manager:
        plain, state = manager.wrap(update), fresh()
        first = manager.wrap(jax.jit(lambda state, x: (update(state, x), jnp.sum(x))))
        for label in range(41):
            if label % 10 == 1:
                state, _ = first(state, BATCH)
            else:
                state = plain(state, BATCH)
            if plain.program is not None and plain.program.is_armed:
                plain.program.wait_until_ready()
            if manager.save(label, args=GoCkptSave(state)):
                manager.wait_until_finished()
                facts[0] = Facts(20.0, RATE) if label == 30 else facts[0]
        by_label = {r.step: (r.kind, r.window_steps) for r in manager.reports}
        assert [by_label[n] for n in (10, 30, 40)] == [("window", n) for n in (3, 3, 2)]
        assert_same(manager.restore(40), to_host(state))


@pytest.mark.parametrize("window", [{"steps": 3}, {"device_budget_bytes": 20 * LEAF}, {}])
def test_an_interrupt_is_no_reason_to_plan_anew(tmp_path, monkeypatch, window):
    """Processes plan together: one that planned once more would wait for the others."""
    make_ready, gather = Ahead.make_ready, Processes.gather
    interrupts, asked, made = [KeyboardInterrupt()], [], []

    def interrupted(ahead, *args):
        if interrupts:
            raise interrupts.pop()
        make_ready(ahead, *args)
        made.append(args)

    monkeypatch.setattr(Ahead, "make_ready", interrupted)
    monkeypatch.setattr(
        Processes, "gather", lambda self, *args: (asked.append(args[0]), gather(self, *args))[1]
    )
    with GoCkptManager(tmp_path, window=WindowOptions(**window)) as manager:
        step = manager.wrap(update)
        with pytest.raises(KeyboardInterrupt):
            functools.reduce(step, [BATCH] * 4, fresh())
        functools.reduce(step, [BATCH] * 4, fresh())
        assert step.program.is_armed == bool(window)
    assert asked.count("facts") == len(made) == 1


def test_host_memory_is_that_of_all_devices_of_this_process(tmp_path, monkeypatch):
    """Of which each has an eighth of every leaf; what a plan is made for is one device's part."""
    room, asked = HostBudget.room_bytes, []
    monkeypatch.setattr(
        HostBudget, "room_bytes", lambda budget, n: (asked.append(n), room(budget, n))[1]
    )
    rows = jax.NamedSharding(jax.make_mesh((8,), ("a",)), jax.P("a"))
    window = WindowOptions(device_budget_bytes=20 * LEAF // 8, host_budget_bytes=80 * LEAF)
    with GoCkptManager(tmp_path, window=window) as manager:
        step, state = manager.wrap(update), jax.device_put(fresh(), rows)
        for label in range(4):
            state = step(state, jax.device_put(BATCH, rows))
            if label == 2:
                manager.save(label, args=GoCkptSave(state))
        planner = manager._gockpt_session.planner
        planned = planner.planned(step.program)
        assert asked == [24 * LEAF] * 2  # when it was made, and looked at again behind the save
        assert planned.num_devices == 8
        assert {u for block in planned.plan.blocks for u in block} == set(range(8)), "all leaves"
        assert planned.host_bytes == (24 * LEAF, 8 * LEAF)
        assert planned.facts.host_budget_bytes == 80 * LEAF // 8
        # A process may have no device with a part of the state: it sets no bound.
        known = manager._gockpt_session.known
        assert known.facts(step.program, 24 * LEAF, 0).host_budget_bytes is None


@pytest.mark.parametrize("devices", [1, 8])
def test_replicas_of_one_process_take_its_memory_once(tmp_path, monkeypatch, devices):
    """As much room makes for the same window, however many devices hold the state."""
    monkeypatch.setattr(units, "LARGE_BYTES", 0)
    everywhere = jax.NamedSharding(jax.make_mesh((devices,), ("a",)), jax.P())
    window = WindowOptions(
        device_budget_bytes=20 * LEAF, host_budget_bytes=28 * LEAF, step_secs=20.0,
        link_bytes_per_sec=RATE / 10, write_limit_bytes=1, audit=None,
    )  # fmt: skip
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=6), window=window) as manager:
        step, state = manager.wrap(update), jax.device_put(fresh(), everywhere)
        for label in range(13):
            state = step(state, jax.device_put(BATCH, everywhere))
            if manager.save(label, args=GoCkptSave(state)):
                manager.wait_until_finished()
            if step.program is not None and step.program.is_armed:
                step.program.wait_until_ready()
        assert_same(manager.restore(12), to_host(state))
        planned = manager._gockpt_session.planner.planned(step.program)
        assert planned.host_bytes == (24 * LEAF, 2 * LEAF)
        assert [(r.kind, r.early_bytes) for r in manager.reports[1:]] == [("window", 4 * LEAF)] * 2


@pytest.mark.parametrize(
    ("refused_here", "refused"), [(False, False), (True, False), (False, True)]
)
def test_processes_go_by_the_worst_that_one_of_them_has_seen(
    tmp_path, monkeypatch, refused_here, refused
):
    """And save what any of them has saved."""
    with GoCkptManager(tmp_path) as manager:
        step, known = manager.wrap(update), manager._gockpt_session.known
        for _ in range(2):
            state = step(fresh(), BATCH)
        leaves = jax.tree.leaves(state)
        known.has_saved(
            step, [set(map(id, leaves[2:]))], SavedBytes(22 * LEAF + 6, 1, 22 * LEAF + 5)
        )
        others = [
            (2.0, 7.0, 40, [0, 1, 2], refused, [7, 0, 4]),
            (None, 9.0, None, [1, 5], False, [5, 3, 2]),
        ]
        monkeypatch.setattr(known_module, "measured_facts", lambda clock: Facts(3.0, 8.0))
        monkeypatch.setattr(HostBudget, "room_bytes", lambda budget, n: 50)
        monkeypatch.setattr(
            Processes, "gather",
            lambda self, subject, mine: dict(enumerate([mine, *map(json.dumps, others)])),
        )  # fmt: skip
        if refused_here:
            known.was_refused(step.program)
        found = known.facts(step.program, 0, 1)
        assert dataclasses.astuple(found)[:4] == (2.0, 7.0, 40, frozenset({1}))
        assert found.was_refused == (refused or refused_here)
        assert found.beside == SavedBytes(7, 3, 5)
        assert known.facts(step.program, 0, 1).was_refused == refused, "what is past is past"


class Time:
    """Steps outside windows take a second, within them fifty, saves a hundred."""

    now = 0.0

    def perf_counter(self):
        return self.now


class TimedLoop:
    """Under a budget with which windows of three steps are planned; its steps are done at once."""

    def __init__(self, tmp_path, monkeypatch, **window):
        monkeypatch.setattr(units, "LARGE_BYTES", 0)
        self.time = Time()
        monkeypatch.setattr(clock_module, "time", self.time)
        self.probes = []
        monkeypatch.setattr(
            ran_module, "probe", lambda leaves: self.probes.append(probe(leaves)) or leaves[0]
        )
        options = Options(save_interval_steps=20)
        window = WindowOptions(**{"device_budget_bytes": 20 * LEAF, "audit": None, **window})
        self.manager = GoCkptManager(tmp_path, options=options, window=window)
        self.step, self.state = self.manager.wrap(update), fresh()
        self.session = self.manager._gockpt_session

    def advance(self):
        """One step, seen to have run before the next is called."""
        is_open = self.manager.window_status.startswith("window")
        self.time.now += 50.0 if is_open else 1.0
        self.state = self.step(self.state, BATCH)
        if self.step.program is not None and self.step.program.is_armed:
            self.step.program.wait_until_ready()
        self.session.resources.watcher.wait_until_idle()
        return is_open

    def save(self, label):
        if self.manager.save(label, args=GoCkptSave(self.state)):
            self.manager.wait_until_finished()
            self.session.resources.watcher.wait_until_idle()
            self.time.now += 100.0


def test_steps_are_timed_without_saves_and_windows(tmp_path, monkeypatch):
    loop = TimedLoop(tmp_path, monkeypatch)
    with loop.manager:
        for label in range(101):
            loop.advance()
            loop.save(label)
        assert [r.kind for r in loop.manager.reports[1:]] == ["window"] * 5
        assert loop.session.known.clock.secs == 1.0


def test_steps_are_timed_without_windows_in_vain(tmp_path, monkeypatch):
    """No save ends them, and there is one in each stretch that is timed."""
    loop = TimedLoop(tmp_path, monkeypatch)
    with loop.manager:
        in_windows = 0
        for n in range(111):
            if n % 22 == 17:
                loop.manager.expect_save(in_steps=3)
            in_windows += loop.advance()
        assert in_windows == 10
        assert loop.session.known.clock.secs == 1.0


@pytest.mark.parametrize(
    "said", [{}, {"step_secs": 1.0}, {"steps": 3}, {"device_budget_bytes": 24 * LEAF}],
    ids=["nothing", "the time", "K", "room for a copy"],
)  # fmt: skip
def test_steps_are_timed_where_a_plan_rests_on_it(tmp_path, monkeypatch, said):
    loop = TimedLoop(tmp_path, monkeypatch, **said)
    with loop.manager:
        for label in range(50):
            loop.advance()
            loop.save(label)
    assert bool(loop.probes) == (not said)


@pytest.mark.parametrize("steps_before", [0, 1, 30])
def test_nothing_is_planned_nor_timed_for_a_closed_manager(tmp_path, monkeypatch, steps_before):
    """Its step may go on for long: an evaluation, or training without checkpoints."""
    asked, gather = [], Processes.gather
    monkeypatch.setattr(
        Processes, "gather", lambda self, *args: (asked.append(args[0]), gather(self, *args))[1]
    )
    loop = TimedLoop(tmp_path, monkeypatch)
    for label in range(steps_before):
        loop.advance()
        loop.save(label)
    loop.manager.close()
    loop.probes.clear()
    asked.clear()
    for _ in range(40):
        loop.advance()
    assert (loop.probes, asked) == ([], [])
    assert (loop.session.planner.planned(loop.step.program) is None) == (steps_before < 2)


def test_a_probe_is_of_what_the_step_makes(tmp_path, monkeypatch):
    """What it passes on is ready before it has run, on a CPU."""
    monkeypatch.setattr(units, "LARGE_BYTES", 0)
    probed, passed_on = [], jax.device_put(jnp.float32(0.1))
    monkeypatch.setattr(ran_module, "probe", lambda leaves: probed.append([*leaves]))
    window = WindowOptions(device_budget_bytes=20 * LEAF, audit=None)
    with GoCkptManager(tmp_path, options=Options(save_interval_steps=10), window=window) as manager:
        step = manager.wrap(jax.jit(lambda s, x: {**update(s, x), "rate": s["rate"]}))
        state = {**fresh(), "rate": passed_on}
        for label in range(21):
            state = step(state, BATCH)
            manager.save(label, args=GoCkptSave(state))
        assert "rate" in step.explain()
    assert probed
    for leaves in probed:
        assert [leaf.shape for leaf in leaves] == [(SIZE,)] * 16  # the moments


def test_a_probe_is_no_array_of_the_state(tmp_path):
    """The next step donates these."""
    mesh = jax.make_mesh((8,), ("x",))
    rows = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))
    for small in (jnp.float32(3.0), jnp.full((1, 1), 3.0), jnp.full(1, 3, jnp.bfloat16), rows + 3):
        found = probe([jnp.zeros(64), small, jax.random.key(0)])
        assert (found.size, found.dtype, float(found.reshape(()))) == (1, small.dtype, 3.0)
        for shard in small.addressable_shards:
            assert found.unsafe_buffer_pointer() != shard.data.unsafe_buffer_pointer()
        small.delete()
        assert float(found.reshape(())) == 3.0


def test_a_probe_of_what_lies_as_the_user_wants_it():
    lies = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert probe([jax.device_put(jnp.full((3, 4), 3.0), lies)]).tolist() == [[3.0]]


def test_what_cannot_be_probed():
    gone = jnp.zeros(2)
    gone.delete()
    for arrays in ([], [np.zeros(2)], [jnp.zeros((0, 2))], [jax.random.key(0)], [gone]):
        assert probe(arrays) is None


@pytest.mark.parametrize("name", ["step_secs", "link_bytes_per_sec"])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "fast"])
def test_facts_that_cannot_be(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be a number above 0"):
        WindowOptions(**{name: value})
