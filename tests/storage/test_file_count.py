"""How many files a save makes: docs/storage.md says for which states they are few."""

import logging
import math

import jax.numpy as jnp
import numpy as np
import pytest
from storage_helpers import host_tree, save

from gockpt_jax.storage import array_layout, writer
from gockpt_jax.storage.tree_handler import make_tree_handler

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


def files_per_tb(shapes, shards, chunk_bytes):
    """Files of leaves that are cut into `shards` along their longest axis."""
    files = nbytes = 0
    for shape in shapes:
        longest = max(range(len(shape)), key=lambda axis: shape[axis])
        parts = math.gcd(shards, shape[longest])
        write = tuple(n // parts if axis == longest else n for axis, n in enumerate(shape))
        chunk = array_layout.chunk_shape(shape, write, 4, chunk_bytes)
        files += 1 + array_layout.chunk_count(shape, chunk)
        nbytes += 4 * math.prod(shape)
    assert nbytes == pytest.approx(847e9, rel=0.01)
    return files / nbytes * 1e12


def test_of_a_model_of_70_billion_parameters():
    """The figures of docs/storage.md."""
    chunk_bytes = array_layout._FILE_CHUNK_BYTES
    figures = {
        (stacked, shards): files_per_tb(llama_70b(stacked), shards, chunk_bytes)
        for stacked in (False, True)
        for shards in (1, 8, 64)
    }
    assert {key: round(value, -2) for key, value in figures.items()} == {
        (False, 1): 7800,
        (False, 8): 23100,
        (False, 64): 166500,
        (True, 1): 6200,
        (True, 8): 6000,
        (True, 64): 7300,
    }


def advice(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "gockpt_jax"]


def test_the_count_is_that_of_the_disk(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(writer, "_MANY_FILES", 17)
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
    monkeypatch.setattr(writer, "_MANY_FILES", 12)
    with caplog.at_level(logging.WARNING, "gockpt_jax"):
        for n in range(2, 4):
            save(handler, tmp_path / str(n), host_tree(tree))
    assert [text.split(",")[0] for text in advice(caplog)] == ["A save makes 13 files"]


def test_plain_files_are_large_and_what_tensorstore_compresses_is_small(tmp_path):
    def default(*, use_ocdbt=False, use_zarr3=False, compressed=False):
        layout = array_layout.ItemLayout("folder", use_ocdbt, use_zarr3, compressed)
        return layout.default_chunk_bytes

    assert default() == 256 * 2**20
    assert default(compressed=True) == default(use_ocdbt=True) == 64 * 2**20
    assert default(use_zarr3=True) == 64 * 2**20


def test_memory_of_compressed_chunks_is_given_back(tmp_path, monkeypatch):
    from gockpt_jax.storage import write_budget

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
