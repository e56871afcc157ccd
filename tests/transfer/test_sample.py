"""Samples: boxes that cover a shard, and copies of them that are nobody else's buffers."""

from __future__ import annotations

import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import FIRST_ALONE
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gockpt_jax.compiling import Programs
from gockpt_jax.storage.writing.array_layout import ReplicaLayout
from gockpt_jax.transfer import pull as pulling
from gockpt_jax.transfer import replicas
from gockpt_jax.transfer import sample as sampling
from gockpt_jax.transfer.meter import LinkMeter
from gockpt_jax.transfer.replicas import Replicas
from gockpt_jax.transfer.sample import (
    MIN_BOX_BYTES,
    can_be_sampled,
    compile_samples_ahead,
    grid_of,
    kind_of,
    sample_bytes,
    start_sample,
)

SHAPES = [
    (),
    (1,),
    (5,),
    (100_000,),
    (3, 64, 512),
    (7, 1, 2000),
    (2, 3, 5, 7),
    (1, 30_000),
    (8192, 2),
]


@pytest.mark.parametrize("fraction", [1 / 64, 1 / 7, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_cover_the_shard_and_are_what_they_say(shape, fraction):
    values = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    grid = grid_of(shape, 4, fraction)
    seen = np.zeros(values.size, int)
    for box in range(grid.count):
        start = grid.start(box)
        cut = values[tuple(slice(s, s + n) for s, n in zip(start, grid.sizes, strict=True))]
        assert cut.shape == grid.sizes
        assert cut.reshape(-1).tolist() == values.reshape(-1)[grid.run(box)].tolist()
        seen[grid.run(box)] += 1
    assert seen.min() == 1
    wanted = max(MIN_BOX_BYTES, values.nbytes * fraction)
    assert min(wanted, values.nbytes) <= math.prod(grid.sizes) * 4 <= 2 * wanted
    assert grid.count <= 2 * math.ceil(1 / fraction) + 1


def probes_of(arrays, fraction, turn):
    pieces = [p for a in arrays for p in FIRST_ALONE.pieces(a)]
    grids = [grid_of(p.shape, p.shard.dtype.itemsize, fraction) for p in pieces]
    return [(p, g, turn % g.count) for p, g in zip(pieces, grids, strict=True)]


def arrays_on(mesh):
    specs = [PartitionSpec("a"), PartitionSpec(None, "b"), PartitionSpec(), PartitionSpec("a", "b")]
    values = np.arange(64 * 512).reshape(64, 512)
    dtypes = ["float32", "bfloat16", "int8", "float32"]
    return [
        jax.device_put(values.astype(jnp.dtype(d)), NamedSharding(mesh, s))
        for s, d in zip(specs, dtypes, strict=True)
    ]


@pytest.mark.parametrize("devices", [(4, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_samples_are_the_boxes_and_new_buffers(axis_type, devices):
    """Also where the trainer has set a mesh and forbidden transfers."""
    mesh = jax.make_mesh(devices, ("a", "b"), axis_types=(axis_type,) * 2)
    # Results of a step: those of one device leave their shards the array's own sharding.
    arrays = [jax.jit(lambda x: x, out_shardings=a.sharding)(a) for a in arrays_on(mesh)]
    probes = probes_of(arrays, 1 / 4, turn=3)
    want = [np.array(p.shard).reshape(-1)[g.run(box)] for p, g, box in probes]
    with jax.set_mesh(mesh), jax.transfer_guard("disallow_explicit"):
        sample = start_sample(probes)
        for array in arrays:
            array.delete()  # as a step that it is donated to does
    for got, expected in zip(sample.result(), want, strict=True):
        assert got.dtype == expected.dtype
        assert got.tobytes() == expected.tobytes()


def test_samples_of_slices_that_replicas_take(monkeypatch):
    monkeypatch.setattr(replicas, "MIN_SLICE_ELEMENTS", 16)
    shared = Replicas(ReplicaLayout(use_replica_parallel=True).write_shape)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    values = np.arange(64 * 512, dtype=np.float32).reshape(64, 512)
    array = jax.device_put(values, NamedSharding(mesh, PartitionSpec()))
    pieces = shared.pieces(array)
    probes = [(p, grid_of(p.shape, 4, 1.0), 0) for p in pieces]
    assert len(probes) == 8
    for piece, got in zip(pieces, start_sample(probes).result(), strict=True):
        np.testing.assert_array_equal(got, values[piece.index].reshape(-1))
    (whole,) = FIRST_ALONE.pieces(array)  # boxes of it are others, so is the program
    assert kind_of(whole) != kind_of(pieces[0])


def test_bytes_are_those_of_the_fullest_device():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    probes = probes_of(arrays_on(mesh), 1.0, turn=0)
    # Rows over "a" are owned by four devices, columns over "b" by two, the replicated by one.
    elements = 64 * 512
    assert (
        sample_bytes(probes) == elements * 4 // 4 + elements * 2 // 2 + elements + elements * 4 // 8
    )
    assert sample_bytes([]) == 0


def test_the_link_learns_of_a_sample_as_of_one_transfer_from_all_its_devices(monkeypatch):
    class Noting(LinkMeter):
        def end(self, chunks, num_devices):
            seen.append((sum(c.nbytes for c in chunks), num_devices))

    seen = []
    monkeypatch.setattr(pulling, "LINK", Noting())
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    probes = probes_of(arrays_on(mesh), 1.0, turn=0)
    found = start_sample(probes).result()
    assert seen == [(sum(box.nbytes for box in found), 8)]


def test_a_scalar_is_a_box():
    (got,) = start_sample(probes_of([jnp.int32(7)], 1 / 64, turn=5)).result()
    assert got.tolist() == [7]


def test_keys_and_packed_numbers_are_left_out():
    arrays = [jax.random.key(0), jnp.zeros(4, "int4"), jnp.zeros(4, "int8"), jnp.zeros(4, bool)]
    assert [can_be_sampled(a) for a in arrays] == [False, False, True, True]


def test_what_was_compiled_ahead_is_used(monkeypatch):
    programs = Programs("gockpt-compile-samples", sampling._compile)
    monkeypatch.setattr(sampling, "_programs", programs)
    arrays = [jnp.arange(3000.0), jnp.ones((5, 7)), jax.random.key(0)]
    assert compile_samples_ahead(arrays, 1 / 2, FIRST_ALONE, None)
    for thread in threading.enumerate():
        if thread.name == "gockpt-compile-samples":
            thread.join()
    before = dict(programs._found)
    assert len(before) == 1
    start_sample(probes_of(arrays[:2], 1 / 2, turn=1)).result()
    assert programs._found == before


@pytest.mark.parametrize("donated", [0, 1])
def test_of_what_has_been_donated_nothing_is_compiled_ahead(monkeypatch, donated):
    """The next save compiles it, of those that are there then."""
    programs = Programs("gockpt-compile-samples", sampling._compile)
    monkeypatch.setattr(sampling, "_programs", programs)
    arrays = [jnp.arange(3000.0), jnp.ones((5, 7))]
    arrays[donated].delete()
    assert not compile_samples_ahead(arrays, 1 / 2, FIRST_ALONE, None)
    assert not programs._found


@pytest.mark.parametrize("donated", [0, 1])
def test_what_is_donated_while_it_is_looked_at_is_no_error(monkeypatch, donated):
    """By a step on another thread, which holds no lock while it is dispatched."""
    arrays = [jnp.arange(3000.0), jnp.ones((5, 7))]

    def is_asked(array):
        arrays[donated].delete()
        return True

    monkeypatch.setattr(sampling, "can_be_sampled", is_asked)
    assert not compile_samples_ahead(arrays, 1 / 2, FIRST_ALONE, None)


def test_other_errors_of_a_look_ahead_are_raised(monkeypatch):
    def fails(array):
        raise RuntimeError("not of what is donated")

    monkeypatch.setattr(sampling, "can_be_sampled", fails)
    with pytest.raises(RuntimeError, match="not of what"):
        compile_samples_ahead([jnp.ones(3)], 1 / 2, FIRST_ALONE, None)
