"""Arrays in plain files, read without TensorStore."""

import contextlib
import ctypes
import errno
import itertools
import json
import mmap
import os
import threading
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec
from storage_helpers import assert_same_arrays, host_tree, mesh, save

from gockpt_jax import GoCkptRestore
from gockpt_jax.storage.files import grid, pieces, plain_reads
from gockpt_jax.storage.files.aligned import BLOCK_BYTES, aligned_empty, is_past_cache
from gockpt_jax.storage.files.database import Extent
from gockpt_jax.storage.files.plain_array import PlainArray, PlainArrays
from gockpt_jax.storage.files.plain_reads import PlainReads
from gockpt_jax.storage.restoring import array_reader
from gockpt_jax.storage.restoring.restore import restore
from gockpt_jax.storage.writing.tree_handler import make_tree_handler

PLAIN = {"use_ocdbt": False, "use_compression": False}
SMALL_PIECE_BYTES = 8192


@pytest.fixture
def small_pieces(monkeypatch):
    """Files of a few KiB are then read in several pieces."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", SMALL_PIECE_BYTES)


def stored(folder, values, chunk, **metadata):
    """Writes an array with TensorStore."""
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}}
    spec["metadata"] = {"compressor": None, "chunks": chunk, **metadata}
    store = ts.open(spec, create=True, dtype=values.dtype, shape=values.shape).result()
    store.write(values).result()
    return str(folder)


def aligned(shape, dtype):
    return np.ndarray(shape, dtype, aligned_empty(int(np.prod(shape)) * dtype.itemsize))


def read(array, boxes, *, is_aligned=True, **options):
    reads = PlainReads(**options)
    shapes = [grid.shape_of(box) for box in boxes]
    made = aligned if is_aligned else np.empty
    found = [made(shape, array.dtype) for shape in shapes]
    try:
        for future in reads.start([(array, list(zip(boxes, found, strict=True)))]):
            future.result()
    finally:
        reads.close()
    return found


def random_box(rng, shape):
    starts = [int(rng.integers(0, n)) for n in shape]
    return tuple(
        slice(a, int(rng.integers(a + 1, n + 1))) for a, n in zip(starts, shape, strict=True)
    )


@pytest.mark.parametrize("past_cache", [True, False])
@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("shape", [(), (5000,), (37, 90), (3, 70, 41), (2, 1, 64, 48)])
def test_boxes_of_any_array(tmp_path, monkeypatch, small_pieces, shape, past_cache, is_cached):
    """Boxes that overlap, chunks at the edge, pieces that begin and end anywhere in a block."""
    monkeypatch.setattr(plain_reads, "_is_for_cache", lambda fd, extent: is_cached)
    rng = np.random.default_rng(len(shape))
    for n, dtype in enumerate((np.float32, ml_dtypes.bfloat16, np.int8)):
        values = rng.integers(-99, 99, shape).astype(dtype)
        chunk = [int(rng.integers(1, n + 9)) for n in shape]
        array = PlainArray.found_in(stored(tmp_path / str(n), values, chunk))
        assert array is not None
        assert (array.shape, array.chunk, array.dtype) == (shape, tuple(chunk), values.dtype)
        boxes = [random_box(rng, shape) for _ in range(3)] + [tuple(slice(0, n) for n in shape)]
        for is_aligned, wanted in itertools.product((True, False), (boxes, boxes[:1])):
            read_now = read(array, wanted, past_cache=past_cache, is_aligned=is_aligned)
            for found, box in zip(read_now, wanted, strict=True):
                assert found.tobytes() == values[box].tobytes()


@pytest.mark.parametrize("past_cache", [True, False])
def test_the_system_may_give_a_part_of_what_is_asked_for(tmp_path, monkeypatch, past_cache):
    monkeypatch.setattr(plain_reads, "_is_for_cache", lambda fd, extent: False)
    values, preadv = np.arange(2**14, dtype=np.float32), os.preadv
    array = PlainArray.found_in(stored(tmp_path, values, [values.size]))

    def read_a_part(fd, buffers, offset):
        return preadv(fd, [buffers[0][: max(1, len(buffers[0]) // 3 // 4096) * 4096]], offset)

    monkeypatch.setattr(plain_reads.os, "preadv", read_a_part)
    (found,) = read(array, [(slice(0, values.size),)], past_cache=past_cache)
    assert found.tobytes() == values.tobytes()


def test_a_file_system_that_asks_for_more_than_blocks(tmp_path, monkeypatch):
    """It has the mode, and refuses each read; what else it may say is told."""
    monkeypatch.setattr(plain_reads, "_is_for_cache", lambda fd, extent: False)
    values, preadv = np.arange(2**14, dtype=np.float32), os.preadv
    array, refusal = PlainArray.found_in(stored(tmp_path, values, [values.size])), errno.EINVAL

    def refuse(fd, buffers, offset):
        if is_past_cache(fd):
            raise OSError(refusal, "no")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    for is_aligned in (True, False):
        (found,) = read(array, [(slice(5, 9999),)], past_cache=True, is_aligned=is_aligned)
        assert found.tobytes() == values[5:9999].tobytes()
    refusal = errno.EIO
    with pytest.raises(OSError, match="no"):
        read(array, [(slice(0, 9),)], past_cache=True)


def test_what_is_aligned_is_read_to_where_it_belongs(tmp_path, monkeypatch):
    """But for what lies in the file's last block: nothing is copied, and there is no buffer."""
    monkeypatch.setattr(plain_reads, "_is_for_cache", lambda fd, extent: False)
    values = np.arange(5 * 1024 + 100, dtype=np.float32)
    array = PlainArray.found_in(stored(tmp_path, values, [values.size]))
    reads, fill = [], plain_reads._read_all

    def read_all(fd, out, *at, **options):
        reads.append(out)
        fill(fd, out, *at, **options)

    monkeypatch.setattr(plain_reads, "_read_all", read_all)
    (found,) = read(array, [(slice(0, values.size),)], past_cache=True)
    assert found.tobytes() == values.tobytes()
    assert [np.shares_memory(out, found) for out in reads] == [True, False]
    assert [out.nbytes for out in reads] == [5 * 4096, 4096]


