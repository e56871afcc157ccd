"""How many files a save makes: docs/storage.md says for which states they are few."""

import logging
import math

import jax.numpy as jnp
import numpy as np
import pytest
from storage_helpers import host_tree, save

from gockpt_jax.storage.files import grid
from gockpt_jax.storage.writing import array_handler, array_layout
from gockpt_jax.storage.writing.database_index import PlacedArray, make_index
from gockpt_jax.storage.writing.tree_handler import make_tree_handler

FILE_BYTES = array_layout._FILE_BYTES
PLAIN = {"use_ocdbt": False, "use_compression": False}
HIDDEN, FEED_FORWARD, KEYS, LAYERS, WORDS = 8192, 28672, 1024, 80, 128256
BLOCK = [
    *[(HIDDEN, HIDDEN)] * 2,  # query, output
    *[(HIDDEN, KEYS)] * 2,  # key, value
    *[(HIDDEN, FEED_FORWARD)] * 2,
    (FEED_FORWARD, HIDDEN),
    *[(HIDDEN,)] * 2,  # norms
]
ENDS = [(WORDS, HIDDEN), (HIDDEN, WORDS), (HIDDEN,)]


def llama_70b(stacked):
    """Shapes of parameters and two moments, fp32; of one array for all layers where `stacked`."""
    blocks = [(LAYERS, *shape) for shape in BLOCK] if stacked else BLOCK * LAYERS
    return (blocks + ENDS) * 3


def cut(shape, shards):
    """The part of a leaf, cut along its longest axis."""
    longest = max(range(len(shape)), key=lambda axis: shape[axis])
    parts = math.gcd(shards, shape[longest])
    return tuple(n // parts if axis == longest else n for axis, n in enumerate(shape))


def plain_files(shapes, shards):
    """Files of a save, where a chunk is a file."""
    chunks = [array_layout.chunk_shape(x, cut(x, shards), 4, FILE_BYTES) for x in shapes]
    return sum(
        1 + array_layout.chunk_count(shape, chunk)
        for shape, chunk in zip(shapes, chunks, strict=True)
    )


def database_files(shapes, processes):
    """Files of the databases of so many processes, each with a shard."""
    arrays = []
    for n, shape in enumerate(shapes):
        part = cut(shape, processes)
        chunk = array_layout.chunk_shape(shape, part, 4, FILE_BYTES)
        spec = {
            "driver": "zarr",
            "metadata": {"shape": shape, "chunks": chunk, "compressor": None},
            "dtype": "float32",
            "store_data_equal_to_fill_value": True,
        }
        cells = list(grid.cells(grid.whole(part), chunk))
        arrays.append(PlacedArray(f"x{n}", spec, chunk, np.dtype(np.float32), cells, b"{}"))
    index = make_index(arrays, FILE_BYTES)
    of_tensorstore = 2  # the manifest and a node of the process's own database
    return processes * (len(index.data_files) + len(index.files) + of_tensorstore)


@pytest.mark.parametrize(
    ("count", "figures"),
    [
        (plain_files, ([6200, 6000, 7300], [7800, 23100, 166500])),
        (database_files, ([3100, 3000, 3600], [2400, 3400, 4200])),
    ],
    ids=["plain files", "database"],
)
def test_of_a_model_of_70_billion_parameters(count, figures):
    """The figures of docs/storage.md, per 10**12 bytes."""
    found = []
    for stacked in (True, False):
        shapes = llama_70b(stacked)
        nbytes = 4 * sum(map(math.prod, shapes))
        assert nbytes == pytest.approx(847e9, rel=0.01)
        found.append([round(count(shapes, n) / nbytes * 1e12, -2) for n in (1, 8, 64)])
    assert tuple(found) == figures


def advice(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "gockpt_jax"]


def test_the_count_is_that_of_the_disk(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(array_handler, "_MANY_FILES", 17)
    tree = {"a": jnp.zeros((8, 64)), "b": jnp.zeros((3, 5)), "c": jnp.zeros(())}
    handler = make_tree_handler(**PLAIN, chunk_byte_size=256)
    with caplog.at_level(logging.WARNING, "gockpt_jax"):
        for n in range(2):
            save(handler, tmp_path / str(n), host_tree(tree))
    chunks = [
        array_layout.chunk_count(x.shape, array_layout.chunk_shape(x.shape, x.shape, 4, 256))
        for x in tree.values()
    ]
    found = [p for name in tree for p in (tmp_path / "0" / name).iterdir()]
    assert len(found) == sum(chunks) + len(tree) == 13
    assert not advice(caplog)
    monkeypatch.setattr(array_handler, "_MANY_FILES", 12)
    with caplog.at_level(logging.WARNING, "gockpt_jax"):
        for n in range(2, 4):
            save(handler, tmp_path / str(n), host_tree(tree))
    assert [text.split(",")[0] for text in advice(caplog)] == ["A save makes 13 files"]


def test_what_we_write_is_large_and_what_tensorstore_compresses_is_small(tmp_path):
    def default(*, use_ocdbt=False, use_zarr3=False, compressed=False):
        layout = array_layout.ItemLayout("folder", use_ocdbt, use_zarr3, compressed)
        return layout.default_chunk_bytes

    assert default() == default(use_ocdbt=True) == 256 * 2**20
    assert default(compressed=True) == default(use_ocdbt=True, compressed=True) == 64 * 2**20
    assert default(use_zarr3=True) == 64 * 2**20


MIB = 2**20


@pytest.mark.parametrize("folder", ["folder", "gs://bucket/folder"])
@pytest.mark.parametrize("given", [None, 0, 200])
def test_data_files_are_as_large_as_the_user_says(folder, given):
    """Or as we find best where nobody says anything; chunks are cut as for stock's."""

    def sizes(compressed):
        layout = array_layout.ItemLayout(folder, True, False, compressed, given)
        return layout.data_file_bytes, layout.written_file_bytes

    in_bucket = folder != "folder"
    stocks = 400 * MIB if in_bucket else 2048 * MIB
    expected = [(stocks, 256 * MIB), (stocks, 128 * MIB)]
    if given is not None:
        expected = [(given, given)] * 2
    elif in_bucket:
        expected = [(stocks, stocks)] * 2
    assert [sizes(compressed=False), sizes(compressed=True)] == expected


def test_memory_of_compressed_chunks_is_given_back(tmp_path, monkeypatch):
    from gockpt_jax.storage.writing import write_budget

    trims = []
    monkeypatch.setattr(write_budget, "_malloc_trim", trims.append)
    monkeypatch.setattr(write_budget, "_TRIM_BYTES", 2**16)
    rng = np.random.default_rng(0)
    tree = {f"x{n}": jnp.asarray(rng.standard_normal(2**13), jnp.float32) for n in range(8)}
    for name, use_compression in (("plain", False), ("zstd", True)):
        trims.clear()
        handler = make_tree_handler(use_compression=use_compression)
        save(handler, tmp_path / name, host_tree(tree))
        assert len(trims) == (4 if use_compression else 0)  # of 8 chunks of 32 KiB
