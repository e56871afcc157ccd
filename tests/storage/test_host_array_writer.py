"""What the storage room writes, against stock Orbax: the same bytes, and stock reads them."""

import importlib.metadata
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from storage_helpers import (
    assert_same_arrays,
    disk_contents,
    example_state,
    host_tree,
    mesh,
    resolved,
    save,
)

from gockpt_jax.storage.writing import array_layout
from gockpt_jax.storage.writing.array_layout import chunk_shape
from gockpt_jax.storage.writing.host_array import HostArray
from gockpt_jax.storage.writing.tree_handler import make_tree_handler

IS_OLD = importlib.metadata.version("orbax-checkpoint").startswith("0.11.")
"""Whether stock's choice of a layout does not depend on the platform yet."""
OPTIONS = [
    pytest.param(
        {"use_ocdbt": ocdbt, "use_zarr3": zarr3, "use_compression": compress},
        id=f"ocdbt={ocdbt}-zarr3={zarr3}-compress={compress}",
    )
    for ocdbt, zarr3, compress in itertools.product([True, False], repeat=3)
]


# --- The same bytes as stock ---------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
def test_disk_contents_are_those_of_a_stock_save(tmp_path, options):
    state = example_state()
    save(ocp.PyTreeCheckpointHandler(**options), tmp_path / "stock", state)
    save(make_tree_handler(**options), tmp_path / "ours", host_tree(state))
    ours, stock = disk_contents(tmp_path / "ours"), disk_contents(tmp_path / "stock")
    assert ours.keys() == stock.keys()
    for name in stock:
        assert ours[name] == stock[name], name
    assert {"_METADATA", "_sharding", "array_metadatas/process_0"} <= ours.keys()


# Those that JAX can make and that stock takes; it refuses uint4, as we then do.
RARE_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int4", "int2", "float16", "complex64", "uint8")


@pytest.mark.parametrize("options", OPTIONS)
def test_rare_dtypes_and_module_states_are_those_of_a_stock_save(tmp_path, options):
    state = {name: jnp.asarray(np.arange(6).reshape(2, 3) % 2, name) for name in RARE_DTYPES}
    state = {"rare": state, "module": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))}
    save(ocp.PyTreeCheckpointHandler(**options), tmp_path / "stock", state)
    save(make_tree_handler(**options), tmp_path / "ours", host_tree(state))
    ours, stock = disk_contents(tmp_path / "ours"), disk_contents(tmp_path / "stock")
    assert ours == stock
    assert b"module" in stock["_METADATA"]


def test_what_stock_refuses_is_refused(tmp_path):
    state = {"x": jnp.ones((2, 2), "uint4")}
    for handler, tree in (
        (ocp.PyTreeCheckpointHandler(), state),
        (make_tree_handler(), host_tree(state)),
    ):
        with pytest.raises(ValueError, match="Unsupported data type"):
            save(handler, tmp_path / "x", tree)


