"""Restoring: into any target and placement, or an error that names everything that does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
import xxhash
from etils import epath
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from storage_helpers import assert_same_arrays, mesh, save

import gockpt_jax as gockpt
from gockpt_jax import GoCkptManager, GoCkptRestore, GoCkptSave
from gockpt_jax.storage.files import checksum_files
from gockpt_jax.storage.inspecting.stored_item import StoredItem
from gockpt_jax.storage.inspecting.verdict import Verdict
from gockpt_jax.storage.inspecting.verify import verify
from gockpt_jax.storage.managing import resume as resuming
from gockpt_jax.storage.restoring import restore as restoring
from gockpt_jax.storage.restoring import stock as stocks
from gockpt_jax.storage.restoring import together
from gockpt_jax.storage.restoring.one_replica import SingleReplicaArgs
from gockpt_jax.storage.restoring.stored import Stored, known_arrays

P = PartitionSpec


def put(value, *spec, sizes=(2, 4), names=("replica", "data")):
    return jax.device_put(value, NamedSharding(mesh(*sizes, names=names), P(*spec)))


def training_state():
    rng = np.random.default_rng(0)
    params = {
        "w": put(rng.standard_normal((16, 8)).astype(np.float32), "data"),
        "b": put(jnp.asarray(rng.standard_normal(8), jnp.bfloat16)),
    }
    moments = jax.tree.map(jnp.ones_like, params)
    return {
        "params": params,
        "opt": (optax.EmptyState(), optax.ScaleByAdamState(put(jnp.int32(7)), params, moments)),
        "key": put(jax.random.key(1)),
        "step": 5,
    }


def abstract(tree, sharding=None):
    def leaf(x):
        if not isinstance(x, jax.Array):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding)

    return jax.tree.map(leaf, tree)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("restore") / "run"
    with GoCkptManager(root) as manager:
        manager.save(3, args=GoCkptSave(training_state()), metrics={"loss": 1.0})
    return root


@pytest.fixture
def reader(root):
    with GoCkptManager(root, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        yield manager


@pytest.fixture
def copy(root, tmp_path):
    return shutil.copytree(root, tmp_path / "copy")


# --- Into any target -----------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["other mesh", "one device", "its own"])
def test_onto_other_devices(reader, placement):
    sharding = {
        "other mesh": NamedSharding(mesh(8, 1), P()),
        "one device": SingleDeviceSharding(jax.devices()[5]),
        "its own": None,
    }[placement]
    target = abstract(training_state(), sharding)
    restored = reader.restore(3, args=GoCkptRestore(target))
    assert_same_arrays(restored, training_state())
    assert jax.tree.structure(restored) == jax.tree.structure(target)
    want = sharding or target["params"]["w"].sharding
    assert restored["params"]["w"].sharding == want


@pytest.mark.parametrize("options", [{}, {"cast": True}, {"single_replica": True}])
def test_where_transfers_are_to_be_explicit(reader, options):
    """As stock does; for all threads, as big_vision sets it. `jax.transfer_guard` is for one."""
    state = training_state()
    target, before = abstract(state), jax.config.jax_transfer_guard
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        restored = reader.restore(3, args=GoCkptRestore(target, **options))
    finally:
        jax.config.update("jax_transfer_guard", before)
    assert_same_arrays(restored, state)


def test_parameters_only(reader):
    target = {"params": abstract(training_state()["params"], NamedSharding(mesh(4, 2), P("data")))}
    restored = reader.restore(3, args=GoCkptRestore(target, partial_restore=True))
    assert_same_arrays(restored, {"params": training_state()["params"]})
    assert restored["params"]["w"].sharding == target["params"]["w"].sharding
    with pytest.raises(gockpt.TargetError, match=r"opt\.1\.mu\.b: bfloat16\[8\]"):
        reader.restore(3, args=GoCkptRestore(target))
    for how in ("partial_restore", "single_replica"):
        with pytest.raises(ValueError, match="need a target"):
            reader.restore(3, args=GoCkptRestore(**{how: True}))


def test_placeholders_are_left_out(reader):
    target = abstract(training_state()) | {"key": ocp.PLACEHOLDER}
    restored = reader.restore(3, args=GoCkptRestore(target, partial_restore=True))
    assert restored.pop("key") is ocp.PLACEHOLDER
    want = training_state()
    del want["key"]
    assert_same_arrays(restored, want)


@pytest.mark.parametrize("how", [GoCkptRestore, ocp.args.StandardRestore])
def test_what_the_metadata_tell_is_a_target(tmp_path, how):
    """As stock's documentation says of its own arguments, which refuse it."""
    state = training_state()["params"] | {"n": 3, "host": np.arange(3)}
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=GoCkptSave(state))
        manager.wait_until_finished()
        restored = manager.restore(0, args=how(manager.item_metadata(0).tree))
    assert_same_arrays(restored, state)
    assert restored["w"].sharding == state["w"].sharding


def test_a_number_may_become_an_array_of_any_dtype(reader):
    target = abstract(training_state()) | {"step": jnp.int32(0)}
    restored = reader.restore(3, args=GoCkptRestore(target))
    assert_same_arrays(restored["step"], jnp.int32(5))


def test_shapes_and_dtypes_may_be_converted_when_asked_for(reader):
    target = abstract(training_state())
    target["params"]["b"] = jax.ShapeDtypeStruct((8,), jnp.float32)
    target["params"]["w"] = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    params = training_state()["params"]
    for wanted, partial in ((target, False), ({"params": target["params"]}, True)):
        args = GoCkptRestore(wanted, cast=True, strict=False, partial_restore=partial)
        restored = reader.restore(3, args=args)
        assert_same_arrays(restored["params"]["b"], params["b"].astype(jnp.float32))
        assert_same_arrays(restored["params"]["w"], params["w"][:, :4])