@pytest.mark.parametrize("past_cache", [True, False])
@pytest.mark.parametrize("is_cached", [True, False])
def test_only_what_is_not_there_is_read_past_the_cache(
    tmp_path, monkeypatch, past_cache, is_cached
):
    """And nothing where other processes read the same files."""
    monkeypatch.setattr(plain_reads, "_is_for_cache", lambda fd, extent: is_cached)
    array = PlainArray.found_in(stored(tmp_path, np.ones(2**14, np.float32), [2**14]))
    modes, preadv = [], os.preadv

    def seen(fd, *args):
        modes.append(is_past_cache(fd))
        return preadv(fd, *args)

    monkeypatch.setattr(os, "preadv", seen)
    read(array, [grid.whole(array.shape)], past_cache=past_cache)
    assert set(modes) == {past_cache and not is_cached}


@pytest.mark.parametrize("told", [0, -1])
@pytest.mark.parametrize("resident", [0, 10, 11, 21])
def test_where_half_of_it_is_in_the_page_cache_it_is_read_from_there(
    tmp_path, monkeypatch, resident, told
):
    """As the system tells, of the pages that it lies in; if it does not tell, past the cache."""
    (tmp_path / "file").write_bytes(bytes(30 * mmap.PAGESIZE))
    extent = Extent(str(tmp_path / "file"), 3 * mmap.PAGESIZE + 5, 20 * mmap.PAGESIZE)

    def mincore(address, length, flags):
        assert (address % mmap.PAGESIZE, length) == (0, extent.nbytes + 5)
        for page in range(21):  # of the other bits nothing is known
            ctypes.c_uint8.from_address(flags + page).value = 0xFE | (page < resident)
        return told

    monkeypatch.setattr(plain_reads, "_mincore", mincore)
    with open(extent.path, "rb") as file:
        assert plain_reads._is_for_cache(file.fileno(), extent) == (not told and resident > 10)


def test_what_is_little_or_not_there_is_read_by_the_page_cache(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(2**17))
    with open(tmp_path / "file", "rb") as file:  # what has just been written is there
        assert plain_reads._is_for_cache(file.fileno(), Extent(file.name, 0, 2**17))
    monkeypatch.setattr(plain_reads, "_mincore", lambda *_: 0)  # nothing is
    for nbytes, wanted in ((2**16, True), (2**16 + 1, False), (2**17, False), (2**17 + 1, True)):
        extent = Extent(str(tmp_path / "file"), 0, nbytes)
        with open(extent.path, "rb") as file:
            assert plain_reads._is_for_cache(file.fileno(), extent) == wanted


