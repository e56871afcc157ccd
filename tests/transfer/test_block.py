"""Blocks: what leaves arrives, in fresh buffers, each byte once, shared among replicas."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import owned_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding
from seeded import SEEDED

from gockpt_jax.compiling import Programs
from gockpt_jax.transfer import block as blocks
from gockpt_jax.transfer import layout, packing, pull
from gockpt_jax.transfer.block import block_of
from gockpt_jax.transfer.chunks import Chunk, Source, in_host_memory, row_ranges, row_size

P = PartitionSpec
MESH = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
# The same devices, and other shards.
TURNED = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
LINE = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def small_scale(monkeypatch):
    """Sizes at which small arrays are large, and no blocks of other scales."""
    monkeypatch.setattr(layout, "MIN_SLICE_BYTES", 64)
    for module in (layout, blocks):
        monkeypatch.setattr(module, "LARGE_BYTES", 512)
    monkeypatch.setattr(blocks, "_made", functools.cache(blocks.Block))


def on(mesh, spec):
    return NamedSharding(mesh, spec)


def put(values, spec, mesh=MESH, **kwargs):
    return jax.device_put(values, NamedSharding(mesh, spec, **kwargs))


def arrays():
    """Every kind of array that a state may hold."""
    normal = RNG.standard_normal
    return [
        put(normal((8, 6)).astype(np.float32), P("a")),
        put(normal((8, 6)).astype(np.float32), P(None, "b")),
        put(normal((64, 13)).astype(np.float32), P()),
        put(normal((3, 5, 7)).astype(np.float32), P()),
        put(normal((16, 24)).astype(np.float32), P(("b", "a"))),
        put(normal((8, 6)).astype(jnp.bfloat16), P("a", "b")),
        put(normal((8, 6)).astype(jnp.float8_e4m3fn), P("a")),
        put(np.float32(2.5), P()),
        put(RNG.integers(0, 2, 5).astype(bool), P()),
        put(np.zeros((0, 3), np.float32), P()),
        put(jax.random.split(jax.random.key(3), 8), P("b")),
        put(jax.random.split(jax.random.key(4), 512), P(("a", "b"))),
        put(jnp.arange(8).astype(jnp.int4), P("a")),
        put(np.arange(8.0, dtype=np.float32), P("b"), memory_kind="pinned_host"),
        put(normal((8, 8)).astype(np.float32), P("a", "b")),
        put(normal((8, 8)).astype(np.float32), P("a", "b"), TURNED),
        put(normal((16, 3)).astype(np.float32), P("a"), LINE),
        jax.device_put(jnp.arange(7), jax.devices()[3]),
        jax.random.key(1),
    ]


def parts_of(array, parts):
    source = Source.of(array)
    return [(array, Chunk(source, *rows)) for rows in row_ranges(source.shard_shape, parts)]


def assert_arrived(pairs, found):
    for (array, chunk), parts in zip(pairs, found, strict=True):
        stored = jax.random.key_data(array) if chunk.source.is_key else array
        shards = owned_shards(stored)
        assert [p.index for p in parts] == [s.index for s in shards]
        for part, shard in zip(parts, shards, strict=True):
            want = np.array(shard.data).reshape(-1)[chunk.start : chunk.stop]
            assert (part.data.dtype, part.data.tobytes()) == (want.dtype, want.tobytes())


def assert_arrive(arrays):
    """All of one block."""
    pairs = [(x, Chunk.whole(Source.of(x))) for x in arrays]
    block = block_of([chunk for _, chunk in pairs])
    assert_arrived(pairs, block.start_pull(block.stage(arrays)).result())


@pytest.mark.parametrize("donatable", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_chunks_arrive_under_the_users_mesh_and_guard(parts, donatable):
    pairs = [pair for array in arrays() for pair in parts_of(array, parts)]
    block = block_of([chunk for _, chunk in pairs], donatable=donatable)
    given_arrays = [array for array, _ in pairs]
    block.compile_ahead()
    with jax.set_mesh(MESH):
        block.stage(given_arrays)  # numbers that are packed compile here, and may move constants
        with jax.transfer_guard("disallow_explicit"):
            pulled = block.start_pull(block.stage(given_arrays))
    assert_arrived(pairs, pulled.result())


@pytest.mark.parametrize("other", [(4, 2), (8, 1)])
def test_meshes_of_the_same_devices_under_one_of_them(other):
    """Whatever their axes' types, and where a leaf lies on another one than its gradient."""
    shapes = {AxisType.Auto: [(4, 2), other], AxisType.Explicit: [(4, 2), other]}
    meshes = [jax.make_mesh(s, ("a", "b"), (t,) * 2) for t, of in shapes.items() for s in of]
    arrays = [put(RNG.standard_normal((8, 8)).astype(np.float32), P("a", "b"), m) for m in meshes]
    pairs = [(x, Chunk.whole(Source.of(x))) for x in arrays]
    block = block_of([chunk for _, chunk in pairs])
    gradients = [Source.of(x, y.sharding) for x, y in itertools.product(arrays, arrays)]
    follow = block_of([Chunk.whole(s) for s in gradients], donatable=False)
    with jax.set_mesh(meshes[2]):
        assert_arrived(pairs, block.start_pull(block.stage(arrays)).result())
        given = [x for x, _ in itertools.product(arrays, arrays)]
        found = follow.start_pull(follow.stage(given)).result()
    for array, parts in zip(given, found, strict=True):
        assert len(parts) == 8
        for part in parts:
            np.testing.assert_array_equal(part.data, np.asarray(array)[part.index].reshape(-1))