@pytest.mark.parametrize("way", ["a target", "nothing"])
def test_stock_may_read_as_much_as_it_must_or_as_the_user_says(root, monkeypatch, way):
    """It refuses a leaf that is larger than its limit."""
    args = GoCkptRestore(None if way == "nothing" else abstract(training_state()))
    limits, stock = [], ocp.PyTreeCheckpointHandler

    def made(**options):
        limits.append(options["restore_concurrent_gb"])
        return stock(**options)

    monkeypatch.setattr(ocp, "PyTreeCheckpointHandler", made)
    item = root / "3/state"
    for told in (Stored((3,), "float32"), Stored((2**33,), "float32")):
        all_told = {"x": told, "small": Stored((), "int8")}
        monkeypatch.setattr(restoring, "known_arrays", lambda _, told=all_told: told)
        restoring.restore(item, args, {})
    monkeypatch.setattr(restoring, "known_arrays", lambda _: {})
    restoring.restore(item, args, {})
    read, of_ours = stocks.direct_reads, []
    monkeypatch.setattr(
        stocks, "direct_reads", lambda others, n: (of_ours.append(n), read(others, n))[1]
    )
    restoring.restore(item, args, {"restore_concurrent_gb": 7})
    each = 2 if way == "nothing" else 1  # whose metadata it is asked for first
    assert limits == [gb for gb in (16, 36, 96, 7) for _ in range(each)]
    assert of_ours == [7 * 10**9]


@pytest.mark.parametrize("how", ["partial_restore", "single_replica"])
def test_what_a_target_does_not_say_is_as_it_was_saved(copy, how):
    """Such as that of `jax.eval_shape`: arrays where they lay, though not of the shape they had."""
    state = training_state()
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, state
    )
    with GoCkptManager(copy) as manager:
        restored = manager.restore(3, args=GoCkptRestore(target, **{how: True}))
        assert_same_arrays(restored, state)
        for got, was in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
            assert not isinstance(was, jax.Array) or got.sharding == was.sharding
        target["params"]["w"] = jax.ShapeDtypeStruct((16, 4), jnp.float32)
        args = GoCkptRestore(target, strict=False, **{how: True})
        restored = manager.restore(3, args=args)
        assert_same_arrays(restored["params"]["w"], state["params"]["w"][:, :4])
        forget_devices(copy)
        assert_same_arrays(manager.restore(3, args=args)["key"], state["key"])


@pytest.mark.parametrize("partial", [False, True])
def test_a_target_may_have_texts_and_leave_out_where_arrays_lie(tmp_path, partial):
    with GoCkptManager(tmp_path) as manager:
        sharding = SingleDeviceSharding(jax.devices()[-1])
        state = {"w": jax.device_put(jnp.arange(4.0), sharding), "run": "a", "n": 3}
        manager.save(0, args=GoCkptSave(state))
        target = {"w": jax.ShapeDtypeStruct((4,), "f4"), "run": "", "n": 0}
        restored = manager.restore(0, args=GoCkptRestore(target, partial_restore=partial))
    assert restored["w"].sharding == sharding
    assert (restored["w"].tolist(), restored["run"], restored["n"]) == ([0, 1, 2, 3], "a", 3)


def test_what_lay_elsewhere_is_placed_by_the_target(copy, monkeypatch):
    monkeypatch.setattr(restoring, "stand_in_sharding", lambda: None)
    forget_devices(copy)
    shutil.rmtree(copy / "3/state/_gockpt_checksums")
    target = {"params": jax.eval_shape(lambda: training_state()["params"])}
    with GoCkptManager(copy) as manager, pytest.raises(gockpt.TargetError, match="not here"):
        manager.restore(3, args=GoCkptRestore(target, partial_restore=True))


@pytest.mark.parametrize(
    "options", [{}, {"partial_restore": True}, {"single_replica": True}, {"strict": False}], ids=str
)
@pytest.mark.parametrize("types", [False, True])
def test_arrays_lie_on_the_device_as_the_target_has_them(tmp_path, options, types):
    """`partial_restore` once made nothing of `support_layout`; nor did it hear of handlers."""
    place = NamedSharding(mesh(2, 4), P("data"))
    across = Format(Layout((1, 0)), place)
    state = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), across), "n": 3, "name": "a"}
    state["v"] = jax.device_put(jnp.ones(3), SingleDeviceSharding(jax.devices()[3]))
    state |= {} if types else {"key": jax.random.key(1)}  # of which such a handler knows nothing
    arrays = Arrays()
    given = {"type_handler_registry": registry_of(arrays, str)} if types else {}
    target = state | {"v": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with GoCkptManager(tmp_path, pytree_options=given) as manager:
        manager.save(0, args=GoCkptSave(state))
        restored = manager.restore(0, args=GoCkptRestore(target, support_layout=True, **options))
        plain = manager.restore(0, args=GoCkptRestore(target, **options))
    assert restored["w"].format == state["w"].format
    assert plain["w"].format.layout.major_to_minor == (0, 1)
    assert restored["v"].sharding == state["v"].sharding
    assert_same_arrays(restored, state)
    assert ("w" in arrays.read) == types


@pytest.mark.parametrize("content", [None, b"{", b'{"format": "another"}'])
def test_checksums_that_cannot_be_read_stop_no_restore(copy, content):
    """Nothing is known of the arrays then, and all is read of them."""
    item = copy / "3/state"
    file = item / checksum_files.process_file(0)
    file.unlink() if content is None else file.write_bytes(content)
    assert known_arrays(epath.Path(item)) == {}
    with GoCkptManager(copy) as manager:
        restored = manager.restore(3, args=GoCkptRestore(training_state()))
    assert_same_arrays(restored, training_state())


def forget_devices(root):
    """As if it had been saved on 64 GPUs."""
    file = root / "3/state/_sharding"
    shardings = {
        name: text.replace('"cpu:0"', '"cuda:63"').replace("[2, 4]", "[8, 8]")
        for name, text in json.loads(file.read_text()).items()
    }
    assert any("[8, 8]" in text for text in shardings.values()), shardings
    file.write_text(json.dumps(shardings))


def test_stock_args_without_a_target_say_what_lay_on_devices_that_are_not_here(copy):
    forget_devices(copy)
    shutil.rmtree(copy / "3/state/_gockpt_checksums")
    with GoCkptManager(copy) as manager, pytest.raises(gockpt.TargetError) as raised:
        manager.restore(3, args=ocp.args.StandardRestore())
    assert "it lay on devices that are not here, and no target says where" in str(raised.value)


def test_onto_this_host_from_devices_that_do_not_exist_here(copy):
    forget_devices(copy)
    state = training_state()
    with GoCkptManager(copy) as manager:
        for args in ({}, {"args": GoCkptRestore()}):
            restored = manager.restore(3, **args)
            assert_same_arrays(restored["params"], state["params"])
            assert len(restored["params"]["w"].devices()) == 1
        assert_same_arrays(manager.restore(3, args=GoCkptRestore(abstract(state))), state)
        restored = manager.restore(3, args=GoCkptRestore(fallback_sharding=SingleDeviceSharding(
            jax.devices()[3])))  # fmt: skip
        assert restored["params"]["w"].devices() == {jax.devices()[3]}
        plain = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x,
            state,
        )
        assert_same_arrays(manager.restore(3, args=GoCkptRestore(plain)), state)