@pytest.mark.parametrize("options", OPTIONS)
def test_large_leaves_are_those_of_a_stock_save(tmp_path, options):
    """Chunks of a MiB and more, which go past the page cache where they are plain files."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, (64, 24, 512), np.uint32).view(np.float32)
    state = {
        "whole": jnp.asarray(values),
        "columns": jax.device_put(values, NamedSharding(mesh(2, 4), PartitionSpec(None, "data"))),
        "bf16": jnp.asarray(rng.integers(0, 2**16, (1024, 1025), np.uint16)).view(jnp.bfloat16),
    }
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=2**20 + 2**19), state)
    save(ocp.PyTreeCheckpointHandler(**options), tmp_path / "stock", state, save_args=save_args)
    ours = make_tree_handler(**options)
    save(ours, tmp_path / "ours", host_tree(state), save_args=save_args)
    ours, stock = disk_contents(tmp_path / "ours"), disk_contents(tmp_path / "stock")
    assert ours.keys() == stock.keys()
    assert [name for name in stock if ours[name] != stock[name]] == []


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}], ids=["ocdbt", "files"])
def test_our_default_chunks_are_those_of_stock_with_that_option(tmp_path, options, monkeypatch):
    """At a size that a test can write; what the user says of a leaf comes first."""
    for name in ("_CHUNK_BYTES", "_FILE_BYTES"):
        assert getattr(array_layout, name) >= 64 * 2**20
        monkeypatch.setattr(array_layout, name, 200)
    state = {k: example_state()[k] for k in ("replicated", "fsdp", "bf16", "single", "keys")}
    stock_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=200), state)
    our_args = jax.tree.map(lambda _: ocp.SaveArgs(), state)
    stock_args["single"] = our_args["single"] = ocp.SaveArgs(chunk_byte_size=900)
    stock_args["bf16"] = ocp.SaveArgs(chunk_byte_size=200, dtype=np.dtype(np.float32))
    our_args["bf16"] = ocp.SaveArgs(dtype=np.dtype(np.float32))
    save(ocp.PyTreeCheckpointHandler(**options), tmp_path / "stock", state, save_args=stock_args)
    ours = make_tree_handler(**options)
    save(ours, tmp_path / "ours", host_tree(state), save_args=our_args)
    assert disk_contents(tmp_path / "ours") == disk_contents(tmp_path / "stock")


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}], ids=["ocdbt", "files"])
@pytest.mark.parametrize(
    "save_args",
    [
        ocp.SaveArgs(dtype=jnp.dtype("bfloat16")),
        ocp.SaveArgs(chunk_byte_size=100),
        ocp.SaveArgs(shard_axes=(0,)),
        ocp.SaveArgs(shard_axes=(1,), chunk_byte_size=64, dtype=jnp.dtype("float16")),
    ],
    ids=str,
)
def test_save_args_do_what_they_do_in_stock(tmp_path, options, save_args):
    state = {k: example_state()[k] for k in ("replicated", "fsdp", "mixed", "both", "odd")}
    args = {"save_args": jax.tree.map(lambda _: save_args, state)}
    save(ocp.PyTreeCheckpointHandler(**options), tmp_path / "stock", state, **args)
    save(make_tree_handler(**options), tmp_path / "ours", host_tree(state), **args)
    assert disk_contents(tmp_path / "ours") == disk_contents(tmp_path / "stock")


@pytest.mark.parametrize(("use_ocdbt", "size"), [(True, 200), (True, 0), (False, 200)])
def test_shards_above_the_data_file_size_are_split_like_stock(tmp_path, use_ocdbt, size):
    """Stock's rule for 2 GiB, at a size that a test can write; 0 is none, and files have none."""
    state = {k: example_state()[k] for k in ("replicated", "fsdp", "bf16", "single", "keys")}
    args, options = {"ocdbt_target_data_file_size": size}, {"use_ocdbt": use_ocdbt}
    save(ocp.PyTreeCheckpointHandler(**options), tmp_path / "stock", state, **args)
    save(make_tree_handler(**options), tmp_path / "ours", host_tree(state), **args)
    ours = disk_contents(tmp_path / "ours")
    assert ours == disk_contents(tmp_path / "stock")
    written = ours["manifest.ocdbt"] if use_ocdbt else {name.encode() for name in ours}
    assert b"single/0.0" in written
    assert (b"single/1.0" in written) == (use_ocdbt and size > 0)


def test_chunk_shapes_are_those_of_stock(tmp_path):
    """Many shapes, and shards above 2 GiB, without any data."""
    draw = random.Random(0)
    context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
    for _ in range(300):
        write = tuple(draw.choice([1, 2, 3, 12, 17, 96, 1000, 50257]) for _ in range(3))
        shape = tuple(n * draw.choice([1, 1, 2]) for n in write)
        limit_bytes = draw.choice([None, 8, 1000, 2**16, 2**31])
        args = ocp.SaveArgs(chunk_byte_size=limit_bytes)
        info = ocp.type_handlers.ParamInfo(
            name="x", parent_dir=ocp.test_utils.epath.Path(tmp_path), ts_context=context
        )
        stock = ocp.type_handlers.get_json_tspec_write(
            info, True, shape, write, np.dtype(np.float32), process_index=0, arg=args
        )
        ours = chunk_shape(shape, write, 4, min(limit_bytes or 2**31, 2**31))
        assert ours == tuple(stock["metadata"]["chunks"])
    assert chunk_shape((8,), (8,), 4, 4) == (1,)
    with pytest.raises(ValueError, match="`chunk_byte_size`: expected at least 4, got 3"):
        chunk_shape((8,), (8,), 4, 3)
    with pytest.raises(ValueError, match=r"`shard_axes`: expected axes of a 1-d array, got \(1,\)"):
        chunk_shape((8,), (8,), 4, 8, (1,))


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"use_replica_parallel": False},
        {"use_replica_parallel": True, "max_replicas_for_replica_parallel": 2},
        {"use_replica_parallel": True, "min_slice_bytes_for_replica_parallel": 400},
        {"use_replica_parallel": True, "min_slice_bytes_for_replica_parallel": 100},
    ],
    ids=str,
)
@pytest.mark.parametrize("platforms", ["", *([] if IS_OLD else ["cuda,cpu", "GPU"])])
def test_replica_layouts_are_those_of_stock(tmp_path, monkeypatch, layout, platforms):
    """Stock's own choice is made by the environment."""
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    state = {k: v for k, v in example_state().items() if isinstance(v, jax.Array)}
    stock = ocp.type_handlers.ArrayHandler(**layout)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, stock))
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
    save(handler, tmp_path / "stock", state)
    ours = make_tree_handler(**layout)
    save(ours, tmp_path / "ours", host_tree(state))
    key = "manifest.ocdbt"  # A stock handler made by a user writes no `array_metadatas`.
    assert disk_contents(tmp_path / "ours")[key] == disk_contents(tmp_path / "stock")[key]


