"""Replicas share what leaves: the slices are Orbax's, and every element is taken once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import FIRST_ALONE, owned_shards
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gockpt_jax.storage.writing.array_layout import ReplicaLayout
from gockpt_jax.transfer import replicas
from gockpt_jax.transfer.block import block_of
from gockpt_jax.transfer.chunks import Chunk
from gockpt_jax.transfer.replicas import Replicas

P = PartitionSpec
SHARED = Replicas(ReplicaLayout(use_replica_parallel=True).write_shape)


@functools.cache
def mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((2, 1, 4), ("a", "one", "b"), axis_types=(axis_type,) * 3)


def put(shape, spec, dtype=np.float32, axis_type=AxisType.Auto, **kwargs):
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    return jax.device_put(values, NamedSharding(mesh(axis_type), spec, **kwargs))


def boxes_of(replicas, array):
    return [*replicas.source(array).owned.values()]


@pytest.fixture(autouse=True)
def small_scale(monkeypatch):
    monkeypatch.setattr(replicas, "MIN_SLICE_ELEMENTS", 16)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    ("shape", "spec", "axis", "slices"),
    [
        ((64, 6), P(), 0, 8),
        ((3, 64, 5), P(), 1, 8),
        ((6, 64), P("a"), 1, 4),
        ((32, 8), P("a"), 0, 4),
        ((32, 8), P(None, "b"), 0, 2),
        ((8, 16), P("b", None), 0, 2),
        ((64, 4), P(("b", "one")), 0, 2),
    ],
    ids=str,
)
def test_slices_are_those_that_orbax_has_replicas_write(shape, spec, axis, slices, axis_type):
    """The formula is that of Orbax's `get_replica_slices`."""
    array = put(shape, spec, axis_type=axis_type)
    want = {}
    for shard in array.addressable_shards:
        size = shard.data.shape[axis] // slices
        start = (shard.index[axis].start or 0) + shard.replica_id * size
        index = (*shard.index[:axis], slice(start, start + size), *shard.index[axis + 1 :])
        want[shard.device] = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
    found = SHARED.pieces(array)
    assert [p.index for p in found] == boxes_of(SHARED, array)
    boxes = {
        next(iter(p.shard.devices())): tuple(
            s.indices(n)[:2] for s, n in zip(p.index, shape, strict=True)
        )
        for p in found
    }
    assert boxes == want
    for p in found:
        cut = tuple(slice(a, a + n) for a, n in zip(p.start, p.shape, strict=True))
        np.testing.assert_array_equal(np.asarray(p.shard)[cut], np.asarray(array)[p.index])
    assert SHARED.source(array).owned_bytes == array.nbytes


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_each_device_moves_its_slice(axis_type, moved):
    arrays = [put((64, 80), s, axis_type=axis_type) for s in (P(), P("a"), P(None, "b"))]
    block = block_of([Chunk.whole(SHARED.source(a)) for a in arrays])
    with jax.set_mesh(mesh(axis_type)):
        found = block.start_pull(block.stage(arrays)).result()
    assert dict(moved) == dict.fromkeys(jax.devices(), sum(a.nbytes for a in arrays) // 8)
    assert block.staged_bytes == sum(a.nbytes for a in arrays) // 8
    for array, chunks in zip(arrays, found, strict=True):
        assert [c.index for c in chunks] == boxes_of(SHARED, array)
        for chunk in chunks:
            np.testing.assert_array_equal(chunk.data, np.asarray(array)[chunk.index].reshape(-1))


def test_what_the_first_replica_takes_alone(monkeypatch):
    whole = put((64, 6), P())
    layouts = [
        ReplicaLayout(use_replica_parallel=False),
        ReplicaLayout(use_replica_parallel=True, max_replicas=4),
        ReplicaLayout(use_replica_parallel=True, min_slice_bytes=1000),
    ]
    for alone in (Replicas(layout.write_shape) for layout in layouts):
        assert alone.source(whole).travels_by is whole.sharding
        assert boxes_of(alone, whole) == [(slice(None), slice(None))]
    for array in (
        put((63, 5), P()),  # no axis for eight
        put((8, 15), P()),  # slices of 15 elements
        put((64, 8), P("a", "b")),  # no replicas
        put((), P()),
        put((8,), P(("a", "b"))),
        put((0, 8), P()),
        put((64, 64), P(), jnp.int4),
        put((64, 128), P(), memory_kind="pinned_host"),
        jnp.zeros((64, 64)),
        jax.device_put(jax.random.split(jax.random.key(0), 64), whole.sharding),
    ):
        assert SHARED.source(array).travels_by == array.sharding
        assert boxes_of(SHARED, array) == boxes_of(FIRST_ALONE, array)
        assert boxes_of(SHARED, array) == [s.index for s in owned_shards(array)]
    for array in (whole, put((64, 8), P("a", "b"))):
        assert {p.start for p in FIRST_ALONE.pieces(array)} == {(0, 0)}
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh(), P("a")))
    # As they are stored.
    assert boxes_of(SHARED, keys) == boxes_of(SHARED, jax.random.key_data(keys))
    monkeypatch.undo()
    for dtype in ("float32", "bfloat16"):  # of a parameter and its moments
        for columns, alone in ((2**19, False), (2**19 - 1, True)):
            spec = jax.ShapeDtypeStruct((8, columns), dtype, sharding=whole.sharding)
            assert SHARED.source(spec).travels_by.is_fully_replicated == alone
            assert SHARED.source(spec).dtype == dtype
        array = put((64, 6), P(), jnp.dtype(dtype))
        assert SHARED.source(array).owned_bytes == array.nbytes


def test_of_ever_new_shapes_few_are_remembered(monkeypatch):
    """As of programs: a loop may save another shape each time, as long as it runs."""
    monkeypatch.setattr(replicas, "REMEMBERED", 4)
    found = Replicas(ReplicaLayout(use_replica_parallel=True).write_shape)
    arrays = [
        jax.ShapeDtypeStruct((n,), np.float32, sharding=put((), P()).sharding) for n in range(9)
    ]
    for array in [*arrays, *arrays]:
        assert found.source(array).shape == array.shape
        assert len(found._sources) <= 4