@pytest.mark.parametrize(("processes", "backend"), [(1, "cpu"), (2, "cpu"), (1, "gpu")])
def test_only_one_process_on_cpus_stands_in_for_other_devices(monkeypatch, processes, backend):
    first = SingleDeviceSharding(jax.devices()[0])
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    found = restoring.stand_in_sharding()
    assert found == (first if (processes, backend) == (1, "cpu") else None)


def test_one_replica_reads(reader, monkeypatch):
    asked = []
    handler = ocp.type_handlers.SingleReplicaArrayHandler
    deserialize = handler.deserialize

    async def counted(self, infos, args=None):
        asked.extend(info.name for info in infos)
        return await deserialize(self, infos, args)

    monkeypatch.setattr(handler, "deserialize", counted)
    state = training_state()
    target = abstract(state)
    assert_same_arrays(reader.restore(3, args=GoCkptRestore(target, single_replica=True)), state)
    leaves = {"params.w", "params.b", "opt.1.count", "opt.1.mu.w", "opt.1.nu.b"}
    assert leaves <= set(asked)
    assert "key" not in asked  # stock's handler does not know typed keys

    asked.clear()
    args = jax.tree.map(
        lambda x: SingleReplicaArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype)
        if isinstance(x, jax.ShapeDtypeStruct) else ocp.RestoreArgs(),
        target,
    )  # fmt: skip
    stock = ocp.args.PyTreeRestore(target, restore_args=args)
    assert_same_arrays(reader.restore(3, args=stock), state)
    assert leaves <= set(asked)
    params = {"params": target["params"]}
    restored = reader.restore(
        3, args=GoCkptRestore(params, partial_restore=True, single_replica=True)
    )
    assert_same_arrays(restored, {"params": state["params"]})


def test_what_one_replica_cannot_send_is_read_by_all(tmp_path):
    """Stock sends sums with zeros: small integers become wider, and scales (MX) have no zero."""
    dtypes = (
        "bool", "int8", "uint8", "int16", "int4", "int32", "uint32", "bfloat16", "float32",
        "float8_e4m3fn", *(["float8_e8m0fnu"] if hasattr(ts, "float8_e8m0fnu") else []),
    )  # fmt: skip
    state = {dtype: put(jnp.arange(8).astype(dtype), "data") for dtype in dtypes}
    state["on one device"] = jnp.arange(8.0)
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=GoCkptSave(state))
        restored = manager.restore(0, args=GoCkptRestore(abstract(state), single_replica=True))
        assert_same_arrays(restored, state)
        flags = {"bool": abstract(state["bool"])}
        args = GoCkptRestore(flags, single_replica=True, partial_restore=True)
        assert_same_arrays(manager.restore(0, args=args), {"bool": state["bool"]})


def test_one_replica_sends_over_each_leafs_own_mesh(tmp_path):
    """Stock sends all over the first one's, and puts shards where they do not belong."""
    devices = np.array(jax.devices())
    meshes = {
        "a": jax.sharding.Mesh(devices.reshape(2, 4), ("replica", "model")),
        "reversed": jax.sharding.Mesh(devices[::-1].reshape(2, 4), ("replica", "model")),
        "other axes": jax.sharding.Mesh(devices.reshape(2, 2, 2), ("replica", "x", "model")),
    }
    values = jnp.arange(64.0).reshape(8, 8) + 1
    state = {
        name: jax.device_put(values, NamedSharding(mesh, PartitionSpec("model")))
        for name, mesh in meshes.items()
    }
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=GoCkptSave(state))
        restored = manager.restore(0, args=GoCkptRestore(abstract(state), single_replica=True))
    assert_same_arrays(restored, state)
    assert all(restored[name].sharding == state[name].sharding for name in state)


@pytest.mark.parametrize("shape", [(8,), (1, 8)], ids=str)
def test_a_mesh_of_replicas_alone_or_of_one_is_read_by_all(tmp_path, shape):
    """Stock's handler takes a device for a replica there, or finds nothing to send, and raises."""
    axes = ("data", "model")[: len(shape)]
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), axes)
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = {"w": jax.device_put(jnp.arange(8.0), everywhere)}
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=GoCkptSave(state))
        restored = manager.restore(0, args=GoCkptRestore(abstract(state), single_replica=True))
    assert_same_arrays(restored, state)
    assert restored["w"].sharding == everywhere


