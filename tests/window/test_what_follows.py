"""What an armed step retains: on the device no longer than the step, but for what follows."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import itertools
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from alone import FIRST_ALONE
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from signals import Signals

from gockpt_jax import GoCkptManager, GoCkptSave, WindowOptions, _compat
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.program import StepProgram
from gockpt_jax.transfer import block, layout
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.chunks import Chunk
from gockpt_jax.window import units, worker
from gockpt_jax.window.cost import copied_bytes
from gockpt_jax.window.departure import make_departure, nothing_left
from gockpt_jax.window.early import EarlyChunks
from gockpt_jax.window.facts import SavedBytes
from gockpt_jax.window.late_groups import LateGroups
from gockpt_jax.window.open_window import OpenWindow
from gockpt_jax.window.plan import fill_blocks, measure_bytes
from gockpt_jax.window.step_room import StepRoom
from gockpt_jax.window.worker import Worker

SHAPE = (64, 48)
LEAF = 64 * 48 * 4
NAMES = ("a", "b", "c")
MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
PLACES = {
    "one device": SingleDeviceSharding(jax.devices()[0]),
    "sharded": NamedSharding(MESH, PartitionSpec("x")),
}
EVERYWHERE = NamedSharding(MESH, PartitionSpec())


@pytest.fixture(autouse=True)
def small_scale(monkeypatch):
    """Sizes at which each leaf is large, and cut into rows."""
    monkeypatch.setattr(units, "MIN_CHUNK_BYTES", 64)
    for module in (units, layout, block):
        monkeypatch.setattr(module, "LARGE_BYTES", 256)
    monkeypatch.setattr(block, "_made", functools.cache(block.Block))


def update(state):
    """Momentum of three leaves, each followed by a gradient of its own."""
    g = {k: jnp.sin(3 * w) for k, w in state["w"].items()}
    m = {k: 0.75 * m + g[k] for k, m in state["m"].items()}
    return {"m": m, "w": {k: w - 0.125 * m[k] for k, w in state["w"].items()}}


def fresh(place=PLACES["one device"]):
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(SHAPE).astype(np.float32) for _ in NAMES]
    w = {k: jax.device_put(x, place) for k, x in zip(NAMES, values, strict=True)}
    return {"m": jax.tree.map(jnp.zeros_like, w), "w": w}


def program_of(state, step=update):
    jitted = jax.jit(step)
    form = CallForm(jitted, 0, _compat.jit_settings(jitted))
    return StepProgram(jitted.trace(state), form, (state,), {}, even_for_nothing=False)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_as_much_is_copied_as_the_plan_says(place, steps):
    """Of groups that do not leave whole in one block; the others' values travel as they are."""
    state = fresh(place)
    program = program_of(state)
    leaves = jax.tree.leaves(state)
    size = measure_bytes(program.cut, leaves, FIRST_ALONE)
    assert len(size.units) > 3 * steps
    blocks = fill_blocks(size.units, steps, "").blocks
    departures = [nothing_left(program.cut, leaves)]
    for b in blocks:
        units = {u: size.units[u] for u in b}
        departures.append(make_departure(program.cut, units, leaves, departures[-1]))
    planned = copied_bytes(size.units, blocks)
    until = list(itertools.accumulate(planned))  # what follows a block goes on to follow
    for departure, num_bytes in zip(departures[1:], until, strict=True):
        padding = departure.following.staged_bytes - num_bytes
        assert 0 <= padding <= 64 * len(departure.following.chunks) * (num_bytes > 0)
    assert (sum(planned) > 0) == (steps == 3)  # a block and a half: the second group is cut
    assert sum(planned) < size.retained
    follows = [sum(size.units[u].retained_bytes for u in b) for b in blocks]
    cuts = [d.following for d in departures[1:]]
    held = [c.held_bytes - c.staged_bytes + n for c, n in zip(cuts, until, strict=True)]
    assert held == list(itertools.accumulate(follows))
    assert sum(follows) == size.retained


