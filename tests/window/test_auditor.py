"""The auditor by itself: budgets, rotation, and what it says of a difference."""

from __future__ import annotations

import collections
import math
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import FIRST_ALONE
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gockpt_jax import Audit, AuditError, WindowOptions
from gockpt_jax.telemetry.save_record import SaveRecord
from gockpt_jax.transfer.pull import HostChunk, Pull
from gockpt_jax.transfer.turns import FEW_BOXES
from gockpt_jax.window import audit
from gockpt_jax.window.audit import Auditor
from gockpt_jax.window.device_budget import DeviceBudget
from gockpt_jax.window.host_budget import HostBudget
from gockpt_jax.window.late_groups import LateGroups
from gockpt_jax.window.processes import Processes
from gockpt_jax.window.resources import Resources
from gockpt_jax.window.worker import Worker

enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
LEAVES = {f"leaf {n}": jnp.arange(256.0) + n for n in range(8)}  # 1 KiB each
RIGHT = {path: [HostChunk((slice(None),), np.array(array))] for path, array in LEAVES.items()}


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


def resources_of(worker, limit=None):
    host = HostBudget(WindowOptions())
    return Resources(worker, worker, DeviceBudget(limit, Processes()), host, FIRST_ALONE)


def audit_of(worker, resources=None, **options):
    auditor = Auditor(Audit(**options), resources or resources_of(worker))
    record = SaveRecord(kind="window", reason="a test")
    return auditor, auditor.sample(LEAVES, record), record


def off_by(ulps, path="leaf 3", element=7):
    """What replay would have made, with one element some units away."""
    chunks = {name: [HostChunk(c.index, c.data.copy()) for c in cs] for name, cs in RIGHT.items()}
    chunks[path][0].data.view(np.uint32)[element] += ulps
    return chunks


@pytest.mark.parametrize(("limit", "peak"), [(None, 8192), (8192, 8192), (2500, 2048), (1, 1024)])
def test_sample_comes_in_parts_that_fit_the_budget(worker, limit, peak):
    resources = resources_of(worker, limit)
    _, pending, record = audit_of(worker, resources)
    worker.wait_until_idle()
    assert resources.device.peak_bytes == peak
    assert (resources.device.used_bytes, resources.host.used_bytes) == (0, 8192)
    pending.check(RIGHT)
    assert (record.audit.chunks, record.audit.compared_bytes) == (8, 8192)
    pending.drop()
    pending.drop()
    assert resources.host.used_bytes == 0