@pytest.mark.parametrize("axes", ["replica", ("replica", "data"), ("data", "replica")], ids=str)
def test_what_has_no_replicas_is_read_by_all(tmp_path, monkeypatch, axes):
    """Divided over the first axis of the mesh; the others are sent."""
    asked = []
    handler = ocp.type_handlers.SingleReplicaArrayHandler
    deserialize = handler.deserialize

    async def noted(self, infos, args=None):
        asked.extend(info.name for info in infos)
        return await deserialize(self, infos, args)

    monkeypatch.setattr(handler, "deserialize", noted)
    state = {
        "divided": put(jnp.arange(64.0).reshape(8, 8), axes),
        "last": put(jnp.arange(64.0).reshape(8, 8), None, axes),
        "sent": put(jnp.arange(8.0), "data"),
    }
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=GoCkptSave(state))
        restored = manager.restore(0, args=GoCkptRestore(abstract(state), single_replica=True))
    assert_same_arrays(restored, state)
    assert {name: x.sharding for name, x in restored.items()} == {
        name: x.sharding for name, x in state.items()
    }
    assert asked == ["sent"]


def test_one_replica_sends_beside_a_handler_that_does_so_too(tmp_path):
    state = {"v": put(jnp.arange(8.0), "data"), "on one device": jnp.arange(8.0)}
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=GoCkptSave(state))
    types = ocp.type_handlers
    registry = types.create_type_handler_registry((jax.Array, types.SingleReplicaArrayHandler()))
    args = GoCkptRestore(abstract(state), single_replica=True)
    options = {"type_handler_registry": registry}
    assert_same_arrays(restoring.restore(tmp_path / "0/state", args, options), state)


def test_one_replica_sends_where_no_target_is_given(tmp_path):
    state = {name: put(jnp.arange(8.0), "data") for name in "vw"}
    args = {"v": SingleReplicaArgs(sharding=state["v"].sharding), "w": ocp.ArrayRestoreArgs(
        sharding=state["w"].sharding)}  # fmt: skip
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=GoCkptSave(state))
        restored = manager.restore(0, args=ocp.args.PyTreeRestore(restore_args=args))
    assert_same_arrays(restored, state)


# --- The user's own types ------------------------------------------------------------------------


class Seed:
    def __init__(self, value):
        self.value = value


class SeedHandler(ocp.type_handlers.StringHandler):
    def typestr(self):
        return "Seed"

    def memory_size(self, values):  # which Orbax before 0.12.2 asks for
        return super().memory_size([str(x.value) for x in values])

    async def serialize(self, values, infos, args=None):
        return await super().serialize([str(x.value) for x in values], infos, args)

    async def deserialize(self, infos, args=None):
        return [Seed(int(text)) for text in await super().deserialize(infos, args)]


class Arrays(ocp.type_handlers.ArrayHandler):
    def __init__(self):
        super().__init__()
        self.read = []

    async def deserialize(self, infos, args=None):
        self.read += [info.name for info in infos]
        return await super().deserialize(infos, args)


def registry_of(arrays, *more):
    types = (int, np.ndarray, *more)
    stocks = ((ty, ocp.type_handlers.get_type_handler(ty)) for ty in types)
    return ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (Seed, SeedHandler()), *stocks
    )


def nowhere(target):
    return target | {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}


WAYS = {
    "nothing": lambda target: {},
    "GoCkptRestore()": lambda target: {"args": GoCkptRestore()},
    "a target": lambda target: {"args": GoCkptRestore(target)},
    "a target without places": lambda target: {"args": GoCkptRestore(nowhere(target))},
    "a part": lambda target: {"args": GoCkptRestore({"w": target["w"]}, partial_restore=True)},
    "StandardRestore()": lambda target: {"args": ocp.args.StandardRestore()},
    "StandardRestore": lambda target: {"args": ocp.args.StandardRestore(target)},
    "PyTreeRestore()": lambda target: {"args": ocp.args.PyTreeRestore()},
}
AS_SAVED = [way for way in WAYS if way == "nothing" or way.endswith("()")]
stock_warns = pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")


@stock_warns
@pytest.mark.parametrize("way", WAYS)
def test_the_users_handler_of_arrays_reads_them(tmp_path, way):
    arrays = Arrays()
    options = {"type_handler_registry": registry_of(arrays)}
    state = {"w": put(jnp.arange(8.0), "data"), "n": 3, "host": np.arange(3)}
    with GoCkptManager(tmp_path, pytree_options=options) as manager:
        manager.save(0, args=GoCkptSave(state))
        restored = manager.restore(0, **WAYS[way](abstract(state)))
    assert arrays.read == ["w"]
    assert restored["w"].sharding == state["w"].sharding
    assert_same_arrays(restored, state if len(restored) == 3 else {"w": state["w"]})


@stock_warns
@pytest.mark.parametrize("way", [*WAYS, "one replica"])
def test_a_handler_that_orbax_was_told_of_reads_arrays(tmp_path, way):
    """As MaxText does for restores by one replica; each restore into a target failed."""
    state = {"w": put(jnp.arange(8.0), "data"), "n": 3, "host": np.arange(3)}
    one_replica = {"args": GoCkptRestore(abstract(state), single_replica=True)}
    asked = one_replica if way == "one replica" else WAYS[way](abstract(state))
    types, arrays = ocp.type_handlers, Arrays()
    before = types.get_type_handler(jax.Array)
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=GoCkptSave(state))
        types.register_type_handler(jax.Array, arrays, override=True)
        try:
            restored = manager.restore(0, **asked)
        finally:
            types.register_type_handler(jax.Array, before, override=True)
    assert arrays.read == ([] if way == "one replica" else ["w"])
    assert restored["w"].sharding == state["w"].sharding
    assert_same_arrays(restored, state if len(restored) == 3 else {"w": state["w"]})