def test_what_follows_is_cut_from_where_the_compiler_has_put_it():
    """Whatever the plan took for granted; it travels by the shards of the leaf that it replays."""
    state = fresh(PLACES["sharded"])
    program, leaves = program_of(state), jax.tree.leaves(state)
    units = dict(enumerate(measure_bytes(program.cut, leaves, FIRST_ALONE).units))
    planned = make_departure(program.cut, units, leaves, nothing_left(program.cut, leaves))
    rng = np.random.default_rng(2)
    values = [rng.standard_normal(x.shape).astype(x.dtype) for x in program.cut.arrays]
    for place in (PLACES["sharded"], NamedSharding(MESH, PartitionSpec(None, "x"))):
        cut = [jax.device_put(x, place) for x in values]
        departure = planned.followed_by(cut)
        assert (departure is planned) == (place == PLACES["sharded"])
        assert departure.followed_by(cut) is departure
        pull = departure.following.start_pull(departure.following.stage(departure.arrays_of(cut)))
        found = zip(departure.followers, departure.following.chunks, pull.result(), strict=True)
        for (_, i), chunk, shards in found:
            assert chunk.source.travels_by == PLACES["sharded"]
            for shard in shards:
                want = values[i][shard.index].reshape(-1)[chunk.start : chunk.stop]
                np.testing.assert_array_equal(shard.data, want)


def test_a_captured_scalar_travels_from_where_the_compiler_has_put_it():
    def step(state):
        c = jnp.cos(state["w"])
        m = jnp.sin(state["n"]) * state["m"] + c
        return {"m": m, "w": state["w"] - c, "n": state["n"] + 1}

    state = {k: jax.device_put(jnp.ones(SHAPE), PLACES["sharded"]) for k in ("m", "w")}
    state["n"] = jax.device_put(jnp.float32(1), NamedSharding(MESH, PartitionSpec()))
    program, leaves = program_of(state, step), jax.tree.leaves(state)
    planned = nothing_left(program.cut, leaves)
    assert planned.followers
    for place in (state["n"].sharding, SingleDeviceSharding(jax.devices()[3])):
        cut = [jax.device_put(jnp.full(x.shape, 7, x.dtype), place) for x in program.cut.arrays]
        departure = planned.followed_by(cut)
        assert (departure is planned) == (place == state["n"].sharding)
        assert {chunk.source.travels_by for chunk in departure.following.chunks} == {place}
        assert all(chunk.everywhere for chunk in departure.following.chunks)  # all processes replay
        pull = departure.following.start_pull(departure.following.stage(departure.arrays_of(cut)))
        assert [[h.data.item() for h in found] for found in pull.result()] == [[7.0]]


class Begun:
    """As much of a window as the planned departure of all that leaves early is about."""

    _groups_of = OpenWindow._groups_of
    _handed_over, state = (), ()

    def __init__(self, leaves, program):
        self._cut = cut = program.cut
        self._units = measure_bytes(cut, leaves, FIRST_ALONE).units
        units, before = dict(enumerate(self._units)), nothing_left(cut, leaves)
        self.plan = types.SimpleNamespace(blocks=[tuple(units)])
        self._departures = [make_departure(cut, units, leaves, before)]
        self._left = [before, *self._departures]
        self._late = LateGroups(cut, types.SimpleNamespace(has_demoted=False))


def test_a_leaf_that_lies_elsewhere_when_it_leaves_is_cut_there():
    state = fresh(PLACES["sharded"])
    window = Begun(leaves := jax.tree.leaves(state), program_of(state))
    (planned,) = window._departures
    assert OpenWindow._departure(window, 0, leaves) is planned
    moved = planned.leaves[0][1]
    leaves[moved] = jax.device_put(leaves[moved], NamedSharding(MESH, PartitionSpec(None, "x")))
    departure = OpenWindow._departure(window, 0, leaves)
    assert departure.is_cut_from(leaves)
    assert departure.leaves == planned.leaves


