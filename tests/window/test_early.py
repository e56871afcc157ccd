"""Early chunks: which updates they are given, and which of them in one pass."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from window.training_loop import assert_same

from gockpt_jax.replay.engine import Replayer
from gockpt_jax.telemetry.save_record import SaveRecord
from gockpt_jax.training.cut import Leaf, find_cut
from gockpt_jax.training.graph import flatten
from gockpt_jax.training.recipe import make_recipe
from gockpt_jax.training.step_cut import ReplayGroup
from gockpt_jax.transfer.block import block_of
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.chunks import Chunk, Source
from gockpt_jax.window.departure import Follower
from gockpt_jax.window.early import EarlyChunks
from gockpt_jax.window.landed import LandedLeaf
from gockpt_jax.window.slots import give_back, make_slots
from gockpt_jax.window.units import GroupUnit
from gockpt_jax.window.worker import Worker

SIZE = 100
LEAF_BYTES = SIZE * 4


@jax.jit
def update(m, g):
    return 0.9 * m + 0.1 * g


def gradient(n):
    return jnp.sin(jnp.arange(SIZE) + n)


def group_of(leaf: int, step=update) -> ReplayGroup:
    graph = flatten(step.trace(gradient(0), gradient(1)).jaxpr)
    leaves = [Leaf("m", graph.inputs[0], graph.outputs[0])]
    (group,) = find_cut(leaves, even_for_nothing=True).groups
    retained = (leaf,) if group.retained else ()
    return ReplayGroup((leaf,), retained, (), make_recipe(group, leaves))


def unit_of(group: int, start: int = 0, stop: int = SIZE) -> GroupUnit:
    sharding = gradient(0).sharding
    return GroupUnit(
        state_bytes=0,
        retained_bytes=0,
        group=group,
        start=start,
        stop=stop,
        travels_by=sharding,
        retained_sharding=sharding,
    )


def pull_of(arrays, units=(None,)):
    """The rows that each unit has of each array."""
    parts = [(a, u or unit_of(0)) for a, u in zip(arrays, units, strict=True)]
    chunks = [Chunk(Source.of(a), u.start, u.stop) for a, u in parts]
    block = block_of(chunks)
    return chunks, block.start_pull(block.stage(arrays))


class Watched(Replayer):
    """Tells how many updates each shard was given in one pass."""

    def __init__(self):
        super().__init__("cpu")
        self.passes = []

    def apply(self, shards):
        self.passes.append([len(shard.updates) for shard in shards])
        super().apply(shards)


@dataclasses.dataclass
class Window:
    """Two groups, of which one leaves before the first update and one before the third."""

    early: EarlyChunks
    replayer: Watched
    host: ByteBudget
    expected: list[jax.Array]

    def land(self, leaf):
        self.early.land_block([(leaf, leaf)], *pull_of([self.expected[leaf]]))()

    def update(self, n):
        values = [gradient(n + leaf) for leaf in (0, 1)]
        _, pull = pull_of(values, (None, None))
        self.expected = [update(m, gradient(n + i)) for i, m in enumerate(self.expected)]
        return [Follower((0,), 0), Follower((1,), 1)], pull

    def finish(self):
        index = self.expected[0].addressable_shards[0].index
        slots = {leaf: make_slots([index]) for leaf in (0, 1)}
        self.early.hand_over(slots, self.early.finish(slots))
        return [slots[leaf][0].data.result() for leaf in (0, 1)]


@pytest.fixture
def window():
    host, replayer = ByteBudget(None), Watched()
    record = SaveRecord(kind="window", reason="")
    groups, units = [group_of(0), group_of(1)], [unit_of(0), unit_of(1)]
    early = EarlyChunks(groups, units, replayer, host, None, record)
    return Window(early, replayer, host, [gradient(7), gradient(8)])


def run(window, *, behind, updates=6):
    """What lands is replayed as it comes, or, if replay is behind, when all has landed."""
    window.land(0)
    tasks = []
    for n in range(updates):
        if n == 2:
            # Its copy is made at this version, whenever it is put in its place.
            tasks.append(window.early.land_block([(1, 1)], *pull_of([window.expected[1]])))
        tasks.append(window.early.land_cut(*window.update(n)))
        while tasks and not behind:
            tasks.pop(0)()
    for task in tasks:
        task()
    return window.finish()


@pytest.mark.parametrize("behind", [False, True])
def test_chunks_get_the_updates_that_came_after_they_left(window, behind):
    assert_same(run(window, behind=behind), [np.asarray(x) for x in window.expected])
    assert window.host.used_bytes == 2 * LEAF_BYTES
    assert window.early._record.drained_at > 0
    assert window.early._record.gradient_bytes == 6 * CUT_BYTES


def test_updates_are_applied_as_they_come_if_replay_keeps_up(window):
    run(window, behind=False)
    assert window.replayer.passes == [[1], [1], [1, 1], [1, 1], [1, 1], [1, 1]]


def test_updates_that_are_there_are_applied_together_and_four_at_most(window):
    run(window, behind=True)
    assert window.replayer.passes == [[4, 2], [2, 2]]


def test_rows_that_left_together_are_followed_by_one_chunk():
    """Each unit is given its own rows of it."""
    units, replayer = [unit_of(0, 0, 40), unit_of(0, 40, 70), unit_of(0, 70)], Watched()
    record = SaveRecord(kind="window", reason="")
    early = EarlyChunks([group_of(0)], units, replayer, ByteBudget(None), None, record)
    m, slots = gradient(7), {0: make_slots([gradient(7).addressable_shards[0].index])}
    early.land_block([(u, 0) for u in range(3)], *pull_of([m] * 3, units))()
    for n in range(2):
        _, pull = pull_of([gradient(n)])
        early.land_cut([Follower((0, 1, 2), 0)], pull)()
        m = update(m, gradient(n))
    early.hand_over(slots, early.finish(slots))
    assert_same(slots[0][0].data.result(), np.asarray(m))
    assert replayer.passes == [[1] * 3] * 2


def test_what_no_update_changes_is_not_replayed(window):
    """Frozen parameters, of which there may be more than of all else."""
    window.early._groups = [group_of(0), group_of(1, jax.jit(lambda m, g: m))]
    window.land(0)
    window.land(1)
    _, pull = pull_of([gradient(0)])
    window.early.land_cut([Follower((0,), 0)], pull)()
    window.expected[0] = update(window.expected[0], gradient(0))
    assert_same(window.finish(), [np.asarray(x) for x in window.expected])
    assert window.replayer.passes == [[1]]


CUT_BYTES = 2 * LEAF_BYTES
PATIENCE_SECS = 200  # only ends a test that hangs


class Room(ByteBudget):
    """Tells when somebody has to wait for it."""

    def __init__(self, limit_bytes):
        super().__init__(limit_bytes)
        self.is_awaited = threading.Event()

    def acquire(self, num_bytes, loan=None):
        with self._changed:
            if not self._fits(num_bytes):
                self.is_awaited.set()
            assert self._changed.wait_for(lambda: self._fits(num_bytes), PATIENCE_SECS)
            super().acquire(num_bytes, loan)


class Threads:
    """Lands on one worker and replays on the one behind it, once that may begin."""

    def __init__(self, window):
        self.worker, self.may_replay = Worker(behind=Worker("behind")), threading.Event()
        self.early, self.room = window.early, window.early._waiting
        self.worker.submit_behind(lambda: self.may_replay.wait(PATIENCE_SECS) and None)

    def land(self, cut):
        early, worker = self.early, self.worker
        worker.submit(lambda: worker.pass_on(early.land_cut(*cut), early.failed))


@pytest.fixture
def threads(window):
    window.early._waiting = Room(2 * CUT_BYTES)
    threads = Threads(window)
    yield threads
    threads.may_replay.set()
    threads.worker.close()


def test_landing_waits_where_no_more_may_wait_for_replay(window, threads):
    window.land(0)
    window.land(1)
    for n in range(6):
        threads.land(window.update(n))
    assert threads.room.is_awaited.wait(PATIENCE_SECS)
    assert window.host.used_bytes == 2 * LEAF_BYTES + 2 * CUT_BYTES
    threads.may_replay.set()
    threads.worker.wait_until_idle()
    assert_same(window.finish(), [np.asarray(x) for x in window.expected])
    assert threads.room.peak_bytes <= 2 * CUT_BYTES
    assert threads.room.used_bytes == 0


def test_landing_ends_though_replay_fails_while_it_waits(window, threads, monkeypatch, caplog):
    def fail(self, shards):
        raise RuntimeError("injected")

    monkeypatch.setattr(Watched, "apply", fail)
    window.land(0)
    for n in range(6):
        threads.land(window.update(n))
    assert threads.room.is_awaited.wait(PATIENCE_SECS)
    threads.may_replay.set()
    threads.worker.submit_behind(window.early.drop)
    threads.worker.wait_until_idle()
    assert str(window.early.error) == "injected"
    assert caplog.records == []  # of no task that has lost its patience
    assert (window.host.used_bytes, threads.room.used_bytes) == (0, 0)


def test_landing_ends_though_what_it_waits_for_was_lost(window, threads):
    """The task that was to replay it was not run: the worker tells of that, and of no more."""
    window.land(0)
    for n in range(3):  # the last of which waits
        threads.land(window.update(n))
    assert threads.room.is_awaited.wait(PATIENCE_SECS)
    has_landed = threading.Event()
    window.early.failed(RuntimeError("injected"))
    threads.worker.submit(has_landed.set)
    assert has_landed.wait(PATIENCE_SECS / 2)
    threads.worker.submit_behind(window.early.drop)
    threads.may_replay.set()
    threads.worker.wait_until_idle()
    assert (window.host.used_bytes, threads.room.used_bytes) == (0, 0)


def test_one_update_larger_than_what_may_wait_goes_alone(window):
    window.early._waiting = ByteBudget(CUT_BYTES - 1)
    run(window, behind=False)
    assert len(window.replayer.passes) == 6


def test_what_waits_is_given_back_when_the_window_is_dropped(window):
    window.land(0)
    first, second = [window.early.land_cut(*window.update(n)) for n in range(2)]
    first()
    assert window.replayer.passes == []
    assert window.host.used_bytes == LEAF_BYTES + 2 * CUT_BYTES
    window.early.failed(RuntimeError("injected"))
    second()
    window.early.drop()
    assert window.host.used_bytes == 0


def test_what_still_waits_for_an_update_is_not_final(window):
    window.land(0)
    first, _ = [window.early.land_cut(*window.update(n)) for n in range(2)]
    first()
    with pytest.raises(AssertionError, match="an update waits"):
        window.finish()


def test_what_was_handed_over_is_held_by_nobody_else(window):
    """The window may go on to be read by other items of its save."""
    index = window.expected[0].addressable_shards[0].index
    slots = {0: make_slots([index])}
    window.land(0)
    held = weakref.ref(window.early._leaves[0].flat[0])
    window.early.hand_over(slots, window.early.finish(slots))
    assert slots.pop(0)[0].data.done()
    assert held() is None


def test_the_first_error_is_the_one_that_is_told(window):
    first = RuntimeError("injected")
    for error in (first, RuntimeError("of what followed from it")):
        window.early.failed(error)
    assert window.early.error is first


def test_what_nobody_reads_any_more_is_not_audited(window):
    """It may not have been replayed, so that the audit would find fault with it."""
    index = window.expected[0].addressable_shards[0].index
    slots, others = make_slots([index]), make_slots([index])
    window.land(0)
    window.early.promise(slots)
    window.early.promise(others)  # of another item of the save
    window.early.promise_no_more()
    give_back(others, window.host)
    assert window.early.is_wanted
    give_back(slots, window.host)
    window.early.land_cut(*window.update(0))()
    with pytest.raises(concurrent.futures.CancelledError):
        window.early.finish({0: slots})
    window.early.drop()
    assert (window.replayer.passes, window.host.used_bytes) == ([], 0)


def test_nothing_is_replayed_after_an_error(window):
    window.land(0)
    window.early.failed(RuntimeError("injected"))
    window.early.land_cut(*window.update(0))()
    assert window.replayer.passes == []
    assert window.host.used_bytes == LEAF_BYTES


def test_what_waits_for_an_update_that_is_never_passed_on_is_given_back(window):
    """No thread could be started for it, say."""
    window.land(0)
    first, _ = [window.early.land_cut(*window.update(n)) for n in range(2)]
    first()
    held = [weakref.ref(rows) for cut in window.early._pending for (rows,) in cut.values.values()]
    del first
    assert [rows() is None for rows in held] == [False] * 2
    window.early.drop()
    assert [rows() is None for rows in held] == [True] * 2
    assert window.host.used_bytes == 0


def test_what_could_not_be_put_in_its_place_is_given_back(window, monkeypatch):
    """Its bytes are on the host all the same."""
    put = window.early.land_block([(0, 0)], *pull_of([window.expected[0]]))

    def fail(self, chunk, found):
        raise MemoryError

    monkeypatch.setattr(LandedLeaf, "put", fail)
    with pytest.raises(MemoryError):
        put()
    assert window.host.used_bytes == LEAF_BYTES
    window.early.drop()
    assert window.host.used_bytes == 0


def test_what_was_dropped_is_held_by_nobody(window, monkeypatch):
    """Not by the window either, which the trainer or the replayer may hold for longer."""
    put, landed = LandedLeaf.put, []

    def noting(self, chunk, found):
        landed.extend(weakref.ref(h.data) for h in found)
        put(self, chunk, found)

    monkeypatch.setattr(LandedLeaf, "put", noting)
    window.land(0)
    assert [data() is None for data in landed] == [False]
    window.early.drop()
    assert [data() is None for data in landed] == [True]