@stock_warns
@pytest.mark.parametrize("way", AS_SAVED)
def test_a_leaf_that_only_the_users_handler_knows_comes_back(tmp_path, way):
    options = {"type_handler_registry": registry_of(Arrays())}
    state = {"w": jnp.arange(8.0), "seed": Seed(7)}
    with GoCkptManager(tmp_path, pytree_options=options) as manager:
        manager.save(0, args=ocp.args.PyTreeSave(state))
        restored = manager.restore(0, **WAYS[way](None))
        assert set(manager.item_metadata(0).tree) == {"w", "seed"}
    assert (type(restored["seed"]), restored["seed"].value) == (Seed, 7)
    assert_same_arrays(restored["w"], state["w"])


def test_beside_such_leaves_a_part_is_restored_to_where_it_was(copy):
    """Nor does a fallback go unheard where the user has handlers of types."""
    options = {"type_handler_registry": registry_of(Arrays())}
    state = training_state()["params"] | {"seed": Seed(7)}
    last = SingleDeviceSharding(jax.devices()[-1])
    with GoCkptManager(copy, pytree_options=options) as manager:
        manager.save(4, args=ocp.args.PyTreeSave(state))
        target = {"w": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
        restored = manager.restore(4, args=GoCkptRestore(target, partial_restore=True))
        assert restored["w"].sharding == state["w"].sharding
        forget_devices(copy)
        restored = manager.restore(3, args=GoCkptRestore(fallback_sharding=last))
    assert restored["params"]["w"].sharding == last
    assert_same_arrays(restored["params"], training_state()["params"])


@pytest.mark.parametrize("types", [False, True])
@pytest.mark.parametrize("way", [way for way in AS_SAVED if way != "PyTreeRestore()"])
def test_arrays_come_back_as_numpys_where_nobody_knows_where_they_lay(tmp_path, way, types):
    """As of an Orbax that did not write it down. So does stock, without handlers of types."""
    options = {"type_handler_registry": registry_of(Arrays())} if types else {}
    state = {"w": jnp.arange(8.0), "n": 3} | ({"seed": Seed(7)} if types else {})
    with ocp.CheckpointManager(
        tmp_path, item_handlers={"state": ocp.PyTreeCheckpointHandler(**options)}
    ) as stock:
        stock.save(0, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state)))
    (tmp_path / "0/state/_sharding").unlink()
    with GoCkptManager(tmp_path, pytree_options=options) as manager:
        restored = manager.restore(0, **WAYS[way](None))
    assert (type(restored["w"]), restored["w"].tolist(), restored["n"]) == (
        np.ndarray, list(range(8)), 3,
    )  # fmt: skip
    assert not types or restored["seed"].value == 7


@stock_warns
@pytest.mark.parametrize("way", AS_SAVED)
def test_trees_keep_their_types_if_the_metadata_are_to_tell_of_them(tmp_path, way):
    name, state = "pytree_metadata_options", {"pair": (jnp.ones(3), (jnp.zeros(2), 1))}
    plain = inspect.signature(ocp.PyTreeCheckpointHandler).parameters[name].default
    options = {name: dataclasses.replace(plain, support_rich_types=True)}
    with GoCkptManager(tmp_path, pytree_options=options) as manager:
        manager.save(0, args=GoCkptSave(state))
        try:
            restored = manager.restore(0, **WAYS[way](None))
        except NotImplementedError:
            pytest.skip("an older Orbax, which restores none of these")
        assert jax.tree.structure(restored) == jax.tree.structure(state)
        assert type(manager.item_metadata(0).tree["pair"]) is tuple


# --- What does not fit ---------------------------------------------------------------------------


def misfit(target):
    target = dict(target)
    target["params"] = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32),
                        "b": jax.ShapeDtypeStruct((8,), jnp.float32),
                        "head": jax.ShapeDtypeStruct((3,), jnp.int8)}  # fmt: skip
    del target["key"]
    return target


@pytest.mark.parametrize("from_checksums", [True, False])
def test_everything_that_does_not_fit_is_in_one_error(copy, from_checksums):
    if not from_checksums:
        shutil.rmtree(copy / "3/state/_gockpt_checksums")
    with GoCkptManager(copy) as manager, pytest.raises(gockpt.TargetError) as raised:
        manager.restore(3, args=GoCkptRestore(misfit(abstract(training_state()))))
    assert isinstance(raised.value, ValueError)
    assert str(raised.value) == "\n".join([
        f"The checkpoint {copy}/3/state does not fit the target.",
        "1 leaf in the target, but not in the checkpoint:",
        "  params.head: int8[3]",
        "1 leaf in the checkpoint, but not in the target:",
        "  key: uint32[2]",
        "1 leaf of another shape:",
        "  params.w: float32[16, 8] in the checkpoint, float32[16, 4] in the target",
        "1 leaf of another dtype:",
        "  params.b: bfloat16[8] in the checkpoint, float32[8] in the target",
        "Build the target from the model and optimizer that were saved; or in `GoCkptRestore`: "
        "`partial_restore=True` leaves out what the target does not name, `strict=False` pads or "
        "truncates, `cast=True` converts.",
    ])  # fmt: skip


def share_checksums(item, withhold=()):
    """As if two processes had saved it: every second chunk is the first one's."""
    files = [item / "_gockpt_checksums" / f"{name}.json" for name in ("process_0", "process_1")]
    told = json.loads(files[0].read_text())
    leaves = {name: leaf for name, leaf in told["leaves"].items() if name not in withhold}
    for index, file in enumerate(files):
        theirs = {n: x | {"chunks": x["chunks"][1 - index :: 2]} for n, x in leaves.items()}
        theirs = {name: leaf for name, leaf in theirs.items() if leaf["chunks"]}
        file.write_text(json.dumps(told | {"process_index": index, "leaves": theirs}))
    of_all = item / "_gockpt_checksums/item.json"
    whole = json.loads(of_all.read_text()) | {"processes": [0, 1]}
    for file in files:
        made = xxhash.xxh3_128_hexdigest(file.read_bytes())
        whole["files"][file.relative_to(item).as_posix()] = [file.stat().st_size, made]
    whole["digest"] = checksum_files.self_digest(whole)
    of_all.write_text(json.dumps(whole))