def test_what_pmap_returned():
    """An older JAX cuts it by a sharding of its own, which knows one number of axes."""
    arrays = jax.pmap(lambda n: (n * jnp.ones(3), jax.random.key(n)))(jnp.arange(8))
    assert_arrive(arrays)


def test_packed_numbers_on_the_same_devices_in_another_order():
    """They are staged as wholes, by a program for each order."""
    turned = jax.sharding.Mesh(MESH.devices[::-1], MESH.axis_names)
    values = RNG.integers(-8, 8, (8, 6)).astype(jnp.int4)
    arrays = [put(values, P("a"), mesh) for mesh in (MESH, turned, MESH)]
    assert_arrive(arrays)


@pytest.mark.parametrize("spec", [P("a"), P()])
def test_every_nan_stays_the_nan_it_is(spec, monkeypatch):
    """The CPU backend joins and slices narrow numbers in wider ones, which makes one NaN of all."""
    monkeypatch.setattr(layout, "LARGE_BYTES", 2**20)
    monkeypatch.setattr(layout, "MIN_SLICE_BYTES", 2**20)  # they share buffers
    narrow = (jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)
    patterns = [np.arange(2**16).astype(f"u{np.dtype(t).itemsize}").view(t) for t in narrow]
    arrays = [put(x.reshape(64, -1), spec) for x in patterns for _ in range(2)]
    assert_arrive(arrays)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e5m2])
def test_every_nan_stays_the_nan_it_is_in_rows_of_one_argument(dtype):
    itemsize = np.dtype(dtype).itemsize
    patterns = np.arange(2 ** min(16, 8 * itemsize)).astype(f"u{itemsize}").view(dtype)
    array = jnp.asarray(patterns.reshape(64, -1))
    pairs = parts_of(array, 4)
    block = block_of([chunk for _, chunk in pairs], [0] * len(pairs))
    found = block.start_pull(block.stage([array] * len(pairs))).result()
    bits = np.concatenate([part.data.view(f"u{itemsize}") for (part,) in found])
    np.testing.assert_array_equal(bits, patterns.view(bits.dtype))


