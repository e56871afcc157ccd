"""Staging and pulls: fresh buffers, owned shards, whole arrays on the host."""

from __future__ import annotations

import math
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import FIRST_ALONE, owned_shards
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from gockpt_jax.transfer import pull as pulls
from gockpt_jax.transfer.chunks import Source, in_host_memory
from gockpt_jax.transfer.meter import LinkMeter
from gockpt_jax.transfer.pull import HostChunk, Pull, reshard
from gockpt_jax.transfer.staging import stage

P = PartitionSpec
MESH = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
VALUES = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
LAYOUTS = {
    "replicated": (P(), 1, 8),
    "fsdp": (P("fsdp"), 4, 2),
    "tensor": (P(None, "tensor"), 2, 4),
    "both": (P("fsdp", "tensor"), 8, 1),
    "both on one axis": (P(("fsdp", "tensor")), 8, 1),
}
every_layout = pytest.mark.parametrize(("spec", "parts", "replicas"), LAYOUTS.values(), ids=LAYOUTS)


def put(values, spec):
    return jax.device_put(values, NamedSharding(MESH, spec))


def pointers(array):
    return [s.data.unsafe_buffer_pointer() for s in array.addressable_shards]


def start_pull(array):
    """The shards of an array that this process owns, on their way."""
    shards = owned_shards(array)
    indices = [s.index for s in shards]
    return Pull([s.data for s in shards], lambda found: [*map(HostChunk, indices, found)])


def assemble(array, chunks):
    """The array from its chunks, each element exactly once."""
    whole, times = np.zeros(array.shape, array.dtype), np.zeros(array.shape, int)
    for chunk in chunks:
        whole[chunk.index] = chunk.data
        times[chunk.index] += 1
    assert (times == 1).all()
    return whole


@every_layout
def test_owned_shards_are_one_replica(spec, parts, replicas):
    array = put(VALUES, spec)
    shards = owned_shards(array)
    assert len(shards) == parts
    assert len(array.addressable_shards) == parts * replicas
    assert sum(math.prod(s.data.shape) for s in shards) == VALUES.size
    assert FIRST_ALONE.source(array).owned_bytes == VALUES.nbytes
    assert Source.of(array).shard_bytes == VALUES.nbytes // parts


@every_layout
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_chunks_assemble_to_the_array(spec, parts, replicas, dtype):
    array = put(VALUES.astype(jnp.dtype(dtype)), spec)
    chunks = start_pull(array).result()
    assert len(chunks) == parts
    np.testing.assert_array_equal(assemble(array, chunks), np.asarray(array))


def test_empty_arrays():
    (chunk,) = start_pull(jnp.zeros((0, 3))).result()
    assert chunk.data.shape == (0, 3)


@every_layout
def test_align_gives_the_leafs_placement(spec, parts, replicas):
    leaf = put(VALUES, spec)
    aligned = reshard(put(VALUES, P(None, "tensor")), leaf.sharding)
    assert [s.index for s in owned_shards(aligned)] == [s.index for s in owned_shards(leaf)]
    np.testing.assert_array_equal(aligned, VALUES)


def test_align_moves_nothing_that_is_in_place():
    """Equivalent is enough: specifications are spelt in many ways."""
    array = put(VALUES, P("fsdp"))
    assert reshard(array, NamedSharding(MESH, P("fsdp", None))) is array


@pytest.mark.skipif(
    not hasattr(pulls.host_memory_kind, "__wrapped__"), reason="`make pretended` has its own"
)
@pytest.mark.parametrize(
    ("platform", "kinds", "wanted"),
    [
        ("gpu", ("device", "pinned_host"), "pinned_host"),
        ("gpu", ("device",), None),
        ("cpu", ("device", "pinned_host"), None),
    ],
)
def test_pulls_go_to_pinned_memory_where_there_is_such(platform, kinds, wanted):
    memories = [types.SimpleNamespace(kind=kind) for kind in kinds]
    device = types.SimpleNamespace(platform=platform, addressable_memories=lambda: memories)
    assert pulls.host_memory_kind.__wrapped__(device) == wanted


class Buffer:
    """One of a device that has no pinned memory beside it."""

    sharding = SingleDeviceSharding(jax.devices()[2])
    started = 0

    def devices(self):
        return {jax.devices()[2]}

    def copy_to_host_async(self):
        self.started += 1

    def is_ready(self):
        return bool(self.started)

    def __array__(self, *args, **kwargs):
        return np.zeros(3)