def test_what_cannot_be_mapped_is_read_by_the_page_cache(tmp_path, monkeypatch):
    """As on file systems that have no such way."""

    def refuse(*_, **__):
        raise OSError(errno.ENODEV, "no mapping")

    (tmp_path / "file").write_bytes(bytes(2**17))
    monkeypatch.setattr(mmap, "mmap", refuse)
    with open(tmp_path / "file", "rb") as file:
        assert plain_reads._is_for_cache(file.fileno(), Extent(file.name, 0, 2**17))


@pytest.mark.parametrize("size", [5000, 2**20])  # which is a whole piece
@pytest.mark.parametrize("offset", [0, 300, 4096])
@pytest.mark.parametrize("at", [0, 512])
def test_a_value_anywhere_in_a_file_to_memory_anywhere(tmp_path, monkeypatch, size, offset, at):
    """As small leaves lie in a database; disks read whole blocks, to where these may begin."""
    monkeypatch.setattr(plain_reads, "_is_for_cache", lambda fd, extent: False)
    values, preadv = np.arange(size, dtype=np.float32), os.preadv
    (tmp_path / "file").write_bytes(bytes(offset) + values.tobytes() + b"of another")
    extent = Extent(str(tmp_path / "file"), offset, values.nbytes)
    array = PlainArray(values.shape, values.shape, values.dtype, lambda key: extent)
    out = aligned_empty(values.nbytes + at)[at:].view(np.float32)

    def read_blocks(fd, buffers, start):
        address = np.frombuffer(buffers[0], np.uint8).ctypes.data
        assert not any(n % BLOCK_BYTES for n in (start, address, len(buffers[0])))
        return preadv(fd, buffers, start)

    monkeypatch.setattr(plain_reads.os, "preadv", read_blocks)
    with contextlib.closing(PlainReads(past_cache=True)) as reads:
        for future in reads.start([(array, [(grid.whole(values.shape), out)])]):
            future.result()
    np.testing.assert_array_equal(out, values)


@pytest.mark.parametrize("past_cache", [True, False])
def test_a_value_that_ends_behind_the_end_of_its_file_is_damaged(tmp_path, monkeypatch, past_cache):
    """Anywhere in a block: what stands before it there is no part of it."""
    monkeypatch.setattr(plain_reads, "_is_for_cache", lambda fd, extent: False)
    (tmp_path / "file").write_bytes(bytes(300 + 999))
    extent = Extent(str(tmp_path / "file"), 300, 1000)
    array = PlainArray((1000,), (1000,), np.dtype(np.int8), lambda key: extent)
    with pytest.raises(OSError, match="damaged"):
        read(array, [(slice(0, 1000),)], past_cache=past_cache)


@pytest.mark.parametrize("past_cache", [True, False])
def test_what_lies_side_by_side_is_read_at_once(tmp_path, monkeypatch, past_cache):
    """Small arrays in one file, of odd sizes, with a gap; the last lies before the first."""
    monkeypatch.setattr(plain_reads, "_is_for_cache", lambda fd, extent: False)
    rng, fetch, fetched = np.random.default_rng(0), PlainReads._fetch, []
    shapes = {300: (7,), 307: (33, 3), 703: (), 707: (5, 100), 5000: (900,), 8600: (11,), 0: (75,)}
    dtypes = {300: np.int8}
    content, arrays, wanted = np.zeros(9000, np.uint8), [], []
    for offset, shape in shapes.items():
        values = rng.integers(-99, 99, shape).astype(dtypes.get(offset, np.float32))
        extent = Extent(str(tmp_path / "file"), offset, values.nbytes)
        content[offset : offset + values.nbytes] = values.reshape(-1).view(np.uint8)
        arrays.append((values, np.empty_like(values)))
        array = PlainArray(shape, shape, values.dtype, lambda key, extent=extent: extent)
        wanted.append((array, [(grid.whole(shape), arrays[-1][1])]))
    content.tofile(tmp_path / "file")

    def spied(self, extent, out):
        fetched.append((extent.offset, extent.nbytes))
        return fetch(self, extent, out)

    monkeypatch.setattr(PlainReads, "_fetch", spied)
    with contextlib.closing(PlainReads(past_cache=past_cache)) as reads:
        for future in reads.start(wanted):
            future.result()
    assert all(np.array_equal(values, found) for values, found in arrays)
    assert fetched == [(300, 2407), (5000, 3644), (0, 300)]


