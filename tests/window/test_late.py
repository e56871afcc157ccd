"""Late leaves: every kind of array arrives in the shards that are written, whatever the budget."""

from __future__ import annotations

import itertools
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import FIRST_ALONE
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from gockpt_jax import HostBudgetError, WindowOptions
from gockpt_jax.storage.writing.host_array import HostArray
from gockpt_jax.telemetry.save_record import SaveRecord
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.chunks import Chunk, Source, in_host_memory
from gockpt_jax.transfer.pull import HostChunk
from gockpt_jax.window import device_budget, late
from gockpt_jax.window.device_budget import DeviceBudget
from gockpt_jax.window.facts import NO_BYTES, SavedBytes
from gockpt_jax.window.landed import LandedLeaf
from gockpt_jax.window.late import take_late
from gockpt_jax.window.processes import Processes
from gockpt_jax.window.resources import Resources
from gockpt_jax.window.seal import Seal
from gockpt_jax.window.slots import give_back
from gockpt_jax.window.worker import Worker

P = PartitionSpec


class SmallDevice(DeviceBudget):
    """One that has less room than the budget says, and may tell how much is free."""

    def __init__(self, patch, limit_bytes, room_bytes, *, tells):
        super().__init__(limit_bytes, Processes())
        self.room_bytes, self.refused, self.stage = room_bytes, 0, late.stage_and_pull
        patch.setattr(late, "stage_and_pull", self._stage)
        free = self._free if tells else lambda used: None
        patch.setattr(device_budget, "device_headroom_bytes", free)

    def _stage(self, block, arrays):
        if self.used_bytes > self.room_bytes:
            self.refused += 1
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")
        return self.stage(block, arrays)

    def _free(self, used):
        assert used == "bytes_in_use"
        return max(0, self.room_bytes - self.used_bytes)


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("limit_bytes", [None, 20000])
def test_what_finds_no_room_is_taken_in_smaller_parts(limit_bytes, tells, monkeypatch):
    """Each once, beside no more than there is room for; the budget remembers."""
    rng = np.random.default_rng(0)
    arrays = [jnp.array(rng.standard_normal((n, 32)), jnp.float32) for n in (60, 1, 8, 20, 40, 7)]
    worker, host = Worker(), ByteBudget(None)
    device = SmallDevice(monkeypatch, limit_bytes, 8000, tells=tells)
    for _ in range(2):
        slots = take_late(arrays, Resources(worker, worker, device, host, FIRST_ALONE))
        worker.wait_until_idle()
        for array in arrays:
            (slot,) = slots[id(array)]
            np.testing.assert_array_equal(slot.data.result(), array)
        assert device.refused <= 3  # each may take the allocator seconds
        assert device.used_bytes == 0
        assert device.limit_bytes == 8000 if tells else device.limit_bytes < 8000
        first, device.refused = device.refused, 0
    assert first == 0, "the next save is taken so from the beginning"
    worker.close()


def test_what_finds_no_room_is_laid_out_anew_with_all_that_comes_behind(monkeypatch):
    """Blocks of 2 KiB by the budget, none of which fits."""
    arrays = [jnp.full(128, n, jnp.float32) for n in range(64)]
    worker, host = Worker(), ByteBudget(None)
    device = SmallDevice(monkeypatch, 16384, 1500, tells=False)
    slots = take_late(arrays, Resources(worker, worker, device, host, FIRST_ALONE))
    worker.close()
    for n, array in enumerate(arrays):
        np.testing.assert_array_equal(slots[id(array)][0].data.result(), np.full(128, n))
    assert device.refused == 1
    assert (device.limit_bytes, device.used_bytes) == (512, 0)


def test_what_was_in_flight_had_room_though_it_has_landed_since(monkeypatch):
    """An allocator waits before it fails."""
    arrays = [jnp.full(1024, n, jnp.float32) for n in range(32)]  # in parts of 8 KiB
    worker, host = Worker(), ByteBudget(None)
    device = SmallDevice(monkeypatch, 2**16, 2**15, tells=False)
    stage = late.stage_and_pull

    def waits(block, arrays):
        try:
            return stage(block, arrays)
        finally:
            if device.used_bytes > 2**15:
                go_on.set()
                worker.wait_until_idle()

    go_on = threading.Event()
    monkeypatch.setattr(late, "stage_and_pull", waits)
    worker.submit(lambda: go_on.wait(60))  # nothing has landed when it is tried
    take_late(arrays, Resources(worker, worker, device, host, FIRST_ALONE))
    worker.close()
    assert device.limit_bytes == 2**15 + 2**11
    assert device.used_bytes == 0