@pytest.mark.parametrize("withheld", [(), ("params.w",)])
def test_shapes_are_those_of_all_processes(copy, monkeypatch, withheld):
    """What one of them knows is a part; where they do not know all, the arrays are asked."""
    opened = []
    open_array = StoredItem.open
    monkeypatch.setattr(
        StoredItem, "open", lambda self, name: opened.append(name) or open_array(self, name)
    )
    share_checksums(copy / "3/state", withheld)
    target = abstract(training_state())
    with GoCkptManager(copy) as manager:
        assert_same_arrays(manager.restore(3, args=GoCkptRestore(target)), training_state())
        assert bool(opened) == bool(withheld)
        target["params"]["w"] = jax.ShapeDtypeStruct((16, 4), jnp.float32)
        with pytest.raises(gockpt.TargetError, match=r"w: float32\[16, 8\] in the checkpoint"):
            manager.restore(3, args=GoCkptRestore(target))


@pytest.mark.parametrize("how", ["GoCkptRestore", "StandardRestore", "PyTreeRestore"])
def test_the_files_of_the_checksums_are_read_once(root, monkeypatch, how):
    """A pod has as many of them as processes, and each process reads all."""
    target, read, files = abstract(training_state()), checksum_files._read, []
    monkeypatch.setattr(
        checksum_files, "_read", lambda item, name: files.append(name) or read(item, name)
    )
    stock = {} if how == "StandardRestore" else {
        "restore_args": ocp.checkpoint_utils.construct_restore_args(target)
    }  # fmt: skip
    args = GoCkptRestore(target) if how == "GoCkptRestore" else getattr(ocp.args, how)(
        target, **stock
    )  # fmt: skip
    restoring.restore(root / "3/state", args, {})
    folder = "_gockpt_checksums"
    assert files == [f"{folder}/item.json", f"{folder}/process_0.json"]


def test_shapes_are_not_those_of_a_part(copy, monkeypatch):
    """Each process has storage of its own, and the checksums of what it has written."""
    item, state = copy / "3/state", training_state()
    file = item / "_gockpt_checksums/process_0.json"
    told = json.loads(file.read_text())
    del told["leaves"]["params.w"]["chunks"][-1]
    file.write_text(json.dumps(told))
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        checksum_files.write_item_file(item, None)
    assert_same_arrays(restoring.restore(item, GoCkptRestore(abstract(state)), {}), state)


NUMBERS = {"rate": 0.5, "scale": jnp.bfloat16(0.5), "step": jnp.int32(7), "done": True, "n": 3}


@pytest.mark.parametrize(
    ("name", "wanted", "told"),
    [
        ("rate", 0, "rate: float64[] in the checkpoint, int in the target"),
        ("rate", np.int32(0), "rate: float64[] in the checkpoint, int32[] in the target"),
        ("scale", 0, "scale: bfloat16[] in the checkpoint, int in the target"),
        ("step", False, "step: int32[] in the checkpoint, bool in the target"),
        ("n", False, "n: int64[] in the checkpoint, bool in the target"),
        ("rate", np.float32(0), None),
        ("step", 0, None),
        ("step", 0.0, None),
        ("done", 0, None),
        ("n", np.float32(0), None),
    ],
)
def test_a_number_that_cannot_be_what_the_target_has(tmp_path, name, wanted, told):
    """A rate of 0.5 came back as 0."""
    target = NUMBERS | {name: wanted}
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=GoCkptSave(NUMBERS))
        if told is None:
            assert manager.restore(0, args=GoCkptRestore(target))[name] == NUMBERS[name]
            return
        with pytest.raises(gockpt.TargetError) as raised:
            manager.restore(0, args=GoCkptRestore(target))
        assert f"1 leaf of another dtype:\n  {told}\n" in str(raised.value)
        restored = manager.restore(0, args=GoCkptRestore(target, cast=True))
        assert restored[name] == type(wanted)(NUMBERS[name])


@pytest.mark.parametrize("how", ["StandardRestore", "PyTreeRestore"])
def test_stocks_arguments_get_the_same_error(reader, how):
    target = misfit(abstract(training_state()))
    kwargs = {}
    if how == "PyTreeRestore":
        kwargs["restore_args"] = ocp.checkpoint_utils.construct_restore_args(target)
    with pytest.raises(gockpt.TargetError) as raised:
        reader.restore(3, args=getattr(ocp.args, how)(target, **kwargs))
    assert "params.head: int8[3]" in str(raised.value)
    assert "key: uint32[2]" in str(raised.value)
    assert "params.b" not in str(raised.value)  # stock converts
    assert isinstance(raised.value.__cause__, ValueError)


def test_stocks_arguments_leave_nothing_out(reader):
    target = abstract(training_state(), SingleDeviceSharding(jax.devices()[0]))
    del target["key"]
    with pytest.raises(gockpt.TargetError, match=r"but not in the target:\n  key: uint32\[2\]"):
        reader.restore(3, args=ocp.args.StandardRestore(target))


def test_stocks_arguments_truncate_nothing(tmp_path):
    here = SingleDeviceSharding(jax.devices()[0])
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=GoCkptSave({"w": jnp.ones((16, 8))}))
        target = {"w": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=here)}
        with pytest.raises(gockpt.TargetError, match=r"of another shape:\n  w: float32\[16, 8\]"):
            manager.restore(0, args=ocp.args.StandardRestore(target))
        restored = manager.restore(0, args=ocp.args.StandardRestore(target, strict=False))
        assert restored["w"].shape == (16, 4)