def test_a_leaf_that_lies_elsewhere_at_the_save_is_taken_there():
    """What has left are rows of other shards, of which another process may have some."""
    state = fresh(PLACES["sharded"])
    window = Begun(leaves := jax.tree.leaves(state), program_of(state))
    new = dict(enumerate(leaves))
    followed = set(OpenWindow._followed(window, new))
    assert followed == {j for _, j in window._left[-1].leaves}
    moved = min(followed)
    new[moved] = jax.device_put(leaves[moved], NamedSharding(MESH, PartitionSpec(None, "x")))
    assert set(OpenWindow._followed(window, new)) == followed - {moved}


def test_replicas_copy_the_slices_that_they_send(monkeypatch):
    monkeypatch.setattr(layout, "MIN_SLICE_BYTES", 64)
    state = fresh(NamedSharding(MESH, PartitionSpec()))
    program, leaves = program_of(state), jax.tree.leaves(state)
    size = measure_bytes(program.cut, leaves, FIRST_ALONE)
    assert copied_bytes(size.units, (tuple(range(len(size.units))),)) == [size.retained]
    nothing = nothing_left(program.cut, leaves)
    departure = make_departure(program.cut, dict(enumerate(size.units)), leaves, nothing)
    assert departure.following.staged_bytes == departure.following.held_bytes == size.retained // 8