def test_where_joining_is_arithmetic_wider_floats_are_joined_as_integers(monkeypatch):
    """As by a TPU's compiler, which pads arrays and takes the larger."""
    monkeypatch.setitem(packing._ARITHMETIC_BYTES, "cpu", 4)
    bits = RNG.integers(0, 2**32, (2, 40), np.uint32)
    arrays = [jnp.asarray(x.view(np.float32)) for x in bits]
    chunks = [Chunk.whole(Source.of(x)) for x in arrays]
    parts = list(zip(chunks, (0, 1), strict=True))
    buffers = layout.lay_out(chunks)
    program = packing.compile_packing([c.source for c in chunks], parts, buffers)
    (buffer,) = program(*arrays)
    for offset, wanted in zip(buffers[0].offsets, bits, strict=True):
        found = np.asarray(buffer)[offset : offset + wanted.size]
        np.testing.assert_array_equal(found.view(np.uint32), wanted)
    assert " = u32[96]{0} concatenate(" in program.as_text()


@pytest.mark.parametrize(
    ("platform", "count", "held"), [("cpu", 1, False), ("cpu", 2, True), ("tpu", 2, False)]
)
def test_floats_are_not_joined_before_they_are_taken_for_integers(
    platform, count, held, monkeypatch
):
    """A TPU's compiler did before there was a barrier (`bench aot`); others need none."""
    monkeypatch.setitem(packing._ARITHMETIC_BYTES, platform, 4)
    arrays = [jnp.zeros(40) for _ in range(count)]
    chunks = [Chunk.whole(Source.of(x)) for x in arrays]
    buffers = layout.lay_out(chunks)
    pack = functools.partial(packing._pack, [*zip(chunks, range(count), strict=True)], buffers)
    joins = [
        equation.invars
        for equation in jax.make_jaxpr(pack)(*arrays).eqns
        if equation.primitive.name == "optimization_barrier"
    ]
    assert [len(rows) for rows in joins] == ([count] if held else [])


@pytest.mark.parametrize("donatable", [True, False])
def test_rows_of_one_array_are_cut_from_one_argument(donatable):
    """A compiler that adds arguments up must not see an array once for each of its chunks."""
    shape, spec = (16, 48), P("a")  # alike, so that only their numbers tell them apart
    ours = [put(RNG.standard_normal(shape).astype(np.float32), spec) for _ in range(3)]
    pairs = [pair for array in ours for pair in parts_of(array, 3)]
    numbers = [n for n in range(3) for _ in range(3)]
    block = block_of([chunk for _, chunk in pairs], numbers, donatable=donatable)
    (program,) = block.programs()
    assert len(program.input_shardings[0]) == 3
    pulled = block.start_pull(block.stage([array for array, _ in pairs]))
    assert_arrived(pairs, pulled.result())


def test_one_array_may_travel_by_the_shards_of_two_leaves():
    """As a gradient does that updates leaves which lie otherwise."""
    gradient = put(RNG.standard_normal((16, 8)).astype(np.float32), P())
    sources = [Source.of(gradient, on(MESH, spec)) for spec in (P("a", "b"), P("b", "a"))]
    block = block_of([Chunk.whole(s) for s in sources], [0, 0], donatable=False)
    for parts in block.start_pull(block.stage([gradient] * 2)).result():
        assert len(parts) == 8
        for part in parts:
            want = np.asarray(gradient)[part.index].reshape(-1)
            np.testing.assert_array_equal(part.data, want)


@pytest.mark.parametrize("spec", [P("a"), P()])
def test_arrays_laid_out_as_the_user_asked(spec, monkeypatch):
    """They are packed from where they lie: of a copy of all of one no budget would know."""
    programs = Programs("gockpt-compile-copies", blocks.compile_packing)
    monkeypatch.setattr(blocks, "_programs", programs)
    values = RNG.standard_normal((8, 6)).astype(np.float32)
    columns = Format(Layout(major_to_minor=(1, 0)), NamedSharding(MESH, spec))
    pairs = [pair for x in (values, -values) for pair in parts_of(jax.device_put(x, columns), 2)]
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(MESH, spec))
    given_arrays = [*(array for array, _ in pairs), keys]
    block = block_of([*(chunk for _, chunk in pairs), Chunk.whole(Source.of(keys))])
    for _ in range(2):
        *found, of_keys = block.start_pull(block.stage(given_arrays)).result()
        assert_arrived(pairs, found)
        for part in of_keys:
            np.testing.assert_array_equal(part.data, jax.random.key_data(keys)[part.index].ravel())
    asked_for = [made_from[3:] for made_from in programs._found]
    assert [len(layouts) for (*layouts,) in asked_for] == [0, 1], "as JAX has them, and as they are"