@pytest.mark.parametrize("how", ["transforms", "legacy_transform_fn"])
def test_a_target_of_transforms_need_not_be_like_the_checkpoint(reader, how):
    def refuse(*_):
        raise ValueError("the user's")

    made = ocp.RestoreTransform(
        multi_value_fn=refuse, multi_value_fn_input_args={"step": ocp.RestoreArgs()}
    )
    transforms = {"transforms": {"other": made}, "legacy_transform_fn": refuse}
    target = {"other": jnp.zeros(2)}
    args = ocp.args.PyTreeRestore(
        target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        **{how: transforms[how]},
    )
    with pytest.raises(ValueError, match="the user's") as raised:
        reader.restore(3, args=args)
    assert str(raised.value) == "the user's"


def test_what_nothing_is_restored_into_is_named_for_stocks_arguments_too(reader):
    target = abstract(training_state()) | {"step": object()}
    with pytest.raises(
        gockpt.TargetError, match=r"step: int64\[\] in the checkpoint, object in the target"
    ):
        reader.restore(3, args=ocp.args.StandardRestore(target))


# --- Verified ------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", ["none", "bare", "composite", "in the arguments"])
def test_verified_restores(root, copy, args):
    target = abstract(training_state())
    kwargs = {
        "none": {"verify": True},
        "bare": {"verify": True, "args": GoCkptRestore(target)},
        "composite": {"verify": True, "args": ocp.args.Composite(state=GoCkptRestore(target))},
        "in the arguments": {"args": GoCkptRestore(target, verify=True)},
    }[args]
    options = ocp.CheckpointManagerOptions(read_only=True)
    with GoCkptManager(root, options=options) as manager:
        restored = manager.restore(None, **kwargs)
        restored = restored["state"] if args == "composite" else restored
        assert_same_arrays(restored["params"], training_state()["params"])
    file = copy / "3/state/array_metadatas/process_0"
    file.write_text(file.read_text() + " ")
    with GoCkptManager(copy) as manager, pytest.raises(gockpt.VerifyError) as raised:
        manager.restore(3, **kwargs)
    assert "`array_metadatas/process_0` has" in str(raised.value)
    assert f"{copy}/3/state is damaged" in str(raised.value)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (["whole", "whole"], None),
        (["whole", "damaged", "whole"], "is damaged:\n  here"),
        (["whole", "damaged", "damaged"], "is damaged:\n  here"),
        (["damaged", "whole", "damaged"], "3 is not whole, as one process has found. process 0: i"),
        (["whole", "unreadable"], "the disk"),
    ],
)
@pytest.mark.parametrize("what", ["item", "step"])
def test_what_one_process_finds_all_processes_raise(root, monkeypatch, what, states, said):
    """Where some would go on, they would wait for the others in vain."""
    told = []

    def found(path, share=None):
        assert share == ((1, len(states)) if what == "item" else None)
        if states[1] == "unreadable":
            raise OSError("the disk")
        return Verdict(str(path), ("here",) if states[1] == "damaged" else ())

    class Others:
        """Of which this one is the second."""

        share = 1, len(states)

        def objection(self, subject, mine, timeout_secs):
            told.append(mine)
            return "process 0: it is damaged" if states[0] == "damaged" else mine

    if what == "item":
        monkeypatch.setattr(together, "verify_item", found)
        check = functools.partial(together.require_whole, root / "3", Others())
    else:
        monkeypatch.setattr(resuming, "verify_step", lambda step: found(step.path))
        monkeypatch.setattr(resuming, "require_whole", lambda item, processes: None)
        check = functools.partial(resuming.require_whole_step, root / "3", Others())
    no_error = contextlib.nullcontext()
    with pytest.raises((gockpt.VerifyError, OSError), match=said) if said else no_error:
        check()
    assert [mine is None for mine in told] == [states[1] == "whole"]


def test_a_checkpoint_without_checksums_is_not_verified(tmp_path):
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(0, args=ocp.args.Composite(state=ocp.args.StandardSave({"x": jnp.ones(2)})))
    with GoCkptManager(tmp_path) as manager:
        with pytest.raises(gockpt.VerifyError, match="unchecked:\n  it has no checksums"):
            manager.restore(0, verify=True)
        assert manager.restore(0)["x"].tolist() == [1, 1]