def test_elsewhere_they_start_on_the_buffer_itself(monkeypatch):
    monkeypatch.setattr(pulls, "host_memory_kind", lambda device: None)
    buffer = Buffer()
    assert pulls.start_buffer(buffer) is buffer
    assert buffer.started == 1
    monkeypatch.setattr(pulls, "_warn_of_a_full_pool", lambda: pytest.fail("there is none"))
    (found,) = pulls.Pull([jnp.asarray(VALUES)], list).result()
    np.testing.assert_array_equal(found, VALUES)


def test_what_goes_to_pinned_memory_arrives_there(monkeypatch):
    monkeypatch.setattr(pulls, "host_memory_kind", lambda device: "pinned_host")
    buffer = jax.device_put(VALUES, jax.devices()[2])
    pinned = pulls.start_buffer(buffer)
    assert pinned.sharding == SingleDeviceSharding(jax.devices()[2], memory_kind="pinned_host")
    np.testing.assert_array_equal(pinned, VALUES)


def test_what_the_host_holds_is_not_copied_there(monkeypatch):
    monkeypatch.setattr(pulls, "host_memory_kind", lambda device: "pinned_host")
    there = SingleDeviceSharding(jax.devices()[2], memory_kind="unpinned_host")
    array = jax.device_put(VALUES, there)
    assert in_host_memory(there)
    assert pulls.start_buffer(array) is array


@pytest.mark.parametrize("arrived", [(), (True, True), (True, False), (False, True)], ids=str)
def test_a_pull_is_ready_when_all_of_it_is(monkeypatch, arrived):
    monkeypatch.setattr(pulls, "start_buffer", lambda buffer: buffer)
    buffers = [types.SimpleNamespace(is_ready=lambda here=here: here) for here in arrived]
    assert Pull(buffers, list).is_ready() == (False not in arrived)


@pytest.mark.parametrize("kind", ["pinned_host", None])
def test_what_has_arrived_holds_nothing_on_the_device(monkeypatch, kind):
    """Its bytes are given back to the budget, while some may hold the pull."""
    monkeypatch.setattr(pulls, "host_memory_kind", lambda device: kind)
    source = Buffer() if kind is None else jax.device_put(VALUES, jax.devices()[2])
    pull, is_held = Pull([source], list), weakref.ref(source)
    del source
    (found,) = pull.result()
    assert is_held() is None
    assert found.shape == ((3,) if kind is None else VALUES.shape)


class Full:
    """Pinned memory of which there is no more: a call says so, or what it has returned."""

    def __init__(self, patch, when, what="RESOURCE_EXHAUSTED: Out of host memory."):
        patch.setattr(pulls, "host_memory_kind", lambda device: "pinned_host")
        patch.setattr(pulls.jax, "device_put", self.put)
        pulls._warn_of_a_full_pool.cache_clear()
        self.error, self.when, self.asked = jax.errors.JaxRuntimeError(what), when, 0

    def put(self, buffer, place):
        assert place.memory_kind == "pinned_host"
        self.asked += 1
        if self.when == "call":
            raise self.error
        return self

    def is_ready(self):
        return True

    def __array__(self, *args, **kwargs):
        raise self.error


@pytest.mark.parametrize("when", ["call", "result"])
def test_without_pinned_memory_a_pull_goes_by_ordinary_memory(monkeypatch, caplog, when):
    sources = [jax.device_put(VALUES + n, jax.devices()[n]) for n in range(3)]
    full = Full(monkeypatch, when)
    found = Pull(sources, list).result()
    assert full.asked == 3
    for n, values in enumerate(found):
        np.testing.assert_array_equal(values, VALUES + n)
    (said,) = [r.getMessage() for r in caplog.records if r.name == "gockpt_jax"]  # once
    assert "`XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB` says" in said


def test_what_could_not_be_copied_is_not_for_want_of_pinned_memory(monkeypatch, caplog):
    """Nor is it where pulls do not go there, or the call of the transfer finds out."""

    class Missing(Buffer):
        def __array__(self, *args, **kwargs):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 12345 bytes.")

    for kind, when in (("pinned_host", "result"), (None, "result"), ("pinned_host", "call")):
        Full(monkeypatch, when)
        monkeypatch.setattr(pulls, "host_memory_kind", lambda device, kind=kind: kind)
        with pytest.raises(jax.errors.JaxRuntimeError, match="12345 bytes"):
            Pull([Missing()], list).result()
    assert "pinned" not in caplog.text