def test_what_lies_side_by_side_in_two_files_is_read_from_both(tmp_path):
    """The second begins where the first ends, but in its own file."""
    contents, arrays = np.arange(60, dtype=np.int8).reshape(2, 30), []
    for n, content in enumerate(contents):
        content.tofile(tmp_path / str(n))
        extent = Extent(str(tmp_path / str(n)), 10 * n, 10)
        arrays.append(PlainArray((10,), (10,), content.dtype, lambda key, extent=extent: extent))
    found = np.empty((2, 10), np.int8)
    with contextlib.closing(PlainReads(past_cache=False)) as reads:
        boxes = [
            (array, [((slice(0, 10),), out)]) for array, out in zip(arrays, found, strict=True)
        ]
        for future in reads.start(boxes):
            future.result()
    np.testing.assert_array_equal(found, [contents[0, :10], contents[1, 10:20]])


def test_pieces_are_read_once_and_only_where_wanted(tmp_path, small_pieces):
    values = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
    array = PlainArray.found_in(stored(tmp_path, values, [32, 1024]))
    rows = [(slice(0, 4), slice(0, 512)), (slice(0, 4), slice(256, 1024))]
    pieces = list(array.pieces(rows))
    assert [p.box[0] for p in pieces] == [slice(0, 2), slice(2, 4)]  # 2 rows are 8 KiB
    assert all(
        p.extent.nbytes <= SMALL_PIECE_BYTES for p in array.pieces([(slice(0, 64), slice(0, 1024))])
    )


@pytest.mark.parametrize(
    "metadata",
    [
        {"compressor": {"id": "zstd", "level": 1}},
        {"order": "F"},
        {"dimension_separator": "/"},
        {"dtype": ">f4"},
        {"dtype": "int4"},
        {"filters": [{"id": "delta", "dtype": "<f4"}]},
        {"zarr_format": 3},
        {"dtype": None},
    ],
    ids=lambda metadata: "-".join(map(str, *metadata.items())),
)
def test_arrays_stored_otherwise_are_not_plain(tmp_path, metadata):
    stored(tmp_path, np.ones((4, 4), np.float32), [2, 2])
    assert PlainArray.found_in(str(tmp_path)) is not None
    told = json.loads((tmp_path / ".zarray").read_text())
    (tmp_path / ".zarray").write_text(json.dumps(told | metadata))
    assert PlainArray.found_in(str(tmp_path)) is None
    assert PlainArray.found_in(str(tmp_path / "nowhere")) is None
    for damaged in ("{}", "{"):
        (tmp_path / ".zarray").write_text(damaged)
        assert PlainArray.found_in(str(tmp_path)) is None
    assert PlainArray.found_in(str(tmp_path / ".zarray")) is None  # which is no folder
    assert PlainArray.found_among({".zarray": Extent(str(tmp_path / "nowhere"), 0, 9)}) is None


@pytest.mark.parametrize("name", ["int8", "uint32", "bool", "bfloat16", "float8_e5m2", "complex64"])
def test_what_has_whole_bytes_is_plain(tmp_path, name):
    values = np.arange(6).astype(name)
    array = PlainArray.found_in(stored(tmp_path, values, [4]))
    assert read(array, [(slice(0, 6),)], past_cache=True)[0].tobytes() == values.tobytes()


def test_a_chunk_is_all_of_what_is_stored_under_a_key(tmp_path):
    """Not what lies at the array's edge, nor as much of two of them."""
    array = PlainArray.found_in(stored(tmp_path, np.zeros((8, 5), np.float32), [4, 3]))
    rows = {(0, 4): True, (4, 8): True, (2, 6): False, (0, 8): False, (0, 2): False}
    columns = {(0, 3): True, (3, 5): False, (1, 4): False}
    for (a, is_of_rows), (b, is_of_columns) in itertools.product(rows.items(), columns.items()):
        assert array.is_chunk((slice(*a), slice(*b))) == (is_of_rows and is_of_columns)