def test_staged_buffers_are_new_and_weighed_to_the_byte():
    pairs = [pair for array in arrays() if array.ndim for pair in parts_of(array, 2)]
    block = block_of([chunk for _, chunk in pairs])
    staged = block.stage([array for array, _ in pairs])
    taken = {s.data.unsafe_buffer_pointer() for a, _ in pairs for s in a.addressable_shards}
    on_device = collections.Counter()
    for buffer in staged:
        for shard in buffer.addressable_shards:
            assert not shard.data.size or shard.data.unsafe_buffer_pointer() not in taken
            if not in_host_memory(shard.data.sharding):  # the host has its own copy
                on_device[shard.device] += shard.data.nbytes
    # Arrays of one device weigh on that one alone; int4 takes a byte here.
    assert on_device[jax.devices()[3]] == block.staged_bytes == block.held_bytes


@pytest.mark.parametrize("size", [4, 300])
def test_a_buffer_of_one_flat_array_is_new_too(size):
    """Its program has nothing to do but to return it."""
    array = jnp.arange(float(size))
    (staged,) = block_of([Chunk.whole(Source.of(array))]).stage([array])
    assert staged.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
    np.testing.assert_array_equal(staged, array)


@pytest.mark.parametrize(
    ("spec", "parts", "donatable"),
    [
        *itertools.product([P(), P("a"), P("b"), P("a", "b")], [1], [True, False]),
        (P("a", "b"), 3, False),
    ],
)
def test_replicas_share_the_transfer(spec, parts, donatable, moved):
    """Each device moves its part of the array, and all of it leaves once."""
    array = put(RNG.standard_normal((64, 80)).astype(np.float32), spec)
    pairs = parts_of(array, parts)
    block = block_of([chunk for _, chunk in pairs], donatable=donatable)
    found = block.start_pull(block.stage([array] * parts)).result()
    assert_arrived(pairs, found)
    assert dict(moved) == dict.fromkeys(jax.devices(), array.nbytes // 8)
    assert block.held_bytes == array.nbytes // 8
    # What nobody donates and leaves as it lies needs no copy.
    needs_none = not donatable and parts == 1 and spec == P("a", "b")
    assert block.staged_bytes == (0 if needs_none else array.nbytes // 8)


@pytest.mark.parametrize(
    ("least_bytes", "sizes", "devices", "most_bytes"),
    [
        (64, [16] * 16, 8, 128), (256, [16] * 5, 2, 256), (64, [16], 1, 64), (64, [112], 1, 448),
        (64, [128], 8, 64), (256, [130] * 16, 8, 1040),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_too_small_for_slices_leaves_by_replicas_in_turn(
    least_bytes, sizes, devices, most_bytes, monkeypatch, moved
):
    """Neither a slice nor a buffer of several has fewer bytes, where there are more."""
    monkeypatch.setattr(layout, "MIN_SLICE_BYTES", least_bytes)
    arrays = [put(RNG.standard_normal(n).astype(np.float32), P()) for n in sizes]
    assert_arrive(arrays)
    assert (len(moved), max(moved.values())) == (devices, most_bytes)
    assert moved.total() == 4 * sum(sizes)


def test_small_arrays_share_a_buffer_and_start_at_multiples_of_64_bytes(monkeypatch):
    leaves = [jnp.arange(n, dtype=jnp.float32) for n in (1, 17, 16, 5)]
    (buffer,) = layout.lay_out([Chunk.whole(Source.of(x)) for x in leaves])
    assert (buffer.offsets, buffer.size) == ((0, 16, 48, 64), 80)
    large = [jnp.arange(300, dtype=jnp.float32), *leaves]
    sizes = [b.size for b in layout.lay_out([Chunk.whole(Source.of(x)) for x in large])]
    assert sizes == [300, 80]
    monkeypatch.setattr(layout, "MAX_CHUNK_BYTES", 256)
    sizes = [b.size for b in layout.lay_out([Chunk.whole(Source.of(x)) for x in leaves])]
    assert sizes == [64, 5]


def test_thousands_of_small_arrays_share_several_buffers():
    """A program that joined all of them would be compiled for a minute, while `save` waits."""
    pairs = [(x, Chunk.whole(Source.of(x))) for x in (jnp.full(3, n) for n in range(600))]
    buffers = layout.lay_out([chunk for _, chunk in pairs])
    assert [len(b.chunks) for b in buffers] == [256, 256, 88]
    block = block_of([chunk for _, chunk in pairs])
    arrays = [x for x, _ in pairs]
    assert_arrived(pairs, block.start_pull(block.stage(arrays)).result())


def test_many_small_arrays_share_few_buffers_on_a_gpu(monkeypatch):
    """Larger ones than elsewhere; they begin where they would."""
    chunks = [Chunk.whole(Source.of(jnp.zeros(4)))] * 40
    monkeypatch.delitem(layout._FEW_ON, "cpu", raising=False)  # `make pretended` has it
    monkeypatch.setattr(layout, "MAX_CHUNK_BYTES", 256)
    assert [len(b.chunks) for b in layout.lay_out(chunks)] == [4] * 10
    monkeypatch.setitem(layout._FEW_ON, "cpu", 4)
    buffers = layout.lay_out(chunks)
    assert [len(b.chunks) for b in buffers] == [10] * 4
    assert buffers[0].offsets == tuple(range(0, 160, 16))


def test_small_arrays_of_replicas_share_no_larger_buffers(monkeypatch):
    monkeypatch.delitem(layout._FEW_ON, "cpu", raising=False)
    monkeypatch.setattr(layout, "MAX_CHUNK_BYTES", 128)
    buffers = layout.lay_out([Chunk.whole(Source.of(put(np.zeros(16, np.float32), P())))] * 32)
    assert [len(b.chunks) for b in buffers] == [2] * 16


@pytest.mark.parametrize("spec", [P(("a", "b")), P("a"), P()], ids=str)
def test_many_large_chunks_share_few_buffers_on_a_gpu(spec, monkeypatch):
    """A transfer costs more than its bytes there: too many would hold the trainer's thread."""
    monkeypatch.setitem(layout._FEW_ON, "cpu", 4)
    monkeypatch.setattr(layout, "PAGE_BYTES", 1024)
    arrays = [
        put(RNG.standard_normal((64, n)).astype(np.float32), spec) for n in (90, 18, 24, 50, 21) * 5
    ]
    pairs = [(x, Chunk.whole(Source.of(x))) for x in arrays]
    block = block_of([chunk for _, chunk in pairs])
    buffers = [buffer for buffer, _ in block._sent]
    assert len(block.programs()) == 1
    assert_arrived(pairs, block.start_pull(block.stage(arrays)).result())
    apart = layout.lay_out(block.chunks, copied=False)
    assert len(apart) == len(arrays), "what is not copied if it is alone stays alone"
    if spec != P(("a", "b")):  # replicas move a slice each
        assert buffers == apart
        return
    assert 4 <= len(buffers) <= 8
    assert all(offset * 4 % 1024 == 0 for buffer in buffers for offset in buffer.offsets)
    few = layout.lay_out(block.chunks[:4])
    assert [len(buffer.chunks) for buffer in few] == [1] * 4
    monkeypatch.setattr(layout, "_SHARED_BYTES", 2048)
    assert len(layout.lay_out(block.chunks)) > len(buffers)


def test_retained_values_need_no_copy_where_they_are_whole_large_and_in_place(monkeypatch):
    monkeypatch.setattr(pull, "host_memory_kind", lambda device: None)
    rows, replicated = (
        put(RNG.standard_normal((64, 8)).astype(np.float32), s) for s in (P(("a", "b")), P())
    )
    source = Source.of(rows)
    whole = block_of([Chunk.whole(source)], donatable=False)
    (large,) = whole.stage([rows])
    assert large is not rows  # 256 bytes of it on each device
    monkeypatch.setattr(layout, "LARGE_BYTES", 128)
    monkeypatch.setattr(blocks, "LARGE_BYTES", 128)
    monkeypatch.setattr(blocks, "_made", functools.cache(blocks.Block))
    whole = block_of([Chunk.whole(source)], donatable=False)
    assert whole.stage([rows])[0] is rows
    assert (whole.staged_bytes, whole.held_bytes) == (0, 64 * 8 * 4 // 8)
    # A gradient that the compiler left replicated: each device takes the rows of its moments.
    sliced = block_of([Chunk.whole(Source.of(replicated, rows.sharding))], donatable=False)
    assert len(sliced.programs()) == 1  # by the program that copies
    found = sliced.start_pull(sliced.stage([replicated])).result()
    values = np.asarray(replicated)
    for part in found[0]:
        np.testing.assert_array_equal(part.data, values[part.index].reshape(-1))
    assert len(found[0]) == 8


FEWER = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[4:])


@pytest.mark.parametrize("dtype", [np.float32, jnp.int4])  # of which one cannot be cut
@pytest.mark.parametrize("lies", [SingleDeviceSharding(jax.devices()[3]), on(FEWER, P("a"))])
def test_retained_values_that_lie_on_other_devices_are_brought_first(dtype, lies):
    values = RNG.integers(0, 8, (16, 8)).astype(dtype)
    array = jax.device_put(values, lies)
    place = NamedSharding(MESH, P("a", "b"))
    block = block_of([Chunk.whole(Source.of(array, place))], donatable=False)
    staged = block.stage([array])
    assert staged[0].addressable_shards[0].data.nbytes == block.staged_bytes == block.held_bytes
    (found,) = block.start_pull(staged).result()
    assert len(found) == 8
    for part in found:
        np.testing.assert_array_equal(part.data, values[part.index].reshape(-1))


@pytest.mark.parametrize(
    ("lies", "is_there"),
    [
        (on(MESH, P("b")), True),
        (on(TURNED, P("a")), True),
        (on(jax.sharding.Mesh(MESH.devices[::-1], ("a", "b")), P()), False),
        (on(FEWER, P()), False),
        (SingleDeviceSharding(jax.devices()[0]), False),
    ],
)
def test_values_are_on_a_programs_devices_in_their_order(lies, is_there):
    given = jax.ShapeDtypeStruct((16, 8), np.float32, sharding=lies)
    place = on(MESH, P("a", "b"))
    assert packing.on_its_devices(Source.of(given, place)) == is_there
    alone = SingleDeviceSharding(jax.devices()[0])  # a leaf's, of which that would be the gradient
    assert packing.on_its_devices(Source.of(given, alone)) == (lies == alone)


def test_a_block_of_which_one_chunk_lies_otherwise_is_resharded():
    """Staging it may be a collective, for which other processes wait."""
    array = put(np.ones((16, 8), np.float32), P())
    there = Chunk.whole(Source.of(array, on(MESH, P(None, None))))
    moved = Chunk.whole(Source.of(array, on(MESH, P("a"))))
    assert not block_of([there, there], donatable=False).is_resharded
    assert block_of([there, moved], donatable=False).is_resharded
    assert block_of([moved, moved], donatable=False).is_resharded


def test_captured_scalars_are_taken_by_every_process():
    scalars = [*(put(np.float32(x), P()) for x in (2.5, 3.5, 4.5)), jnp.int32(7)]
    block = block_of([Chunk.whole(Source.of(x), everywhere=True) for x in scalars], donatable=False)
    found = block.start_pull(block.stage(scalars)).result()
    assert [[part.data.item() for part in parts] for parts in found] == [[2.5], [3.5], [4.5], [7]]


def test_a_step_may_donate_what_has_been_staged():
    donating = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0)
    given_arrays = [put(RNG.standard_normal((8, 6)).astype(np.float32), s) for s in (P("a"), P())]
    want = [np.array(x) for x in given_arrays]
    block = block_of([Chunk.whole(Source.of(x)) for x in given_arrays])
    pulled = block.start_pull(block.stage(given_arrays))
    donating(given_arrays)
    for values, parts in zip(want, pulled.result(), strict=True):
        for part in parts:
            np.testing.assert_array_equal(part.data, values[part.index].reshape(-1))


def test_a_block_is_made_once_and_what_was_compiled_ahead_is_used(monkeypatch):
    programs = Programs("gockpt-compile-copies", blocks.compile_packing)
    monkeypatch.setattr(blocks, "_programs", programs)
    array = jnp.arange(89.0)
    block = block_of([Chunk.whole(Source.of(array))])
    assert block_of([Chunk.whole(Source.of(array))]) is block
    assert block_of([Chunk.whole(Source.of(array))], donatable=False) is not block
    block.compile_ahead()
    for thread in threading.enumerate():
        if thread.name == "gockpt-compile-copies":
            thread.join()
    before = dict(programs._found)
    assert len(before) == 1
    np.testing.assert_array_equal(block.stage([array])[0], array)
    assert programs._found == before
    assert block.programs() is block.programs()


def test_a_program_that_failed_to_compile_is_tried_again(monkeypatch):
    array = jnp.arange(97.0)
    block = block_of([Chunk.whole(Source.of(array))])
    errors = [ZeroDivisionError]

    def compile_it(*made_from):
        if errors:
            raise errors.pop()
        return packing.compile_packing(*made_from)

    monkeypatch.setattr(blocks, "_programs", Programs("a test", compile_it))
    with pytest.raises(ZeroDivisionError):
        block.stage([array])
    np.testing.assert_array_equal(block.stage([array])[0], array)


@settings(SEEDED, max_examples=100)
@given(st.lists(st.integers(1, 40), max_size=4), st.integers(1, 30))
def test_rows_cover_a_shard_once_in_equal_parts(shape, parts):
    ranges = row_ranges(tuple(shape), parts)
    size = math.prod(shape)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert len(ranges) == min(parts, size)
    sizes = [stop - start for start, stop in ranges]
    assert min(sizes) > 0
    assert max(sizes) <= max(min(sizes) + 1, math.ceil(1.2 * min(sizes)))


@pytest.mark.parametrize(
    ("start", "stop", "row"), [(0, 120, 120), (30, 90, 30), (5, 35, 5), (60, 61, 1), (0, 7, 1)]
)
def test_ranges_are_cut_in_the_longest_rows(start, stop, row):
    """An accelerator need then not bring a shard into another order, to cut it."""
    assert row_size((4, 6, 5), start, stop) == row


def test_arrays_that_lie_elsewhere_are_noticed():
    """Also after those that it was made for have been met."""
    rows, columns, replicated = (
        put(np.ones((8, 8), np.float32), s) for s in (P("a"), P(None, "a"), P())
    )
    block = block_of([Chunk.whole(Source.of(rows)), Chunk.whole(Source.of(columns))])
    anew = jax.device_put(rows, NamedSharding(MESH, P("a")))  # the same, as another object
    for _ in range(2):
        assert block.is_cut_from([rows, columns])
        assert not block.is_cut_from([rows, replicated])
        assert not block.is_cut_from([columns, rows])
        assert block.is_cut_from([anew, columns])


def test_few_placements_are_remembered(monkeypatch):
    monkeypatch.setattr(blocks, "_ALIKE", 3)
    arrays = [put(np.ones((8, 8), np.float32), P("a")) for _ in range(8)]
    block, remembered = block_of([Chunk.whole(Source.of(arrays[0]))]), []
    for array in arrays:
        assert block.is_cut_from([array])
        remembered.append(len(block._alike))
        # Alive, or others could have their ids.
        assert all(key == tuple(map(id, kept)) for key, kept in block._alike.items())
    assert max(remembered) == 3
    assert len({id(a.sharding) for a in arrays}) > 3