def test_what_a_device_has_no_room_for_is_sampled_in_smaller_parts(worker, monkeypatch):
    """Of every leaf its own box, and no box twice."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("a"))
    leaves = {path: jax.device_put(x, rows) for path, x in LEAVES.items()}
    right = {
        path: [HostChunk(s.index, np.array(s.data)) for s in x.addressable_shards]
        for path, x in leaves.items()
    }
    start, asked = audit.start_sample, []

    def start_less(probes):
        asked.append(len(probes))
        if len(asked) in (1, 4):  # all of it, and one of its parts
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")
        return start(probes)

    monkeypatch.setattr(audit, "start_sample", start_less)
    resources = resources_of(worker, 4096)
    record = SaveRecord(kind="window", reason="a test")
    pending = Auditor(Audit(fraction=0.99), resources).sample(leaves, record)
    worker.wait_until_idle()
    assert asked[3] > 1
    assert resources.device.limit_bytes < 256, "a fourth twice"
    assert resources.device.used_bytes == 0
    pending.check(right)
    assert (record.audit.max_ulps, record.audit.compared_bytes) == (0, 8192)
    pending.drop()
    assert resources.host.used_bytes == 0


def test_a_sample_that_did_not_come_for_want_of_memory_is_heeded_and_held_by_nobody(
    worker, monkeypatch
):
    sources = []

    def start(probes):
        def result():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")

        pull = started(probes)
        sources.extend(map(weakref.ref, pull._sources))
        monkeypatch.setattr(pull, "result", result)
        return pull

    started = audit.start_sample
    monkeypatch.setattr(audit, "start_sample", start)
    resources = resources_of(worker)
    _, pending, _ = audit_of(worker, resources)
    worker.wait_until_idle()
    resources.device.agree()
    assert resources.device.limit_bytes == 2048
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        pending.check(RIGHT)
    monkeypatch.undo()
    assert sources
    assert not any(source() is not None for source in sources), caught


def test_more_shards_than_boxes_take_turns(worker):
    """All is looked at once in about 1 / fraction samples, spread over leaves and devices."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("a"))
    leaves = {f"leaf {n}": jax.device_put(jnp.zeros((8, 8192)), rows) for n in range(20)}
    auditor, _, _ = audit_of(worker)
    seen = {path: np.zeros((8, 8192), int) for path in leaves}
    for turn in range(24):
        pairs = auditor._next_boxes(leaves, 1 / 16)
        assert len(pairs) == FEW_BOXES
        elements = sum(math.prod(box.grid.sizes) for box, _ in pairs)
        assert 1 <= elements / (20 * 8 * 8192 // 16) <= 1.25
        devices = collections.Counter(d for _, p in pairs for d in p.shard.devices())
        assert set(devices.values()) <= {1, 2, 3}
        if not turn:
            assert len({box.path for box, _ in pairs}) == FEW_BOXES
        for box, piece in pairs:
            assert piece.shard is leaves[box.path].addressable_shards[box.piece].data
            seen[box.path][box.piece, box.grid.run(box.number)] += 1
    assert min(s.min() for s in seen.values()) >= 1


def test_saves_take_boxes_of_the_same_kinds_again(worker):
    """A GPU that loads a program waits until it is idle: later saves shall run what has run."""
    leaves = {f"alike {n}": jnp.zeros((8, 256)) for n in range(30)}
    leaves |= {"wide": jnp.zeros((4, 512)), "half": jnp.zeros((8, 256), jnp.bfloat16)}
    auditor, _, _ = audit_of(worker)
    saves = [auditor._next_boxes(leaves, 1 / 16) for _ in range(6)]
    kinds = [[(p.shape, p.shard.dtype, box.grid.sizes) for box, p in pairs] for pairs in saves]
    assert kinds[2:4] == kinds[:2]
    assert kinds[4:6] == kinds[:2]
    paths = [box.path for pairs in saves[:2] for box, _ in pairs]
    assert sorted(paths) == sorted(leaves)
    assert [box.path for pairs in saves[2:4] for box, _ in pairs] == paths


def test_of_many_sets_of_leaves_those_saved_last_are_known(worker, monkeypatch):
    monkeypatch.setattr("gockpt_jax.window.audit._ROTAS", 2)
    auditor, _, _ = audit_of(worker)
    sets = [{f"{n} {i}": jnp.zeros(9) for i in range(32)} for n in range(3)]

    def paths(leaves):
        return [box.path for box, _ in auditor._next_boxes(leaves, 1 / 16)]

    first, second = paths(sets[0]), paths(sets[0])
    assert not set(first) & set(second)
    paths(sets[1])
    assert paths(sets[0]) == first, "it is known that this is the third"
    paths(sets[2])
    assert paths(sets[0]) == second, "it was among the last two"
    paths(sets[1])
    paths(sets[2])
    assert paths(sets[0]) == first, "it begins again"
    assert len(auditor._rotas) == 2


def test_leaves_that_lie_elsewhere_now_begin_again(worker):
    """The same paths: what was worked out for them would not be true of these."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    auditor, _, _ = audit_of(worker)
    for spec in (PartitionSpec("a"), PartitionSpec()):
        array = jax.device_put(jnp.zeros((8, 8192)), NamedSharding(mesh, spec))
        seen = {box.piece for box, _ in auditor._next_boxes({"leaf": array}, 1 / 16)}
        assert seen == (set(range(8)) if spec == PartitionSpec("a") else {0})
    other = auditor._next_boxes({"leaf": jnp.zeros(5)}, 1 / 16)
    assert [p.shape for _, p in other] == [(5,)]


def test_error_names_the_worst_and_counts_the_others(worker):
    _, pending, record = audit_of(worker, max_ulps=4)
    worker.wait_until_idle()
    pending.check(off_by(4))
    assert (record.audit.max_ulps, record.audit.worst_leaf) == (4, "leaf 3")
    assert (record.audit.chunks, record.audit.compared_bytes) == (8, 8192)
    wrong = off_by(9) | {"leaf 5": off_by(1000, "leaf 5")["leaf 5"]}
    with pytest.raises(AuditError) as raised:
        pending.check(wrong)
    text = str(raised.value)
    assert "`leaf 5`, chunk 0 of 1 in the shard at [0:256]: 1 of 256 elements differ" in text
    assert "by up to 1000 ULPs" in text
    assert "1 more chunk," in text
    assert "leaf 3" in text
    assert "`max_ulps=4` and `max_relative_error=0` are the bounds" in text
    assert isinstance(raised.value, RuntimeError)


def test_one_is_no_plural(worker):
    _, pending, _ = audit_of(worker)
    worker.wait_until_idle()
    with pytest.raises(AuditError, match=r"by up to 1 ULP \("):
        pending.check(off_by(1))


def test_relative_error_is_of_the_leafs_scale(worker):
    _, pending, record = audit_of(worker, max_ulps=10)
    worker.wait_until_idle()
    pending.check(off_by(8))
    change = 8 * np.spacing(np.float32(10.0))  # leaf 3 holds 10.0 there, and at most 258.0
    assert record.audit.max_relative_error == pytest.approx(change / 258.0)
    assert pending.metadata["max_relative_error"] == record.audit.max_relative_error


@pytest.mark.parametrize(
    ("bounds", "is_right"),
    [
        ({}, False),
        ({"max_relative_error": 1e-9}, False),
        ({"max_relative_error": 1e-7}, True),
        ({"max_ulps": 10**6}, False),
        ({"max_ulps": 10**10}, True),
    ],
    ids=str,
)
def test_what_is_near_zero_is_bound_by_the_leafs_scale(worker, bounds, is_right):
    """A tiny number of the wrong sign is billions of units off, and nothing beside the others."""
    _, pending, record = audit_of(worker, **bounds)
    worker.wait_until_idle()
    chunks = off_by(0, "leaf 0")  # 0.0, 1.0, ... 255.0
    chunks["leaf 0"][0].data[0] = -1e-6
    if is_right:
        pending.check(chunks)
    else:
        with pytest.raises(AuditError, match="leaf 0"):
            pending.check(chunks)
    assert record.audit.max_relative_error == pytest.approx(1e-6 / 255)


@pytest.mark.parametrize(("added", "is_right"), [(1.5e-38, True), (7e-37, True), (8e-37, False)])
def test_what_flushing_denormals_makes_is_no_difference(worker, added, is_right):
    """A term of a sum that is lost on the host: 12 ULPs and more of a sum that is small itself."""
    auditor = Auditor(Audit(fraction=0.99), resources_of(worker))
    record = SaveRecord(kind="window", reason="a test")
    pending = auditor.sample({"leaf": jnp.full(256, 1e-32)}, record)
    values = np.full(256, 1e-32, np.float32)
    values[7] += np.float32(added)
    worker.wait_until_idle()
    if is_right:
        pending.check({"leaf": [HostChunk((slice(None),), values)]})
    else:
        with pytest.raises(AuditError, match="1 of 256 elements differ"):
            pending.check({"leaf": [HostChunk((slice(None),), values)]})
    assert record.audit.max_ulps > 10


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize(
    ("size", "added", "is_right"),
    [(1e-40, 1e-41, False), (1.0, 1e-15, False), (1e-29, 7e-37, True), (1e-307, 1e-308, True)],
)
def test_in_fp64_numbers_are_flushed_that_are_denormal_there(worker, size, added, is_right, dtype):
    """Or terms in fp32 that nobody misses, where the leaf is larger by far."""
    with enable_x64(True):
        auditor = Auditor(Audit(fraction=0.99), resources_of(worker))
        leaves = {"leaf": jnp.full(256, size, dtype)}
        pending = auditor.sample(leaves, SaveRecord(kind="window", reason="a test"))
    values = np.full(256, size, dtype)
    values[7] += added
    worker.wait_until_idle()
    if is_right:
        pending.check({"leaf": [HostChunk((slice(None),), values)]})
    else:
        with pytest.raises(AuditError, match="1 of 256 elements differ"):
            pending.check({"leaf": [HostChunk((slice(None),), values)]})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_rounding_is_not_excused(worker, value):
    _, pending, _ = audit_of(worker, max_relative_error=1.0)
    worker.wait_until_idle()
    chunks = off_by(0)
    chunks["leaf 3"][0].data[5] = value
    with pytest.raises(AuditError, match="by up to unlike values"):
        pending.check(chunks)


def test_what_is_no_number_is_bound_by_equality(worker):
    auditor = Auditor(Audit(max_relative_error=1.0), resources_of(worker))
    counts = {"count": jnp.arange(9)}
    pending = auditor.sample(counts, SaveRecord(kind="window", reason="a test"))
    worker.wait_until_idle()
    with pytest.raises(AuditError, match=r"`count`.* by up to unlike values"):
        pending.check(
            {"count": [HostChunk((slice(None),), np.arange(9) + np.eye(9, dtype=int)[1])]}
        )


def test_zeros_in_the_place_of_small_numbers_are_not_rounding(worker):
    auditor = Auditor(Audit(max_relative_error=1e-3), resources_of(worker))
    pending = auditor.sample({"w": jnp.full(9, 1e-9)}, SaveRecord(kind="window", reason="a test"))
    worker.wait_until_idle()
    with pytest.raises(AuditError, match=r"`w`.* 9 of 9 elements differ"):
        pending.check({"w": [HostChunk((slice(None),), np.zeros(9, np.float32))]})


def test_a_leaf_of_zeros_has_no_scale(worker):
    """As where nothing was replayed: it differs all the same, whatever the bound."""
    _, pending, record = audit_of(worker, max_relative_error=1.0)
    worker.wait_until_idle()
    zeros = [HostChunk((slice(None),), np.zeros(256, np.float32))]
    with pytest.raises(AuditError, match=r"`leaf 3`.* 256 of 256 elements differ"):
        pending.check(RIGHT | {"leaf 3": zeros})
    assert record.audit.max_relative_error == 258.0


def test_pull_that_fails_fails_the_check(worker, monkeypatch):
    def fails(pull):
        raise OSError("gone")

    monkeypatch.setattr(Pull, "result", fails)
    resources = resources_of(worker)
    _, pending, _ = audit_of(worker, resources)
    worker.wait_until_idle()
    assert (resources.device.used_bytes, resources.host.used_bytes) == (0, 0)
    with pytest.raises(OSError, match="gone"):
        pending.check(RIGHT)


def test_sample_that_cannot_be_taken_gives_its_room_back(worker, monkeypatch):
    def fails(cuts):
        raise MemoryError("full")

    monkeypatch.setattr("gockpt_jax.window.audit.start_sample", fails)
    resources = resources_of(worker)
    auditor = Auditor(Audit(), resources)
    with pytest.raises(MemoryError, match="full"):
        auditor.sample(LEAVES, SaveRecord(kind="window", reason="a test"))
    worker.wait_until_idle()
    assert (resources.device.used_bytes, resources.host.used_bytes) == (0, 0)


def test_nothing_to_compare(worker):
    record = SaveRecord(kind="window", reason="a test")
    assert Auditor(None, resources_of(worker)).sample(LEAVES, record) is None
    assert Auditor(Audit(), resources_of(worker)).sample({}, record) is None
    assert record.audit is None


def test_a_group_is_late_whichever_of_its_leaves_was_demoted(worker):
    """As a whole, and with the first reason: the replay of its leaves reads all of them."""
    auditor = Auditor(Audit(), resources_of(worker))
    groups = [types.SimpleNamespace(leaves=leaves) for leaves in ((0, 1), (2,), (3,))]
    cut: Any = types.SimpleNamespace(groups=groups, paths=["a", "b", "c", "d"])
    late = LateGroups(cut, auditor)
    late.heed_demotions()
    assert late.reasons == ()
    assert auditor._demote(SaveRecord(kind="window", reason="a test"), "b")
    late.heed_demotions()
    state = [object() for _ in range(4)]
    late.look_for_replaced({1: 0, 2: 1, 3: 2}, [*state[:1], object(), object(), state[3]], state)
    assert [group in late for group in range(3)] == [True, True, False]
    assert [why.partition(":")[0] for why in late.reasons] == ["b", "c"]
    assert "audit" in late.reasons[0]


@pytest.mark.parametrize(
    "other", [jnp.zeros((4, 64)), jnp.zeros(256, jnp.bfloat16)], ids=["shape", "dtype"]
)
def test_leaves_that_are_others_now_begin_again(worker, other):
    """Their boxes are cut by what they are."""
    auditor = Auditor(Audit(), resources_of(worker))
    for leaf in (jnp.zeros(256), other, jnp.zeros(256)):
        ((_, piece),) = auditor._next_boxes({"w": leaf}, 1 / 16)
        assert piece.shape == leaf.shape
    assert len(auditor._rotas) == 2


def test_what_has_landed_is_given_back_where_the_rest_cannot_be_taken(worker, monkeypatch):
    start, started = audit.start_sample, []

    def fails_behind_the_first(probes):
        started.append(probes)
        if len(started) == 2:
            worker.wait_until_idle()
            raise MemoryError("full")
        return start(probes)

    monkeypatch.setattr(audit, "start_sample", fails_behind_the_first)
    resources = resources_of(worker, 2500)
    with pytest.raises(MemoryError, match="full"):
        audit_of(worker, resources)
    worker.wait_until_idle()
    assert (resources.device.used_bytes, resources.host.used_bytes) == (0, 0)