@pytest.mark.parametrize("past_cache", [True, False])
@pytest.mark.parametrize("damage", ["short", "missing"])
def test_damaged_files_are_named(tmp_path, past_cache, damage):
    array = PlainArray.found_in(stored(tmp_path, np.ones((8, 4096), np.float32), [4, 4096]))
    file = tmp_path / "1.0"
    if damage == "short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    with pytest.raises(OSError, match=r"1\.0"):
        read(array, [(slice(0, 8), slice(0, 4096))], past_cache=past_cache)
    read(array, [(slice(0, 4), slice(0, 4096))], past_cache=past_cache)
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    assert not any(os.readlink(x).startswith(str(tmp_path)) for x in links if os.path.lexists(x))


def state():
    rng = np.random.default_rng(0)

    def put(shape, *spec, dtype=np.float32):
        values = rng.standard_normal(shape).astype(dtype)
        return jax.device_put(values, NamedSharding(mesh(4, 2), PartitionSpec(*spec)))

    return {
        "rows": put((64, 256), "data"),
        "columns": put((64, 256), None, "model"),
        "both": put((64, 256), "model", "data", dtype=ml_dtypes.bfloat16),
        "replicated": put((33, 77)),
        "count": put(()),
        "key": jax.random.key(3),
        "raw_key": jax.random.PRNGKey(3),
    }