@pytest.mark.parametrize("when", ["call", "result"])
def test_what_else_goes_wrong_in_a_pull_is_raised(monkeypatch, when):
    source = jax.device_put(VALUES, jax.devices()[2])
    Full(monkeypatch, when, "INTERNAL: an illegal memory access was encountered")
    with pytest.raises(jax.errors.JaxRuntimeError, match="illegal memory access"):
        Pull([source], list).result()


def test_a_pull_that_failed_holds_nothing(monkeypatch):
    """It would be a copy of the state, where there is no memory already."""
    source = jax.device_put(VALUES, jax.devices()[2])
    Full(monkeypatch, "result", "INTERNAL: an illegal memory access was encountered")
    pull, is_held = Pull([source], list), weakref.ref(source)
    del source
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        pull.result()
    caught.value.with_traceback(None)
    del caught
    assert is_held() is None


# Staging.


def state():
    key = jax.random.split(jax.random.key(3), 4)
    return [
        put(VALUES, P("fsdp")),
        jax.device_put(VALUES, SingleDeviceSharding(jax.devices()[5])),
        put(VALUES, P()),
        jnp.arange(4),
        put(VALUES.astype(jnp.bfloat16), P("fsdp", "tensor")),
        put(np.float32(1.0), P()),
        jax.device_put(key, NamedSharding(MESH, P("fsdp"))),
    ]


def test_staged_arrays_are_equal_in_new_buffers_of_the_same_placement():
    arrays = state()
    for original, copied in zip(arrays, stage(arrays), strict=True):
        assert copied is not original
        if jnp.issubdtype(original.dtype, jax.dtypes.prng_key):
            original = jax.random.key_data(original)
        assert copied.dtype == original.dtype
        assert copied.sharding.is_equivalent_to(original.sharding, original.ndim)
        assert set(pointers(copied)).isdisjoint(pointers(original))
        np.testing.assert_array_equal(copied, original)


def test_staged_copies_survive_donation():
    donating = jax.jit(lambda arrays: [x + 1 for x in arrays], donate_argnums=0)
    arrays = [put(VALUES, P("fsdp")), put(VALUES, P())]
    staged = stage(arrays)
    pulls = [start_pull(x) for x in staged]
    donating(arrays)
    assert all(x.is_deleted() for x in arrays)
    for pull, copied in zip(pulls, staged, strict=True):
        np.testing.assert_array_equal(assemble(copied, pull.result()), VALUES)


def test_one_array_twice_is_staged_twice():
    array = jnp.arange(4.0)
    first, second = stage([array, array])
    assert first.unsafe_buffer_pointer() != second.unsafe_buffer_pointer()
    assert stage([]) == []


def test_typed_keys_weigh_their_key_data():
    keys = jax.random.split(jax.random.key(0), 4)
    assert Source.of(keys).shard_bytes == jax.random.key_data(keys).nbytes
    assert Source.of(jax.random.key(0, impl="rbg")).shard_bytes == 16


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit"])
@pytest.mark.parametrize("spec", [P(), P("fsdp"), P("fsdp", "tensor")])
def test_no_transfer_is_guarded(spec, guard):
    """A user's `jax.transfer_guard` is about their loop, and must not stop a window."""
    array, other = put(VALUES, spec), put(VALUES, P(None, "tensor"))
    stage([array])  # compiles, which may move constants
    with jax.transfer_guard(guard):
        (copied,) = stage([array])
        chunks = start_pull(copied).result()
        reshard(other, array.sharding)
    np.testing.assert_array_equal(assemble(array, chunks), VALUES)


def test_the_link_is_measured_without_what_the_host_holds(monkeypatch):
    class Noting(LinkMeter):
        def begin(self, sources, is_done):
            seen.append([x.shape for x in sources])

        def end(self, chunks, num_devices):
            seen.append((sum(c.nbytes for c in chunks), num_devices))

    seen = []
    monkeypatch.setattr(pulls, "LINK", Noting())
    device = jax.devices()[2]
    there = jax.device_put(
        VALUES, SingleDeviceSharding(jax.devices()[3], memory_kind="pinned_host")
    )
    found = Pull([there, jax.device_put(VALUES[:2], device)], list).result()
    for data, want in zip(found, (VALUES, VALUES[:2]), strict=True):
        np.testing.assert_array_equal(data, want)
    assert seen == [[(2, 6)], (VALUES[:2].nbytes, 1)]