def test_what_is_in_pinned_memory_is_cut_as_stock_cuts_it(tmp_path):
    """Which slices replicas of what suits its tiles alone."""
    place = NamedSharding(mesh(4, 2), PartitionSpec(), memory_kind="pinned_host")
    shapes = [(1024,), (8, 128), (16, 64), (24, 256), (3, 128), (8, 8, 128)]
    state = {
        f"x{n}": jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), place)
        for n, shape in enumerate(shapes)
    }
    save(ocp.PyTreeCheckpointHandler(), tmp_path / "stock", state)
    save(make_tree_handler(), tmp_path / "ours", host_tree(state))
    ours = disk_contents(tmp_path / "ours")
    assert ours == disk_contents(tmp_path / "stock")
    keys = ours["manifest.ocdbt"].keys()
    assert [
        f"x{n}/1{'.0' * (len(shape) - 1)}".encode() in keys for n, shape in enumerate(shapes)
    ] == [False, True, False, True, False, True]


@pytest.mark.parametrize(
    "options",
    [{}, {"use_compression": False}, {"use_compression": False, "use_ocdbt": False}],
    ids=["compressed", "ocdbt", "files"],
)
def test_any_partition_into_boxes_gives_the_same_bytes(tmp_path, options):
    """Boxes need not be shards: rows of a shard, and pieces of a chunk, in any order."""
    state = {"x": example_state()["fsdp"]}
    values = np.asarray(state["x"])
    edges = [0, 1, 4, 6, 7, 12, 16]
    shards = [
        resolved((slice(a, b), slice(c, d)), values[a:b, c:d])
        for a, b in itertools.pairwise(edges)
        for c, d in ((0, 5), (5, 24))
    ]
    random.Random(0).shuffle(shards)
    array = HostArray(values.shape, values.dtype, state["x"].sharding, shards)
    save(ocp.PyTreeCheckpointHandler(**options), tmp_path / "stock", state)
    save(make_tree_handler(**options), tmp_path / "ours", {"x": array})
    assert disk_contents(tmp_path / "ours") == disk_contents(tmp_path / "stock")


# --- Stock reads it ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False, "use_zarr3": True}], ids=str)
def test_stock_restores_on_another_mesh(tmp_path, options):
    state = example_state()
    del state["text"]  # Stock refuses strings and NumPy scalars in a target.
    save(make_tree_handler(**options), tmp_path / "x", host_tree(state))
    other = NamedSharding(mesh(2, 4), PartitionSpec())

    def target(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=other)

    abstract = jax.tree.map(lambda x: target(x) if isinstance(x, jax.Array) else x, state)
    abstract |= {"scalars": [0, 0.0, 0.0]}
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "x", abstract)
    assert_same_arrays(restored, state | {"scalars": [3, 2.5, 1.5]})
    assert restored["mixed"].sharding == other


@pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")
def test_stock_restores_without_a_target(tmp_path):
    state = example_state()
    save(make_tree_handler(), tmp_path / "x", host_tree(state))
    with ocp.StandardCheckpointer() as checkpointer:
        plain = checkpointer.restore(tmp_path / "x")
    with ocp.PyTreeCheckpointer() as checkpointer:
        pytree = checkpointer.restore(tmp_path / "x")
    arrays = {k: v for k, v in state.items() if isinstance(v, jax.Array)}
    for restored in (plain, pytree):
        assert_same_arrays({k: restored[k] for k in arrays}, arrays)
        assert restored["mixed"].sharding == state["mixed"].sharding
        assert restored["scalars"] == [3, 2.5, 1.5]
        assert restored["text"] == "of a state"


def test_our_handler_restores_too(tmp_path):
    state = {"x": example_state()["mixed"]}
    handler = make_tree_handler()
    with ocp.Checkpointer(handler) as checkpointer:  # Without asynchronous saving.
        checkpointer.save(tmp_path / "x", args=ocp.args.PyTreeSave(host_tree(state)))
        restore_args = ocp.checkpoint_utils.construct_restore_args(state)
        args = ocp.args.PyTreeRestore(state, restore_args)
        assert_same_arrays(checkpointer.restore(tmp_path / "x", args=args), state)