def targets(tree):
    def other(x):
        spec = PartitionSpec("model") if x.ndim and x.shape[0] % 2 == 0 else PartitionSpec()
        sharding = NamedSharding(mesh(4, 2), spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def same(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    arrays = {name: x for name, x in tree.items() if "key" not in name}
    keys = {name: same(x) for name, x in tree.items() if "key" in name}
    as_it_was = jax.tree.map(same, tree)
    return {
        "as it was": as_it_was,
        "without a target": as_it_was,
        "otherwise": jax.tree.map(other, arrays) | keys,
    }


FOUND = ["both", "columns", "replicated", "rows"]


@pytest.mark.parametrize("where", ["as it was", "without a target", "otherwise"])
@pytest.mark.parametrize(
    ("handler", "use_ocdbt", "expected"),
    [
        (ocp.PyTreeCheckpointHandler, False, {*FOUND, "count"}),
        (ocp.PyTreeCheckpointHandler, True, {*FOUND}),  # stock has few bytes in the index itself
        (make_tree_handler, True, {*FOUND, "count"}),
    ],
    ids=["stock's files", "stock's database", "our database"],
)
def test_what_stock_restores_we_restore(
    tmp_path, monkeypatch, small_pieces, where, handler, use_ocdbt, expected
):
    """Without compression, onto the same and other shardings; keys are stock's business."""
    tree, seen, look = state(), set(), array_reader._look_for_plain
    is_ours = handler is make_tree_handler
    made = handler(use_ocdbt=use_ocdbt, use_compression=False)
    save(made, tmp_path / "x", host_tree(tree) if is_ours else tree)

    def spied(infos, args):
        found = look(infos, args)
        seen.update(infos[i].name for i in found)
        return found

    monkeypatch.setattr(array_reader, "_look_for_plain", spied)
    target = targets(tree)[where]
    args = GoCkptRestore() if where == "without a target" else GoCkptRestore(target)
    restored = restore(tmp_path / "x", args, {})
    assert_same_arrays(restored, tree)
    for name in tree:
        assert restored[name].sharding.is_equivalent_to(target[name].sharding, tree[name].ndim)
    assert seen == expected


HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.mark.parametrize(
    ("dtype", "shape", "wanted", "is_ours"),
    [
        ("float32", (4,), {}, True),
        ("float32", (4,), {"dtype": np.float32, "global_shape": (4,)}, True),
        ("float32", (4,), {"dtype": np.float16}, False),
        ("float32", (4,), {"dtype": jax.random.key(0).dtype}, False),
        ("float32", (4,), {"global_shape": (8,)}, False),
        ("float32", (0, 4), {}, False),
        ("float64", (4,), {}, False),  # JAX has no such numbers, unless it is told to
        ("uint32", (4,), {}, False),  # may be the data of keys
        ("float32", (4,), {"sharding": None}, False),
        ("float32", (4,), {"mesh": mesh(8, 1), "mesh_axes": PartitionSpec("data")}, False),
    ],
)
def test_what_is_wanted_as_it_is_stored(dtype, shape, wanted, is_ours):
    """Of all else stock knows what comes of it, of a mesh beside a sharding for one."""
    stored = PlainArray(shape, shape, np.dtype(dtype), None)
    args = ocp.ArrayRestoreArgs(**{"sharding": HERE} | wanted)
    found = array_reader._wanted(SimpleNamespace(find=lambda name: stored), "x", args)
    assert (found is not None) == is_ours


def test_other_dtypes_and_shapes_are_stocks_business(tmp_path):
    tree = {"x": state()["rows"]}
    save(make_tree_handler(**PLAIN), tmp_path / "x", host_tree(tree))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {"x": jax.ShapeDtypeStruct((96, 256), np.float16, sharding=here)}
    restored = restore(tmp_path / "x", GoCkptRestore(target, cast=True, strict=False), {})["x"]
    assert (restored.shape, restored.dtype) == ((96, 256), np.float16)
    np.testing.assert_array_equal(restored[:64], np.asarray(tree["x"]).astype(np.float16))


def test_bytes_in_host_memory_are_bounded(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    tree = {f"x{n}": jax.numpy.asarray(rng.standard_normal(2**15), "float32") for n in range(6)}
    save(make_tree_handler(**PLAIN), tmp_path / "x", host_tree(tree))
    budgets = []

    class Spied(array_reader.ByteBudget):
        def __init__(self, limit_bytes):
            super().__init__(limit_bytes)
            budgets.append(self)

    monkeypatch.setattr(array_reader, "ByteBudget", Spied)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    restored = restore(tmp_path / "x", GoCkptRestore(target), {"restore_concurrent_gb": 300e-6})
    assert_same_arrays(restored, tree)
    (budget,) = budgets
    assert 2**17 <= budget.peak_bytes <= 300_000
    assert budget.used_bytes == 0


def test_a_failure_leaves_no_thread_behind(tmp_path):
    tree = {"x": state()["rows"]}
    save(make_tree_handler(**PLAIN), tmp_path / "x", host_tree(tree))
    (tmp_path / "x" / "x" / "0.0").unlink()
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    before = set(threading.enumerate())  # of the save, ending
    with pytest.raises(OSError, match=r"x/0\.0"):
        restore(tmp_path / "x", GoCkptRestore(target), {})
    assert not {t for t in threading.enumerate() if t.name.startswith("gockpt_")} - before


def test_chunks_of_zeros_that_an_older_orbax_left_out(tmp_path):
    """The checkpoint's metadata says whether a file that is not there means zeros, or damage."""
    tree = {"x": jax.device_put(np.zeros((8, 16), np.float32), jax.devices()[0])}
    save(make_tree_handler(**PLAIN), tmp_path / "x", host_tree(tree))
    (tmp_path / "x" / "x" / "0.0").unlink()
    told = json.loads((tmp_path / "x" / "_METADATA").read_text())
    assert told.pop("store_array_data_equal_to_fill_value")
    (tmp_path / "x" / "_METADATA").write_text(json.dumps(told))
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    assert_same_arrays(restore(tmp_path / "x", GoCkptRestore(target), {}), tree)


def test_a_users_handler_of_arrays_reads_in_its_own_way(tmp_path):
    asked = []

    class Own(ocp.type_handlers.ArrayHandler):
        async def deserialize(self, infos, args=None):
            asked.extend(info.name for info in infos)
            return await super().deserialize(infos, args)

    tree = {"x": state()["rows"]}
    save(make_tree_handler(**PLAIN), tmp_path / "x", host_tree(tree))
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, Own()))
    options = {"type_handler_registry": registry}
    assert_same_arrays(restore(tmp_path / "x", GoCkptRestore(target), options), tree)
    assert asked == ["x"]


@pytest.mark.parametrize("content", [bytes(12), None], ids=["shorter", "missing"])
def test_a_chunk_that_is_not_as_long_as_a_chunk(tmp_path, content):
    """TensorStore says so, where its neighbour's bytes would be read."""
    database = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{tmp_path}/"},
        "config": {"max_inline_value_bytes": 0},
    }
    array = {"shape": [8], "chunks": [4], "compressor": None, "dtype": "<f4"}
    spec = {"driver": "zarr", "kvstore": {**database, "path": "w/"}, "metadata": array}
    ts.open(spec, create=True).result().write(np.arange(1, 9, dtype=np.float32)).result()
    assert PlainArrays(str(tmp_path), use_ocdbt=True).find("w") is not None
    ts.KvStore.open(database).result().write("w/1", content).result()
    assert PlainArrays(str(tmp_path), use_ocdbt=True).find("w") is None