def test_what_lies_on_the_host_takes_nothing_of_the_device(monkeypatch, caplog):
    """Its copies are made there: that there is no room says nothing of the device."""
    pinned = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    arrays = [jnp.zeros(1000), jax.device_put(jnp.ones(1000), pinned), jnp.zeros(8)]
    stage = late.stage_and_pull

    def stage_and_pull(block, arrays):
        if any(in_host_memory(a.sharding) for a in arrays):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory.")
        return stage(block, arrays)

    worker, device, host = Worker(), DeviceBudget(10_000, Processes()), ByteBudget(None)
    resources = Resources(worker, worker, device, host, FIRST_ALONE)
    with monkeypatch.context() as patch:
        patch.setattr(late, "stage_and_pull", stage_and_pull)
        with pytest.raises(jax.errors.JaxRuntimeError, match="host memory"):
            take_late(arrays, resources)
    assert device.limit_bytes == 10_000
    assert not caplog.records
    slots = take_late(arrays, resources)
    worker.close()
    for array in arrays:
        np.testing.assert_array_equal(slots[id(array)][0].data.result(), array)
    assert device.used_bytes == 0


@pytest.mark.parametrize("several", [False, True])
def test_what_finds_no_room_even_alone_is_cut(several, monkeypatch):
    """Of several processes in the next save only, as all that they stage: this one fails."""
    monkeypatch.setattr(late, "MIN_CHUNK_BYTES", 256)
    arrays = [jnp.arange(60 * 32).reshape(60, 32), jnp.zeros(8)]
    worker, host = Worker(), ByteBudget(None)
    device = SmallDevice(monkeypatch, None, 4000, tells=False)
    device._processes.several = several
    monkeypatch.setattr(device._processes, "least", lambda subject, mine: mine)
    resources = Resources(worker, worker, device, host, FIRST_ALONE)
    if several:
        with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
            take_late(arrays, resources)
        worker.wait_until_idle()
        assert (device.used_bytes, host.used_bytes) == (0, 0)
        assert device.limit_bytes is None
        device.agree()  # as before each save
    slots = take_late(arrays, resources)
    worker.close()
    np.testing.assert_array_equal(slots[id(arrays[0])][0].data.result(), arrays[0])
    assert (device.used_bytes, device.refused) == (0, 1)


def test_what_cannot_be_cut_is_an_error_where_it_finds_no_room(monkeypatch):
    """Tried beside what is in flight, alone, and once more, for that may have landed since."""
    arrays = [jnp.zeros((60, 32)), jnp.zeros(8)]  # less than MIN_CHUNK_BYTES
    worker, host = Worker(), ByteBudget(None)
    device = SmallDevice(monkeypatch, None, 4000, tells=False)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        take_late(arrays, Resources(worker, worker, device, host, FIRST_ALONE))
    worker.close()
    assert (device.used_bytes, host.used_bytes, device.refused) == (0, 0, 3)