def test_too_little_is_left_of_a_step_to_be_one(tmp_path):
    """Its metadata and its arrays are gone; what is left can be read all the same."""
    with GoCkptManager(tmp_path) as manager:
        items = {"w": GoCkptSave({"a": jnp.ones(2)}), "loop": ocp.args.JsonSave({"at": 3})}
        manager.save(0, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
        (tmp_path / "0/_CHECKPOINT_METADATA").unlink()
        shutil.rmtree(tmp_path / "0/w")
        with pytest.raises(gockpt.VerifyError, match="holds no tree of arrays"):
            manager.restore(0, args=ocp.args.Composite(loop=ocp.args.JsonRestore()), verify=True)


# --- Nothing to resume from ----------------------------------------------------------------------


def resume(root, **options):
    """What a training script does first."""
    manager_options = ocp.CheckpointManagerOptions(**options)
    with GoCkptManager(root, options=manager_options) as manager:
        if manager.latest_step() is None:
            return "fresh"
        return manager.restore(None, args=GoCkptRestore(abstract(training_state())))


def test_an_empty_directory_is_a_fresh_start(tmp_path, caplog):
    assert resume(tmp_path / "new") == "fresh"
    assert not caplog.records
    (tmp_path / "new/config.yaml").write_text("lr: 1")
    (tmp_path / "new/logs_1").mkdir()
    save(ocp.PyTreeCheckpointHandler(), tmp_path / "new/pretrained", {"a": jnp.ones(3)})
    assert resume(tmp_path / "new") == "fresh"
    (tmp_path / "new/7").mkdir()  # Orbax takes it for a step
    with pytest.raises(gockpt.NoCheckpointError, match="it is empty"):
        resume(tmp_path / "new")
    with (
        GoCkptManager(tmp_path / "new") as manager,
        pytest.raises(gockpt.NoCheckpointError, match="it is empty"),
    ):
        manager.restore(7)


def test_a_run_whose_name_has_a_number_may_hold_weights_to_start_from(tmp_path):
    root = tmp_path / "run_7"
    with ocp.StandardCheckpointer() as stock:
        stock.save(root / "pretrained", {"a": jnp.ones(3)})
    assert resume(root) == "fresh"
    with GoCkptManager(root) as manager:
        manager.save(3, args=GoCkptSave(training_state()))
    assert_same_arrays(resume(root), training_state())
    assert [v.state for v in verify(root)] == ["whole", "unchecked", "whole", "whole"]
    (root / "3/_CHECKPOINT_METADATA").unlink()
    assert [v.state for v in verify(root / "3")] == ["damaged", "whole"]


def test_numbered_checkpoints_without_arrays_may_lie_beside_a_fresh_start(tmp_path):
    """Such as the positions that an input pipeline keeps by itself."""
    options = ocp.CheckpointManagerOptions(step_prefix="data")
    with ocp.CheckpointManager(tmp_path, options=options) as stock:
        stock.save(1, args=ocp.args.Composite(position=ocp.args.JsonSave({"at": 3})))
    with GoCkptManager(tmp_path) as manager:
        assert manager.latest_step() is None


def test_weights_to_start_from_may_be_an_item_of_another_run(root, tmp_path):
    """Without metadata of their own; the run's name has no number, so it is no step."""
    run = tmp_path / "run"
    shutil.copytree(root / "3/state", run / "pretrained")
    assert resume(run) == "fresh"


def test_no_directory_is_a_fresh_start_too(tmp_path):
    """Of an evaluation that has come before the training."""
    assert resume(tmp_path / "none", read_only=True) == "fresh"
    with (
        GoCkptManager(tmp_path / "run") as manager,
        pytest.raises(gockpt.NoCheckpointError, match="it does not exist"),
    ):
        manager.restore(None, directory=tmp_path / "none")


def leftovers(root):
    os.rename(root / "3", root / "3.orbax-checkpoint-tmp")


def test_saves_that_never_ended_are_told(copy, caplog):
    leftovers(copy)
    with caplog.at_level(logging.WARNING, "gockpt_jax"):
        assert resume(copy) == "fresh"
    assert "found saves that never ended: `3.orbax-checkpoint-tmp`" in caplog.text
    caplog.clear()
    with GoCkptManager(copy) as manager, caplog.at_level(logging.WARNING, "gockpt_jax"):
        assert [manager.latest_step() for _ in range(3)] == [None] * 3
    assert caplog.text.count("found saves that never ended") == 1  # to who asks at every step, too
    with GoCkptManager(copy) as manager, pytest.raises(gockpt.NoCheckpointError) as raised:
        manager.restore(None)
    told = "saves that never ended: `3.orbax-checkpoint-tmp`. Start from the beginning, or"
    assert told in str(raised.value)


def other_names(root):
    os.rename(root / "3", root / "step_3")


def an_item(root):
    save(ocp.PyTreeCheckpointHandler(), root / "x", {"a": jnp.ones(3)})
    shutil.rmtree(root / "3")
    for entry in (root / "x").iterdir():
        os.rename(entry, root / entry.name)
    (root / "x").rmdir()


def a_step(root):
    for entry in (root / "3").iterdir():
        os.rename(entry, root / entry.name)
    (root / "3").rmdir()


def flax_files(root):
    shutil.rmtree(root / "3")
    (root / "checkpoint_100").write_bytes(b"msgpack")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_names, "found the checkpoints `step_3`. Give a label that is there, or the"),
        (an_item, ": it is itself the item of a checkpoint, not a directory of steps. Restore"),
        (a_step, ": it is itself the step of a checkpoint, not a directory of steps. Give the di"),
        (flax_files, "no checkpoint of Orbax's: `checkpoint_100`. That is not an Orbax layout"),
    ],
)
def test_a_fresh_start_beside_checkpoints_is_refused(copy, change, said):
    change(copy)
    with pytest.raises(gockpt.NoCheckpointError) as raised:
        resume(copy)
    assert isinstance(raised.value, FileNotFoundError)
    assert said in str(raised.value)
    with GoCkptManager(copy) as manager:
        with pytest.raises(gockpt.NoCheckpointError, match="there is no checkpoint to restore"):
            manager.restore(None)
        assert manager.save(9, args=GoCkptSave({"a": jnp.ones(2)}))  # it was told
        manager.wait_until_finished()
        assert manager.latest_step() == 9


def test_what_another_manager_has_saved_since_is_no_fresh_start(tmp_path):
    """An evaluation polls: the first save becomes visible between two of its looks."""
    read_only = ocp.CheckpointManagerOptions(read_only=True)
    with GoCkptManager(tmp_path, options=read_only) as reader, GoCkptManager(tmp_path) as writer:
        writer.save(0, args=GoCkptSave({"a": jnp.ones(2)}))
        writer.wait_until_finished()
        assert reader.latest_step() == 0


def test_of_a_negative_label_there_is_no_checkpoint(reader):
    for call in (reader.restore, reader.metadata, reader.item_metadata):
        with pytest.raises(gockpt.NoCheckpointError, match="has no step `-1`"):
            call(-1)


def test_a_label_that_is_not_there(reader):
    with pytest.raises(
        gockpt.NoCheckpointError, match="has no step `4`: found the checkpoints `3`"
    ):
        reader.restore(4, args=GoCkptRestore(abstract(training_state())))


def test_an_item_of_another_name(tmp_path):
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(model=GoCkptSave({"a": jnp.ones(2)})))
        manager.wait_until_finished()
        with pytest.raises(gockpt.NoCheckpointError) as raised:
            manager.restore(None, args=GoCkptRestore({"a": jnp.ones(2)}))
        assert "has no item `state`; it has `model`" in str(raised.value)
        assert "Composite(model=GoCkptRestore(target))" in str(raised.value)
        assert [v.state for v in verify(tmp_path)] == ["whole", "whole"]
