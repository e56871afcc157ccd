"""OCDBT databases whose values are written and read past TensorStore."""

import dataclasses
import importlib.metadata
import os
import resource
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec
from storage_helpers import assert_same_arrays, host_tree, mesh, save

from gockpt_jax.storage.files import direct, grid
from gockpt_jax.storage.files.database import Extent, values_by_array, values_of
from gockpt_jax.storage.writing import database_index, database_writer
from gockpt_jax.storage.writing.database_index import PlacedArray, key_of, make_index
from gockpt_jax.storage.writing.database_writer import DatabaseIndexes
from gockpt_jax.storage.writing.tree_handler import make_tree_handler

OPTIONS = {"use_ocdbt": True, "use_compression": False}


def stock_restore(path, tree):
    arguments = ocp.checkpoint_utils.construct_restore_args(tree)
    return ocp.PyTreeCheckpointer().restore(path, restore_args=arguments)


def placed(name, shape, chunk, dtype=np.float32, metadata=b"{}", cells=None):
    spec = {
        "driver": "zarr",
        "metadata": {"shape": shape, "chunks": chunk, "compressor": None},
        "dtype": np.dtype(dtype).name,
        "store_data_equal_to_fill_value": True,
    }
    cells = list(grid.cells(grid.whole(shape), chunk)) if cells is None else cells
    return PlacedArray(name, spec, chunk, np.dtype(dtype), cells, metadata)


@pytest.mark.parametrize("node_bytes", [200, 100_000])
@pytest.mark.parametrize("inline_bytes", [0, 9])
def test_all_values_of_any_database_are_found(tmp_path, node_bytes, inline_bytes):
    """Of trees of several levels too, whose nodes have parts of the keys."""
    config = {"max_decoded_node_bytes": node_bytes, "max_inline_value_bytes": inline_bytes}
    base = {"driver": "file", "path": f"{tmp_path}/"}
    spec = {"driver": "ocdbt", "base": base, "config": config, "value_data_prefix": "50%:d/"}
    store = ts.KvStore.open(spec).result()
    rng = np.random.default_rng(0)
    expected = {f"blocks.{n}/{n % 3}.{n % 7}": rng.bytes(n % 20) for n in range(300)}
    with ts.Transaction(atomic=True) as transaction:
        for key, value in expected.items():
            store.with_transaction(transaction)[key] = value
    found = values_of(store.base, f"{tmp_path}/")
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert isinstance(value, Extent) == (len(expected[key]) > inline_bytes)
        assert content(value) == expected[key]
    by_array = values_by_array(str(tmp_path))
    assert by_array["blocks.8"] == {"2.1": found["blocks.8/2.1"]}


def content(value):
    if isinstance(value, bytes):
        return value
    with open(value.path, "rb") as file:
        file.seek(value.offset)
        return file.read(value.nbytes)


def test_no_database_has_no_values(tmp_path):
    assert values_by_array(str(tmp_path)) == {}
    (tmp_path / "manifest.ocdbt").write_bytes(b"of another kind")
    assert values_by_array(str(tmp_path)) == {}
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{tmp_path}/emptied/"}).result()
    store["w/0"] = b"x"
    store.delete_range(ts.KvStore.KeyRange()).result()
    assert values_by_array(f"{tmp_path}/emptied") == {}


@pytest.mark.parametrize("page_bytes", [4096, 8192])
def test_places_do_not_overlap_and_large_values_begin_with_a_page(monkeypatch, page_bytes):
    monkeypatch.setattr(database_index, "SMALL_BYTES", 4096)
    monkeypatch.setattr(database_index, "_PAGE_BYTES", page_bytes)
    arrays = [
        placed("even", (4096,), (1024,)),
        placed("odd", (5000,), (2500,)),  # two blocks and a part
        placed("half", (8192,), (2048,), ml_dtypes.bfloat16),
        placed("small", (3, 5), (1, 5), metadata=None),
        placed("scalar", (), ()),
        placed("elsewhere", (4096,), (1024,), cells=[]),
    ]
    index = make_index(arrays, 2**14)
    expected = {
        key_of(array.name, key)
        for array in arrays
        for key in [
            *(grid.key(cell, array.chunk) for cell in array.cells),
            *([".zarray"] if array.metadata else []),
        ]
    }
    assert index.extents.keys() == expected
    taken = {}
    for key, extent in index.extents.items():
        if extent.nbytes >= 4096:
            assert not extent.offset % page_bytes, key
        taken.setdefault(extent.path, []).append((extent.offset, extent.offset + extent.nbytes))
    assert {path: nbytes for path, (nbytes, _) in index.data_files.items()} == {
        path: max(stop for _, stop in spans) for path, spans in taken.items()
    }
    assert {path: sorted(offsets) for path, (_, offsets) in index.data_files.items()} == {
        path: sorted(start for start, _ in spans) for path, spans in taken.items()
    }
    for spans in taken.values():
        spans.sort()
        assert [stop for _, stop in spans[:-1]] == [start for start, _ in spans[1:]]
        assert spans[-1][0] < 2**14  # a file that has so many bytes takes no more
    assert not taken.keys() & index.files.keys()