@pytest.mark.parametrize("shape", [(64, 24), (3, 50, 7), (1000,), (5,)])
def test_rows_are_cut_again(shape, monkeypatch):
    """Whatever rows of a shard a chunk has, its parts are these rows, each once."""
    monkeypatch.setattr(late, "MIN_CHUNK_BYTES", 64)
    whole = Chunk.whole(Source.of(jnp.zeros(shape)))
    for parts in (1, 2, 3, 7):
        for chunk in late._parts(whole, -(-whole.num_bytes // parts)):
            for part_bytes in (64, 100, 1000, 10**6):
                cut = late._parts(chunk, part_bytes)
                assert cut[0].start == chunk.start
                assert cut[-1].stop == chunk.stop
                assert all(a.stop == b.start for a, b in itertools.pairwise(cut))
                assert all(part.size > 0 for part in cut)
                assert len(cut) == 1 or max(p.num_bytes for p in cut) < chunk.num_bytes


@pytest.mark.parametrize(
    ("limit_bytes", "room_bytes"), [(None, 10**9), (3000, 10**9), (None, 3000), (9000, 2500)]
)
def test_all_kinds_of_arrays_land_as_they_are_stored(limit_bytes, room_bytes, monkeypatch):
    """Whatever the budget, and if the device has less room than it says."""
    monkeypatch.setattr(late, "MIN_CHUNK_BYTES", 256)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    values = np.random.default_rng(0).standard_normal((64, 24)).astype(np.float32)
    key = jax.random.key(1)
    arrays = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, specs in (
            (values, (P(), P("a"), P(("a", "b")), P(None, "b"))),
            (jax.random.split(key, 8), (P(), P("a"))),
            (key, (P(),)),
            (np.float32(3.0), (P(),)),
        )
        for spec in specs
    ]
    arrays += [jax.random.key(2), jnp.arange(7), jnp.zeros(8, jnp.int4)]
    worker, host = Worker(), ByteBudget(None)
    device = SmallDevice(monkeypatch, limit_bytes, room_bytes, tells=False)
    slots = take_late(arrays, Resources(worker, worker, device, host, FIRST_ALONE))
    worker.close()
    assert (device.refused > 0) == (room_bytes < 10**9)
    for array in arrays:
        stored = HostArray.like(array, ())
        is_key = stored.key_impl is not None
        want = np.array(jax.random.key_data(array) if is_key else array)
        assert all(len(slot.index) == len(stored.shape) for slot in slots[id(array)])
        got = np.zeros(stored.shape, stored.dtype)
        for slot in slots[id(array)]:
            got[slot.index] = slot.data.result()
        np.testing.assert_array_equal(got, want)
    assert device.used_bytes == 0
    # Only what cannot be cut finer may exceed the budget, and then alone.
    assert limit_bytes is None or device.refused or device.peak_bytes <= limit_bytes
    for _ in range(2):  # a writer and a save that is given up may both do so
        give_back([slot for array in arrays for slot in slots[id(array)]], host)
        assert host.used_bytes == 0


def test_no_more_is_cut_than_must_be(monkeypatch):
    """Nor what no program of ours cuts: rows of a packed dtype may begin within a byte."""
    monkeypatch.setattr(late, "MIN_CHUNK_BYTES", 500)
    arrays = [jnp.zeros(2000, jnp.int4), jnp.zeros(2000, jnp.int8), jnp.zeros(1200, jnp.int8)]
    chunks = late.late_chunks(arrays, 3000, FIRST_ALONE)
    assert [(n, chunk.is_whole) for n, chunk in chunks] == [
        (0, True), *[(1, False)] * 4, (2, True),
    ]  # fmt: skip
    ((_, alone),) = late.late_chunks(arrays[1:2], 2048, FIRST_ALONE)
    assert alone.is_whole
    all_bytes = 2048 + 2048 + 1216  # each begins at a multiple of 64
    for limit_bytes, fits in ((None, True), (all_bytes, True), (all_bytes - 1, False)):
        chunks = late.late_chunks(arrays, limit_bytes, FIRST_ALONE)
        assert (len(late.late_blocks(chunks, limit_bytes)) == 1) == fits


@pytest.mark.parametrize("limit_bytes", [None, 3000])
def test_only_what_has_not_landed_is_given_back_and_once(limit_bytes, monkeypatch):
    """What is final is the writer's to give back, though its neighbour in the block is lost."""
    put = LandedLeaf.put

    def failing(self, chunk, found):
        if chunk.source.shape == (64, 24):
            raise MemoryError("injected")
        put(self, chunk, found)

    monkeypatch.setattr(late, "MIN_CHUNK_BYTES", 256)
    monkeypatch.setattr(LandedLeaf, "put", failing)
    arrays = [jnp.arange(7.0), jnp.ones((64, 24)), jnp.arange(5.0)]
    worker, device, host = Worker(), DeviceBudget(limit_bytes, Processes()), ByteBudget(None)
    slots = take_late(arrays, Resources(worker, worker, device, host, FIRST_ALONE))
    worker.close()
    data = [slot.data for array in arrays for slot in slots[id(array)]]
    final = [x.result().nbytes for x in data if x.exception() is None]
    assert str(data[1].exception()) == "injected"
    assert (device.used_bytes, host.used_bytes) == (0, sum(final))
    assert 28 in final


def test_what_is_lost_twice_is_given_back_once(monkeypatch):
    """What has come cannot be put in its place, and the rest cannot be staged."""
    stage, staged = late.stage_and_pull, []

    def staging(block, arrays):
        staged.append(block)
        if len(staged) == 3:
            raise MemoryError("staging")
        return stage(block, arrays)

    def failing(self, chunk, found):
        raise MemoryError("landing")

    monkeypatch.setattr(late, "MIN_CHUNK_BYTES", 256)
    monkeypatch.setattr(late, "stage_and_pull", staging)
    monkeypatch.setattr(LandedLeaf, "put", failing)
    arrays = [jnp.full((64, 24), n, jnp.float32) for n in range(2)]
    worker, device, host = Worker(), DeviceBudget(6144, Processes()), ByteBudget(None)
    with pytest.raises(MemoryError, match="staging"):
        take_late(arrays, Resources(worker, worker, device, host, FIRST_ALONE))
    worker.close()
    assert (device.used_bytes, host.used_bytes) == (0, 0)


@pytest.mark.parametrize("end", ["fail", "forget"])
def test_what_is_lost_stays_so_though_the_rest_of_it_comes(end):
    """Its first rows have come with others of which some could not be taken in."""
    array, host = jnp.arange(8.0), ByteBudget(None)
    lost = late._LateArray(array, host, FIRST_ALONE)
    lost.count()
    rows = [
        (
            Chunk(Source.of(array), n, n + 4),
            [HostChunk(lost.slots[0].index, np.asarray(array)[n:][:4])],
        )
        for n in (0, 4)
    ]
    lost.land(*rows[0])
    error = MemoryError("injected")
    lost.fail(error) if end == "fail" else lost.forget()
    lost.land(*rows[1])
    (slot,) = lost.slots
    assert (slot.data.exception() is error) if end == "fail" else not slot.data.done()
    assert host.used_bytes == 0


def test_what_has_come_and_is_forgotten_is_given_back_once_and_held_by_nobody():
    array, host = jnp.arange(8.0), ByteBudget(None)
    forgotten = late._LateArray(array, host, FIRST_ALONE)
    forgotten.count()
    index, source = forgotten.slots[0].index, Source.of(array)
    for n in (0, 4):
        forgotten.land(Chunk(source, n, n + 4), [HostChunk(index, np.zeros(4, np.float32))])
        if n == 0:
            held = weakref.ref(forgotten._landed.flat[0])
    assert host.used_bytes == 32
    for _ in range(2):  # the second time where the first was interrupted
        forgotten.forget()
        assert host.used_bytes == 0
    forgotten.slots.clear()
    assert held() is None


@pytest.mark.parametrize("has_room", [True, False])
def test_items_of_a_save_are_taken_one_by_one_and_counted_together(has_room):
    """And what lies in several places of an item once."""
    one, other = jnp.ones(1000), jnp.arange(500.0)
    options = WindowOptions(host_budget_bytes=6000 if has_room else 5999)
    resources = Resources.of(options, Processes(), FIRST_ALONE)
    record = SaveRecord(kind="snapshot", reason="a test")
    seal = Seal(None, record, resources)
    taken = [*seal.take([one, one]).slots]
    assert (record.num_arrays, record.state_bytes, record.taken_bytes) == (2, 8000, 4000)
    if has_room:
        taken += seal.take([other]).slots
        assert record.taken_bytes == 6000
    else:
        with pytest.raises(HostBudgetError, match="6000 bytes"):
            seal.take([other])
    assert seal.items == [{id(one)}, {id(other)}]
    assert seal.taken == NO_BYTES.plus(SavedBytes.of([one, other], FIRST_ALONE))
    resources.worker.wait_until_idle()
    assert record.drained_at >= record.sealed_at > 0
    assert resources.host.used_bytes == record.taken_bytes
    give_back([slot for slots in taken for slot in slots], resources.host)
    assert resources.host.used_bytes == 0
    resources.close()