@pytest.mark.parametrize("devices", [1, 4])
def test_replicas_send_what_the_plan_says(monkeypatch, devices):
    """Where there is enough for each to have as much."""
    monkeypatch.setattr(layout, "MIN_SLICE_BYTES", LEAF)
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.device_put(np.zeros(SHAPE, np.float32), place) for _ in range(8)]
    of_block = block.block_of([Chunk.whole(FIRST_ALONE.source(a)) for a in arrays])
    sent = collections.Counter()
    for buffer, senders in of_block._sent:
        for device in senders.flat:
            sent[device] += buffer.staged_bytes
    planned = SavedBytes.of(arrays, FIRST_ALONE)
    assert {*sent.values()} == {planned.to_host} == {8 * LEAF // devices}
    assert len(sent) == devices
    assert (planned.of_device, planned.owned) == (8 * LEAF, 8 * LEAF)


class Loop:
    """A loop under a manager that lands no update until it may go on."""

    def __init__(self, directory, steps, place, monkeypatch):
        options = ocp.CheckpointManagerOptions(save_interval_steps=8)
        self.manager = GoCkptManager(directory, options=options, window=WindowOptions(steps=steps))
        self.step = self.manager.wrap(jax.jit(update, donate_argnums=0))
        self.session = self.manager._gockpt_session
        self.state, self.label = fresh(place), 0
        self.window, self.retained = None, []
        self.at_update, self.may_go = threading.Event(), threading.Event()
        follow, land_update = OpenWindow.follow, EarlyChunks.land_cut

        def noting(window, state, cut):
            self.window = window
            refs = [weakref.ref(x) for x in cut]
            follow(window, state, cut)
            left = window._left[-1]
            whole = {left.followers[n][1] for n in left.following._whole}
            self.retained = [(x, i in whole) for i, x in enumerate(refs)]

        def stopping(early, *cut):
            self.at_update.set()
            assert self.may_go.wait(200)
            return land_update(early, *cut)

        monkeypatch.setattr(OpenWindow, "follow", noting)
        monkeypatch.setattr(EarlyChunks, "land_cut", stopping)

    def update(self):
        self.state = self.step(self.state)

    def save(self):
        self.manager.save(self.label, args=GoCkptSave(self.state))
        self.label += 1

    def until_a_window_opens(self):
        self.update()
        while self.window is None:
            self.save()
            self.update()
        assert self.at_update.wait(60)


@pytest.mark.parametrize(("steps", "place"), [(3, "one device"), (4, "one device"), (4, "sharded")])
def test_what_nothing_follows_is_free_when_the_step_has_run(tmp_path, steps, place, monkeypatch):
    """And what is copied too; only what follows is there, and counted, until it has been pulled."""
    loop = Loop(tmp_path, steps, PLACES[place], monkeypatch)
    with loop.manager:
        loop.until_a_window_opens()
        dropped, counted = 0, 0
        for armed in range(1, steps):
            loop.session.resources.watcher.wait_until_idle()
            alive = [stays for x, stays in loop.retained if x() is not None]
            assert all(alive), "a value is referred to that nobody sends"
            dropped += sum(not stays for _, stays in loop.retained)
            left = loop.window._left
            counted += left[-1].following.held_bytes
            blocks = sum(d.block.staged_bytes for d in left[2:])  # the first has landed
            assert loop.session.resources.device.used_bytes == counted + blocks
            if armed < steps - 1:
                loop.save()
                loop.update()
        assert dropped
        loop.may_go.set()
        loop.save()
        wanted, label = jax.tree.map(np.array, loop.state), loop.label - 1
        loop.manager.wait_until_finished()
        report = loop.manager.last_report
        assert (report.step, report.kind, report.window_steps) == (label, "window", steps)
        jax.tree.map(np.testing.assert_array_equal, loop.manager.restore(label), wanted)
        loop.session.resources.watcher.wait_until_idle()
        assert loop.session.resources.device.used_bytes == 0


class Result:
    """Of a step that runs until it is told to end."""

    def __init__(self, has_run, error=None):
        self.has_run, self.error = has_run, error

    def block_until_ready(self):
        assert self.has_run.wait(60)
        if self.error is not None:
            raise self.error


@pytest.fixture
def room():
    watcher, device = Worker("a test"), ByteBudget(100)
    yield StepRoom(device, watcher), device, watcher
    watcher.close()


@pytest.mark.parametrize("error", [None, RuntimeError("the step failed")])
def test_room_is_given_back_in_two_parts(room, error, monkeypatch):
    room, device, watcher = room
    has_run = threading.Event()
    room.take(90)
    results = [Result(has_run, error)]
    ref = weakref.ref(results[0])
    repay, held = device.repay, []
    monkeypatch.setattr(
        device, "repay", lambda loan: (loan.num_bytes and held.append(ref()), repay(loan))
    )
    with room.dispatched(results) as follows:
        pulled = follows(30)
    room.give_back()  # has nothing more to give
    assert device.used_bytes == 90
    has_run.set()
    watcher.wait_until_idle()
    assert device.used_bytes == 30
    assert error is not None or held == [None]  # its traceback refers to it
    held.clear()
    pulled()
    assert device.used_bytes == 0


def test_what_follows_is_free_only_when_nobody_waits_for_it_any_more(room):
    """The one who waits for the step refers to what follows; a pull may be seen to end before."""
    room, device, _ = room
    has_run, ended = threading.Event(), []
    room.take(90)
    with room.dispatched([Result(has_run)]) as follows:
        pulled = follows(30)
    landing = threading.Thread(target=lambda: (pulled(), ended.append(True)))
    landing.start()
    assert (device.used_bytes, ended) == (90, [])
    has_run.set()
    landing.join(60)
    assert (device.used_bytes, ended) == (0, [True])


def test_a_step_that_did_not_run_gives_all_back(room):
    room, device, _ = room
    room.take(90)
    for _ in range(2):  # an interrupt may come between that and what is to remember it
        room.give_back()
        assert device.used_bytes == 0


def test_what_is_taken_behind_an_interrupted_step_is_not_given_back_with_it(room):
    room, device, watcher = room
    has_run = threading.Event()
    room.take(60)
    with pytest.raises(KeyboardInterrupt), room.dispatched([Result(has_run)]):
        raise KeyboardInterrupt
    room.take(30)
    has_run.set()
    watcher.wait_until_idle()
    assert device.used_bytes == 30
    room.give_back()
    assert device.used_bytes == 0


def test_an_interrupt_before_anybody_watches_gives_all_back(room, monkeypatch):
    def interrupted(task, failed):
        monkeypatch.undo()
        raise KeyboardInterrupt

    room, device, watcher = room
    monkeypatch.setattr(watcher, "submit", interrupted)
    room.take(90)
    with pytest.raises(KeyboardInterrupt), room.dispatched([]) as follows:
        follows(30)
    watcher.wait_until_idle()
    assert device.used_bytes == 0


@pytest.mark.parametrize("interrupted", ["before", "behind", "not"])
def test_where_nobody_can_watch_all_is_given_back(room, monkeypatch, interrupted):
    @contextlib.contextmanager
    def cannot_be_entered():
        raise MemoryError
        yield

    room, device, watcher = room
    monkeypatch.setattr(worker, "unwatched", cannot_be_entered)
    room.take(90)
    with contextlib.suppress(KeyboardInterrupt), room.dispatched([]) as follows:
        if interrupted == "before":
            raise KeyboardInterrupt
        pulled = follows(30)
        if interrupted == "behind":
            raise KeyboardInterrupt
    watcher.wait_until_idle()
    if interrupted == "not":
        assert device.used_bytes == 30
        pulled()
    assert device.used_bytes == 0


@pytest.mark.parametrize("how", ["did not run", "ran"])
def test_an_interrupt_anywhere_leaves_nothing_taken(room, how):
    """In the room, the budget or whoever uses them, or as one of them returns to the other."""
    room, device, watcher = room
    there = tuple(inspect.getsourcefile(kind) for kind in (StepRoom, ByteBudget))

    def use():
        room.take(60)
        if how == "did not run":
            room.give_back()
            return
        with room.dispatched([]) as follows:
            pulled = follows(90)
            watcher.submit(pulled)

    for place in itertools.count(1):
        signals = Signals([place], inside=(*there, __file__))
        with contextlib.suppress(KeyboardInterrupt), signals.coming():
            use()
        room.give_back()
        watcher.wait_until_idle()
        assert device.used_bytes == 0, signals.came_at
        if not signals.came_at:  # there are no more places
            break
    assert place > 10


def test_more_than_was_foreseen_is_counted(room):
    """The compiler put a value elsewhere than its leaf, so it is copied."""
    room, device, watcher = room
    room.take(20)
    with room.dispatched([]) as follows:
        pulled = follows(50)
    watcher.wait_until_idle()
    assert device.used_bytes == 50
    pulled()
    assert device.used_bytes == 0


def save_by_a_window_of_four_steps(directory):
    options = ocp.CheckpointManagerOptions(save_interval_steps=8)
    with GoCkptManager(directory, options=options, window=WindowOptions(steps=4)) as manager:
        step, state = manager.wrap(jax.jit(update, donate_argnums=0)), fresh()
        for label in range(9):
            state = step(state)
            manager.save(label, args=GoCkptSave(state))
    assert manager.last_report.kind == "window"


def test_what_follows_leaves_by_one_call_whatever_has_left(tmp_path, monkeypatch):
    """At each the trainer may lose the interpreter."""
    follow, start = OpenWindow.follow, block.Block.start_pull
    calls, by_step = [], []

    def starting(self, staged):
        calls.append(self)
        return start(self, staged)

    def following(window, state, cut):
        calls.clear()
        follow(window, state, cut)
        by_step.append(len(calls))

    monkeypatch.setattr(block.Block, "start_pull", starting)
    monkeypatch.setattr(OpenWindow, "follow", following)
    save_by_a_window_of_four_steps(tmp_path)
    assert by_step == [1, 1, 1]


def test_what_leaves_in_a_call_that_is_made_again_is_followed_once(tmp_path, monkeypatch):
    """As it is where that call came to its end: what follows is staged by all processes at once."""
    leave, followed = OpenWindow.leave, []

    def leaving(window, version, old):
        for given_up in (None, "a call of the step came to nothing"):
            window.given_up = given_up
            leave(window, version, old)
            followed.append([*map(len, (window._left, window._left[-1].units))])
        window.given_up = None

    monkeypatch.setattr(OpenWindow, "leave", leaving)
    save_by_a_window_of_four_steps(tmp_path)
    assert len(followed) == 6
    assert followed[::2] == followed[1::2]


def update_from(state, place):
    """An update whose gradients lie somewhere."""
    g = {k: jnp.sin(3 * w) for k, w in state["w"].items()}
    g = jax.lax.with_sharding_constraint(g, place)
    m = {k: 0.75 * m + g[k] for k, m in state["m"].items()}
    return {"m": m, "w": {k: w - 0.125 * m[k] for k, w in state["w"].items()}}


def reports_of(directory, place, monkeypatch, **window):
    """Of three saves of such a step; and of each armed step what it took and what it retained."""
    follow, took = OpenWindow.follow, []

    def follows(window, state, cut):
        really = sum(x.addressable_shards[0].data.nbytes for x in cut)
        took.append((window._room.taken_bytes - window._left[-1].following.staged_bytes, really))
        follow(window, state, cut)

    monkeypatch.setattr(OpenWindow, "follow", follows)
    options = ocp.CheckpointManagerOptions(save_interval_steps=4)
    with GoCkptManager(directory, options=options, window=WindowOptions(**window)) as manager:
        update = jax.jit(
            functools.partial(update_from, place=place), out_shardings=PLACES["sharded"]
        )
        step, state = manager.wrap(update), fresh(PLACES["sharded"])
        for label in range(9):
            state = step(state)
            manager.save(label, args=GoCkptSave(state))
        manager.wait_until_finished()
    return manager.reports, took


@pytest.mark.parametrize(("place", "shards"), [(PLACES["sharded"], 1), (EVERYWHERE, 8)])
def test_what_a_step_retains_is_counted_as_the_compiler_has_put_it(
    tmp_path, monkeypatch, place, shards
):
    """Before the step runs: a value on all devices takes of each what all shards take together."""
    budget = 3 * LEAF  # not for all that is retained on every device, and a block
    reports, took = reports_of(tmp_path, place, monkeypatch, steps=3, device_budget_bytes=budget)
    assert [r.kind for r in reports] == ["snapshot", "window", "window"]
    assert took == [(3 * LEAF // 8 * shards,) * 2] * 4
    assert ("of the device budget" in reports[1].reason) == (place == EVERYWHERE)


@pytest.mark.parametrize("place", [PLACES["sharded"], EVERYWHERE])
def test_a_plan_that_was_made_for_less_is_made_anew_before_its_first_window(
    tmp_path, monkeypatch, place
):
    budget = 5 * LEAF // 8  # of six leaves; three gradients, and a block beside them
    known = {"step_secs": 100.0, "link_bytes_per_sec": 100.0}
    reports, took = reports_of(
        tmp_path, place, monkeypatch, arm="always", device_budget_bytes=budget, **known
    )
    if place == EVERYWHERE:
        assert took == []
        assert [r.kind for r in reports] == ["snapshot"] * 3
        assert all("no window fits the device budget" in r.reason for r in reports[1:]), reports
    else:
        assert [r.kind for r in reports] == ["snapshot", "window", "window"]
        assert max(r.peak_device_bytes for r in reports) <= budget


@pytest.mark.parametrize("lies", ["alike", "otherwise"])
def test_where_retained_values_lie_otherwise_others_may_wait(tmp_path, monkeypatch, lies):
    """Beside other processes staging them is a program of all: they wait until it begins here."""
    stage, follow = block.Block.stage, OpenWindow.follow
    waited, following = [], []

    def staging(self, arrays):
        waited.extend(window.others_wait for window in following)
        return stage(self, arrays)

    def follows(window, state, cut):
        following.append(window)
        follow(window, state, cut)
        assert not following.pop().others_wait

    @jax.jit
    def placed(state):
        new = update(state)
        if lies == "alike":
            return new
        g = {k: m - 0.75 * state["m"][k] for k, m in new["m"].items()}
        everywhere = NamedSharding(MESH, PartitionSpec())
        g = jax.lax.with_sharding_constraint({k: jnp.sin(x) for k, x in g.items()}, everywhere)
        return new | {"m": {k: 0.75 * m + g[k] for k, m in state["m"].items()}}

    monkeypatch.setattr(block.Block, "stage", staging)
    monkeypatch.setattr(OpenWindow, "follow", follows)
    options = ocp.CheckpointManagerOptions(save_interval_steps=4)
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=3)) as manager:
        step, state = manager.wrap(placed), fresh(PLACES["sharded"])
        for label in range(5):
            state = step(state)
            manager.save(label, args=GoCkptSave(state))
    assert manager.last_report.early_bytes > 0
    assert waited == [lies == "otherwise"] * 2


def test_where_a_window_is_given_up_meanwhile_its_step_holds_nothing(tmp_path, monkeypatch):
    """Its other steps run armed beside other processes, and would wait for the room."""
    follow, held = OpenWindow.follow, []

    def following(window, state, cut):
        window.give_up("for a test")
        held.append(window._room.taken_bytes)
        follow(window, state, cut)
        held.append(window._room.taken_bytes)

    loop = Loop(tmp_path, 4, PLACES["one device"], monkeypatch)
    loop.may_go.set()
    monkeypatch.setattr(OpenWindow, "follow", following)
    with loop.manager:
        loop.update()
        while not held:
            loop.save()
            loop.update()
        assert held[0] > held[1] == 0
        loop.session.resources.worker.wait_until_idle()
        loop.session.resources.watcher.wait_until_idle()
        assert loop.session.resources.device.used_bytes == 0


def test_copies_have_room_from_before_the_step_until_they_are_made(tmp_path, monkeypatch):
    """And so have their originals: a copy reads them after the step has run."""
    follow, start = OpenWindow.follow, block.Block.start_pull
    take, dispatched = StepRoom.take, StepRoom.dispatched
    taken, sent, watched, copied = [], [], [], []

    @contextlib.contextmanager
    def dispatching(room, results):
        with dispatched(room, results) as follows:
            yield lambda num_bytes: (watched.extend(results), follows(num_bytes))[1]

    def following(window, state, cut):
        sent.clear()
        watched.clear()
        follow(window, state, cut)
        copies = [x for x in sent[0] if not any(x is y for y in cut)]
        assert taken[-1] == sum(x.nbytes for x in (*cut, *copies))
        assert all(any(x is y for y in watched) for x in copies)
        copied.append(len(copies))

    monkeypatch.setattr(StepRoom, "take", lambda room, n: (taken.append(n), take(room, n)))
    monkeypatch.setattr(StepRoom, "dispatched", dispatching)
    monkeypatch.setattr(block.Block, "start_pull", lambda b, x: (sent.append(x), start(b, x))[1])
    monkeypatch.setattr(OpenWindow, "follow", following)
    options = ocp.CheckpointManagerOptions(save_interval_steps=8)
    with GoCkptManager(tmp_path, options=options, window=WindowOptions(steps=3)) as manager:
        step, state = manager.wrap(jax.jit(update, donate_argnums=0)), fresh()
        for label in range(9):
            state = step(state)
            manager.save(label, args=GoCkptSave(state))
    assert manager.last_report.kind == "window"
    assert manager.last_report.peak_device_bytes >= max(taken)  # since it was opened
    assert any(copied)  # rows of the group that two blocks share


def test_the_saved_state_is_the_loops_alone_when_save_has_returned(tmp_path, monkeypatch):
    """Also while it is still replayed: a step that does not donate has two states, not three."""
    may_end, finish = threading.Event(), EarlyChunks.finish

    def late(early, *args):
        assert may_end.wait(60)
        return finish(early, *args)

    monkeypatch.setattr(EarlyChunks, "finish", late)
    options = ocp.CheckpointManagerOptions(save_interval_steps=4)
    window = WindowOptions(steps=3, audit=None)
    with GoCkptManager(tmp_path, options=options, window=window) as manager:
        step, state = manager.wrap(jax.jit(update)), fresh()
        for label in range(5):
            state = step(state)
            manager.save(label, args=GoCkptSave(state))
        manager._gockpt_session.resources.watcher.wait_until_idle()
        refs = [weakref.ref(x) for x in jax.tree.leaves(state)]
        state = step(state)
        alive = [ref() is not None for ref in refs]
        may_end.set()
        manager.wait_until_finished()
        assert manager.last_report.kind == "window"
        assert not any(alive)