def test_the_index_is_that_of_tensorstore(tmp_path):
    """Whoever opens the files finds the values that were put into their places."""
    rng = np.random.default_rng(0)
    values = {"x": rng.random((64, 96), np.float32), "": rng.random((7,), np.float32)}
    arrays = [placed("x", (64, 96), (32, 48)), placed("", (7,), (7,))]
    index = make_index(arrays, 2**20)
    for array in arrays:
        for cell in array.cells:
            extent = index.extents[key_of(array.name, grid.key(cell, array.chunk))]
            put(tmp_path / extent.path, extent.offset, values[array.name][cell].tobytes())
    for name, text in index.files.items():
        put(tmp_path / name, 0, text)
    base = {"driver": "file", "path": f"{tmp_path}/"}
    for array in arrays:
        kvstore = {"driver": "ocdbt", "base": base, "path": array.name}
        spec = {**array.spec, "kvstore": kvstore, "fill_missing_data_reads": False}
        store = ts.open(spec, open=True, assume_metadata=True).result()
        np.testing.assert_array_equal(store.read().result(), values[array.name])


def put(path, offset, text):
    path.parent.mkdir(exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.pwrite(fd, text, offset)
    os.close(fd)


def test_an_index_takes_no_memory_of_the_values():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    index = make_index([placed("x", (2**14, 2**22), (2**4, 2**22))], 2**28)  # 256 GiB
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(nbytes for nbytes, _ in index.data_files.values()) == 2**38 + 2  # and `.zarray`
    assert after - before < 100 * 2**10  # KiB


def test_values_that_end_within_a_block_have_files_of_their_own_and_one_index(monkeypatch):
    """Its nodes name all that came before: one for each such value took gigabytes for 10,000."""
    monkeypatch.setattr(database_index, "SMALL_BYTES", 4096)
    arrays = [placed(f"x{n}", (2000,), (2000,), metadata=None) for n in range(50)]
    index = make_index([*arrays, placed("even", (2048,), (1024,))], 2**14)
    alone = [index.extents[f"x{n}/0"] for n in range(50)]
    assert {extent.offset for extent in alone} == {0}
    assert len({extent.path for extent in alone}) == 50
    assert len(index.data_files) == 52
    assert len(index.files) < 8


def test_items_that_are_saved_at_the_same_time_have_indexes_of_their_own():
    class Meanwhile(list):
        """What is looked up while another tree, on another thread, is looked up too."""

        def __eq__(self, other):
            is_same = list.__eq__(self, other)
            if is_same:
                indexes.of([placed("y", (5,), (5,))], 0)
            return is_same

        def __ne__(self, other):
            return not self == other

    indexes = DatabaseIndexes()
    arrays = [placed("x", (4,), (4,))]
    first = indexes.of(arrays, 0)
    assert indexes.of(Meanwhile(arrays), 0) is first
    assert first.extents.keys() == {"x/0", "x/.zarray"}


def test_the_index_of_each_item_is_made_once(monkeypatch):
    made = []
    monkeypatch.setattr(database_writer, "make_index", lambda *of: made.append(of) or len(made))
    trees = [[placed(name, shape, shape)] for name in "xy" for shape in [(4,), (5,)]]
    indexes = DatabaseIndexes()
    for _ in range(3):
        assert [indexes.of([*tree], 8) for tree in trees] == [1, 2, 3, 4]
    assert len(made) == 4
    # Whatever is not the same makes another: the sizes of files, what a process writes, ...
    (tree,) = trees[-1]
    others = [
        dataclasses.replace(tree, cells=[]),
        dataclasses.replace(tree, metadata=None),
        dataclasses.replace(tree, dtype=np.dtype(np.int32)),
        dataclasses.replace(tree, chunk=(3,)),
    ]
    assert [indexes.of([tree], 9), *(indexes.of([other], 8) for other in others)] == [*range(5, 10)]
    assert indexes.of(trees[0], 8) == 10  # few are kept


def test_arrays_of_both_ways_are_in_one_database(tmp_path):
    """What TensorStore must convert, what stock's handlers save, and what we write ourselves."""
    rng = np.random.default_rng(0)
    row = NamedSharding(mesh(4, 2), PartitionSpec("data"))
    tree = {
        "ours": jax.device_put(rng.random((64, 96), np.float32), row),
        "cast": jax.device_put(rng.random((64, 96), np.float32), row),
        "int4": jnp.arange(-4, 4).astype(jnp.int4),
        "numpy": rng.random((4, 4)),
        "scalar": 3,
    }
    args = jax.tree.map(lambda x: ocp.SaveArgs(), tree) | {"cast": ocp.SaveArgs(dtype=jnp.bfloat16)}
    save(make_tree_handler(**OPTIONS), tmp_path / "x", host_tree(tree), save_args=args)
    tree["cast"] = tree["cast"].astype(jnp.bfloat16)
    found = stock_restore(tmp_path / "x", tree)
    assert_same_arrays(found, tree)
    extents = values_by_array(str(tmp_path / "x"))
    is_direct = {
        name: any("/direct/" in extent.path for extent in of.values() if isinstance(extent, Extent))
        for name, of in extents.items()
    }
    assert is_direct == {
        "ours": True, "cast": False, "int4": False, "numpy": False, "scalar": False
    }  # fmt: skip


@pytest.mark.parametrize("way", ["overlapping", "lacking", "unread"])
def test_tensorstore_writes_where_an_index_is_not_as_expected(tmp_path, monkeypatch, caplog, way):
    """As some later version might lay values out; it is said once, and the checkpoint is whole."""

    def otherwise(files, *folder):
        values = dict(values_of(files, *folder))
        if way == "unread":
            return {}
        first, second = list(values)[:2]
        values[first] = values[second]
        if way == "lacking":
            del values[first]
        return values

    monkeypatch.setattr(database_index, "values_of", otherwise)
    handler = make_tree_handler(**OPTIONS)
    tree = {name: jnp.arange(2048.0) + n for n, name in enumerate("abc")}
    with caplog.at_level("WARNING", logger="gockpt_jax"):
        for n in range(2):
            save(handler, tmp_path / f"{n}", host_tree(tree))
    (said,) = [record.message for record in caplog.records if "lays out values" in record.message]
    assert importlib.metadata.version("tensorstore") in said
    monkeypatch.undo()
    for n in range(2):
        assert_same_arrays(stock_restore(tmp_path / f"{n}", tree), tree)
        extents = values_by_array(str(tmp_path / f"{n}"))
        assert not any(
            "/direct/" in extent.path
            for of in extents.values() for extent in of.values() if isinstance(extent, Extent)
        )  # fmt: skip


def test_small_leaves_share_files(tmp_path):
    tree = {f"x{n}": jnp.full(64, n, jnp.float32) for n in range(100)}
    save(make_tree_handler(**OPTIONS), tmp_path / "x", host_tree(tree))
    assert sum(p.is_file() for p in tmp_path.rglob("*")) < 20
    assert_same_arrays(stock_restore(tmp_path / "x", tree), tree)


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_file_that_several_share_fails_the_save(tmp_path, monkeypatch, failing):
    """And none stays open."""
    before = len(os.listdir("/proc/self/fd"))

    def fail(fd, *_):
        if "/v/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        return real(fd, *_)

    name = {"write": "pwrite", "fsync": "fsync"}[failing]
    real = getattr(os, name)
    monkeypatch.setattr(direct.os, name, fail)
    tree = {f"x{n}": jnp.full(64, n, jnp.float32) for n in range(20)}
    with pytest.raises(OSError, match="No space left"):
        save(make_tree_handler(**OPTIONS), tmp_path / "x", host_tree(tree))
    assert not (tmp_path / "x").exists()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_no_save_lacks_a_value(tmp_path, monkeypatch):
    """Room was made for it, so that it would read as zeros."""
    write = direct.DirectFiles.write

    def forget(files, path, values, offset=0):
        if values.size == 48:
            done = Future()
            done.set_result("0" * 32)
            return done
        return write(files, path, values, offset)

    monkeypatch.setattr(direct.DirectFiles, "write", forget)
    tree = {"a": jnp.ones(64), "b": jnp.ones(48)}
    with pytest.raises(RuntimeError, match=r"not all values were written of .*/direct/v/"):
        save(make_tree_handler(**OPTIONS), tmp_path / "x", host_tree(tree))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("fault", ["length", "overlap"])
def test_an_unknown_kind_of_database_is_left_to_tensorstore(tmp_path, monkeypatch, fault):
    def other(files, folder=""):
        found = dict(values_of(files, folder))
        longer = dataclasses.replace(found["a/0"], nbytes=found["a/0"].nbytes + 1)
        return found | ({"a/0": longer} if fault == "length" else {"b/0": found["a/0"]})

    monkeypatch.setattr(database_index, "values_of", other)
    tree = {"a": jnp.ones(64), "b": 2 * jnp.ones(64)}
    save(make_tree_handler(**OPTIONS), tmp_path / "x", host_tree(tree))
    assert not list(tmp_path.rglob("direct"))
    assert_same_arrays(stock_restore(tmp_path / "x", tree), tree)
