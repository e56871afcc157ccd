"""What cannot be restored: named errors that say which leaf, file or step it is, and what to do."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import gockpt_jax as gockpt
from gockpt_jax import GoCkptManager, GoCkptRestore
from gockpt_jax.storage.restoring import restore as restoring

enable_x64 = (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64
STATE = {"w": jnp.arange(4.0), "n": jnp.int32(3), "seed": np.int64(7), "name": "a run"}
TARGET = {"w": jax.ShapeDtypeStruct((4,), "f4"), "n": jnp.int32(0), "seed": np.int64(0), "name": ""}
PLAIN = {"use_ocdbt": False, "use_compression": False}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    with GoCkptManager(directory, pytree_options=PLAIN) as manager:
        for step in (0, 4):
            manager.save(step, args=gockpt.GoCkptSave(STATE))
    return directory


def restored(directory: Path, step: int | None = 4, *args: Any, **kwargs: Any) -> Any:
    with GoCkptManager(directory) as manager:
        return manager.restore(step, *args, **kwargs)


def with_leaf(value: Any) -> dict[str, Any]:
    return {"args": GoCkptRestore({**TARGET, "w": value})}


EIGHTHS = jax.sharding.NamedSharding(
    jax.sharding.Mesh(np.array(jax.devices()), "x"), jax.sharding.PartitionSpec("x")
)
NOWHERE = jax.sharding.NamedSharding(EIGHTHS.mesh.abstract_mesh, jax.sharding.PartitionSpec())
NO_DEVICES = "on an `AbstractMesh`, as `jax.eval_shape` has it: name devices, by a `Mesh` of them"
KIND = (
    "1 leaf of another kind:\n  w: float32[4] in the checkpoint, {} in the target\n"
    "Build the target from the model and optimizer that were saved."
)
LEFT_OUT = "1 leaf left out by `PLACEHOLDER`:\n  {}\nBuild the"
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "what went with items": ({"restore_kwargs": {}}, TypeError, "`restore_kwargs=` is Orbax's old"),
    "items": ({"items": STATE}, TypeError, "as in `restore(step, args=GoCkptRestore(state))`."),
    "what is saved": (
        {"args": gockpt.GoCkptSave(STATE)}, TypeError,
        "such as `GoCkptRestore(target)`, got a `GoCkptSave`",
    ),
    "a string": (with_leaf("x"), gockpt.TargetError, KIND.format("str")),
    "an object": (with_leaf(object()), gockpt.TargetError, KIND.format("object")),
    "two of them": (
        {"args": GoCkptRestore({**TARGET, "w": "x", "n": object()})}, gockpt.TargetError,
        "2 leaves of another kind:\n  n: int32[] in the checkpoint, object in the target\n  w: ",
    ),
    "a number for a text": (
        {"args": GoCkptRestore({**TARGET, "name": 1, "w": "x"})}, gockpt.TargetError,
        "2 leaves of another kind:\n  name: string in the checkpoint, int in the target\n  w: ",
    ),
    "an array for a text": (
        {"args": ocp.args.StandardRestore({**TARGET, "name": jnp.ones(3)})}, gockpt.TargetError,
        "1 leaf of another kind:\n  name: string in the checkpoint, float32[3] in the target\n",
    ),
    "a type": (with_leaf(float), gockpt.TargetError, KIND.format("type")),
    "a number": (with_leaf(1.0), gockpt.TargetError, KIND.format("float")),
    "a shape": (
        with_leaf(SimpleNamespace(shape=(4,))), gockpt.TargetError, KIND.format("SimpleNamespace"),
    ),
    "a dtype": (
        with_leaf(SimpleNamespace(dtype=np.dtype("f4"))), gockpt.TargetError,
        KIND.format("SimpleNamespace"),
    ),
    "a placeholder": (with_leaf(ocp.PLACEHOLDER), gockpt.TargetError, LEFT_OUT.format("w")),
    "a placeholder for nothing": (
        {"args": GoCkptRestore({**TARGET, "x": ocp.PLACEHOLDER})}, gockpt.TargetError,
        LEFT_OUT.format("x"),
    ),
    "a placeholder for stock's arguments": (
        {"args": ocp.args.StandardRestore({**TARGET, "w": ocp.PLACEHOLDER})}, gockpt.TargetError,
        LEFT_OUT.format("w"),
    ),
    "a placeholder for several": (
        {"args": GoCkptRestore(ocp.PLACEHOLDER, partial_restore=True)}, gockpt.TargetError,
        LEFT_OUT.format("all of it"),
    ),
    "a placeholder for several, of a tree": (
        {"args": ocp.args.PyTreeRestore(
            ocp.PLACEHOLDER, restore_args=ocp.RestoreArgs(), partial_restore=True
        )},
        gockpt.TargetError, LEFT_OUT.format("all of it"),
    ),
    "a mesh without devices": (
        with_leaf(jax.ShapeDtypeStruct((4,), "f4", sharding=NOWHERE)), gockpt.TargetError,
        f"1 leaf that cannot lie as the target says:\n  w: float32[4]: {NO_DEVICES}",
    ),
    "a mesh without devices, for stock's arguments": (
        {"args": ocp.args.StandardRestore(
            {**TARGET, "w": jax.ShapeDtypeStruct((4,), "f4", sharding=NOWHERE)}
        )},
        gockpt.TargetError, f"  w: float32[4]: {NO_DEVICES}",
    ),
    "a sharding that does not divide": (
        with_leaf(jax.ShapeDtypeStruct((4,), "f4", sharding=EIGHTHS)), gockpt.TargetError,
        "1 leaf that cannot lie as the target says:\n  w: float32[4]: ",  # as JAX says
    ),
    "a sharding that does not divide, for stock's arguments": (
        {"args": ocp.args.StandardRestore(
            {**TARGET, "w": jax.ShapeDtypeStruct((4,), "f4", sharding=EIGHTHS)}
        )},
        gockpt.TargetError, "1 leaf that cannot lie as the target says:\n  w: float32[4]: ",
    ),
    "an item by its name": (
        {"args": ocp.args.Composite(model=GoCkptRestore(TARGET))}, gockpt.NoCheckpointError,
        "/4 has no item `model`; it has `state`. Name the one that you mean:",
    ),
    "an item of another handler": (
        {"args": ocp.args.Composite(state=GoCkptRestore(TARGET), data=ocp.args.JsonRestore())},
        gockpt.NoCheckpointError, "/4 has no item `data`; it has `state`.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_targets(saved: Path, name: str) -> None:
    kwargs, kind, told = REFUSED[name]
    with pytest.raises(kind) as error:
        restored(saved, **kwargs)
    assert told in str(error.value)


def test_a_target_by_position(saved: Path) -> None:
    with pytest.raises(TypeError, match=r"by name, as in .*; got a `dict` without a name"):
        restored(saved, 4, STATE, restore_kwargs={"restore_args": {}})


def test_a_traced_target(saved: Path) -> None:
    def restore(state: Any) -> Any:
        with pytest.raises(gockpt.TargetError, match=r"n: int32\[\] in the .*Tracer in the target"):
            restored(saved, args=GoCkptRestore(state | {"seed": np.int64(0)}))
        return state

    jax.eval_shape(restore, {"w": STATE["w"], "n": STATE["n"]})


def test_a_state_is_its_own_target(saved: Path) -> None:
    """With NumPy's scalars, which are saved as arrays."""
    found = restored(saved, args=GoCkptRestore(STATE))
    for name, value in STATE.items():
        np.testing.assert_array_equal(found[name], value)
        assert np.asarray(found[name]).dtype == np.asarray(value).dtype


def remove(*names: str) -> Callable[[Path], None]:
    def hurt(step: Path) -> None:
        for name in names:
            shutil.rmtree(step / name) if (step / name).is_dir() else (step / name).unlink()

    return hurt


def cut(name: str, content: bytes = b"{") -> Callable[[Path], None]:
    def hurt(step: Path) -> None:
        (step / name).write_bytes(content)

    return hurt


def other(name: str, old: bytes, new: bytes) -> Callable[[Path], None]:
    def hurt(step: Path) -> None:
        content = (step / name).read_bytes()
        assert old in content
        (step / name).write_bytes(content.replace(old, new))

    return hurt


def emptied(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


COPY = "Restore another step, or from a copy."
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a chunk is gone": (remove("state/w/0"), "`w/0` is missing"),
    "a chunk is short": (cut("state/w/0"), "`w/0` has 1 bytes, 16 were written"),
    "a leaf is gone": (remove("state/w"), "`w/.zarray` is missing"),
    "no array": (cut("state/w/.zarray"), "`w/.zarray` has 1 bytes"),
    "no tree": (remove("state/_METADATA"), "`_METADATA` is missing"),
    "half a tree": (cut("state/_METADATA", b'{"tree_metadata": {'), "`_METADATA` has 19 bytes"),
    "another's tree": (cut("state/_METADATA", b"[1, 2]"), "`_METADATA` has 6 bytes"),
    "another leaf": (
        other("state/_METADATA", b'"w"', b'"v"'), "`_METADATA` is damaged: its content has changed",
    ),
    "another shape": (
        other("state/_gockpt_checksums/process_0.json", b"[4]", b"[5]"),
        "`_gockpt_checksums/process_0.json` is damaged: its content has changed",
    ),
    "no shardings": (cut("state/_sharding", b"\xff\xfe"), "`_sharding` has 2 bytes"),
}  # fmt: skip


@pytest.mark.usefixtures("its_own_garbage")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_item(saved: Path, tmp_path: Path, name: str) -> None:
    hurt, told = DAMAGES[name]
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    hurt(tmp_path / "4")
    kwargs = {} if "shardings" in name else {"args": GoCkptRestore(TARGET)}
    with pytest.raises(gockpt.VerifyError) as error:
        restored(tmp_path, None, **kwargs)
    assert f"{tmp_path}/4/state is damaged:\n" in str(error.value)
    assert f"  {told}" in str(error.value)
    assert str(error.value).endswith(COPY)
    assert error.value.__cause__ is not None
    np.testing.assert_array_equal(restored(tmp_path, 0)["w"], STATE["w"])
    del error
    gc.collect()  # stock's reads of the other leaves, which nobody has waited for


@pytest.mark.parametrize("hurt", [remove("state"), emptied])
@pytest.mark.parametrize(
    ("kwargs", "item"),
    [
        ({}, "state"), ({"verify": True}, "state"), ({"args": GoCkptRestore(TARGET)}, "state"),
        ({"args": ocp.args.JsonRestore()}, "default"),  # as stock names it
    ],
)  # fmt: skip
def test_a_step_without_items(
    saved: Path, tmp_path: Path, hurt: Callable[[Path], None], kwargs: dict[str, Any], item: str
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    hurt(tmp_path / "4")
    with pytest.raises(gockpt.NoCheckpointError, match=f"has no item `{item}`: it is empty"):
        restored(tmp_path, **kwargs)


def test_a_tree_of_an_old_orbax(tmp_path: Path) -> None:
    """It wrote no metadata of the tree; stock restores into a target all the same."""
    target = {"w": jnp.zeros(4)}
    with ocp.CheckpointManager(tmp_path, item_names=("state",)) as manager:
        state = ocp.args.StandardSave({"w": jnp.arange(4.0)})
        manager.save(4, args=ocp.args.Composite(state=state))
    (tmp_path / "4/state/_METADATA").unlink()
    with pytest.raises(ValueError, match=r"old Orbax has, of which `ocp.args.StandardRestore\("):
        restored(tmp_path, args=GoCkptRestore(target))
    standard = ocp.args.StandardRestore(target)
    with ocp.CheckpointManager(tmp_path, item_names=("state",)) as manager:
        try:
            manager.restore(4, args=ocp.args.Composite(state=standard))
        except FileNotFoundError:
            pytest.skip("this Orbax does not (0.11.33)")
    assert restored(tmp_path, args=standard)["w"].tolist() == [0, 1, 2, 3]


def test_a_step_that_lacks_an_item_is_not_whole(tmp_path: Path) -> None:
    trees = {name: gockpt.GoCkptSave({"x": jnp.ones(2)}) for name in ("a", "b")}
    with GoCkptManager(tmp_path) as manager:
        manager.save(4, args=ocp.args.Composite(**trees))
        manager.wait_until_finished()
        assert set(manager.restore(4, verify=True).keys()) == {"a", "b"}
        shutil.rmtree(tmp_path / "4" / "b")
        with pytest.raises(gockpt.VerifyError, match="the item `b` is missing\nRestore another"):
            manager.restore(4, verify=True)


@pytest.mark.parametrize(
    ("args", "error"),
    [(GoCkptRestore(STATE), MemoryError), (ocp.args.StandardRestore(), ValueError)],
    ids=["ours", "stock's, without a target that might not fit"],
)
def test_what_is_whole_raises_what_it_raised(
    saved: Path, monkeypatch: pytest.MonkeyPatch, args: Any, error: type[Exception]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error("the user's")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", refuse)
    with pytest.raises(error, match="the user's") as raised:
        restored(saved, args=args)
    told = f"While {saved}/4/state was restored. Whether its values can be read, and are what was"
    assert str(raised.value) == "the user's"
    assert raised.value.__notes__[0].startswith(told)


def test_a_key_of_another_algorithm(tmp_path: Path) -> None:
    """`strict=False` would make another key of it."""
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=gockpt.GoCkptSave({"key": jax.random.key(0)}))
        manager.wait_until_finished()
        other = GoCkptRestore({"key": jax.random.key(0, impl="rbg")})
        with pytest.raises(gockpt.TargetError, match="1 leaf of another kind:\n  key: ") as refused:
            manager.restore(0, args=other)
    assert "strict" not in str(refused.value)


RBG = jax.random.key(5, impl="rbg")
ALIKE = {
    "key<rbg>": RBG,
    "key<urbg>": jax.random.key(5, impl="unsafe_rbg"),
    "uint32": jax.random.key_data(RBG),
}


@pytest.mark.parametrize("abstract", [False, True])
@pytest.mark.parametrize("want", ALIKE)
@pytest.mark.parametrize("have", ALIKE)
def test_keys_whose_data_are_alike(tmp_path: Path, have: str, want: str, abstract: bool) -> None:
    """Stock gives what was saved; the step would fail, or be compiled for other numbers."""
    target: Any = ALIKE[want]
    if abstract:
        target = jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=target.sharding)
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=gockpt.GoCkptSave({"key": ALIKE[have]}))
        manager.wait_until_finished()
        args = GoCkptRestore({"key": target})
        # `ocp.utils.to_shape_dtype_struct` makes such a target of any key.
        if have == want or (abstract and want == "uint32"):
            assert str(manager.restore(0, args=args)["key"].dtype) == have
            return
        told = f"1 leaf of another kind:\n  key: {have} in the checkpoint, {want} in the target"
        with pytest.raises(gockpt.TargetError, match=told):
            manager.restore(0, args=args)
        stocks = ocp.args.StandardRestore({"key": target})
        assert str(manager.restore(0, args=stocks)["key"].dtype) == have


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("save", [gockpt.GoCkptSave, ocp.args.StandardSave])
def test_keys_by_the_target_that_orbax_makes(tmp_path: Path, save: Any, devices: int) -> None:
    """As its documentation says; of a key it makes a target of the key's data.

    Of an array of NumPy it makes one that lies nowhere, which is NumPy's again: 64 bits stay.
    """
    mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    keys = jax.device_put(jax.random.split(jax.random.key(3), 8), split)
    state = {"keys": keys, "rbg": RBG, "w": jnp.ones(3), "n": np.arange(3) + 2**40}
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=save(state))
        manager.wait_until_finished()
        restored = manager.restore(0, args=GoCkptRestore(target))
    assert isinstance(restored["n"], np.ndarray)
    np.testing.assert_array_equal(restored["n"], state["n"])
    for name in ("keys", "rbg"):
        assert restored[name].dtype == state[name].dtype
        np.testing.assert_array_equal(*(jax.random.key_data(x[name]) for x in (restored, state)))
    assert restored["keys"].sharding.is_equivalent_to(split, 1)


@pytest.mark.parametrize("rules", [{}, {"strict": False}, {"partial_restore": True}])
def test_the_data_of_a_key_for_numpy(tmp_path: Path, rules: dict[str, Any]) -> None:
    """There stock gives what the target says: a host that looks at keys needs no device."""
    data = np.asarray(ALIKE["uint32"])
    with GoCkptManager(tmp_path) as manager:
        manager.save(0, args=gockpt.GoCkptSave({"key": RBG}))
        manager.wait_until_finished()
        target = {"key": np.zeros_like(data)}
        restored = manager.restore(0, args=GoCkptRestore(target, **rules))["key"]
    assert type(restored) is np.ndarray
    np.testing.assert_array_equal(restored, data)


@pytest.mark.parametrize("asks", ["delete", "metadata", "item_metadata"])
def test_a_step_that_is_not_there(saved: Path, asks: str) -> None:
    with (
        GoCkptManager(saved) as manager,
        pytest.raises(
            gockpt.NoCheckpointError, match="no step `9`: found the checkpoints `0`, `4`"
        ),
    ):
        getattr(manager, asks)(9)


ASKS = ["restore", "delete", "metadata", "item_metadata"]


@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("label", ["4", 4.0, True, b"4", np.float32(4), np.array([4])], ids=repr)
def test_a_label_that_is_no_integer(saved: Path, asks: str, label: Any) -> None:
    """Of some, checkpoints were found, which `save` would not have taken."""
    with GoCkptManager(saved) as manager:
        with pytest.raises(TypeError, match=r"`step` must be an integer of at least 0, got "):
            getattr(manager, asks)(label)
        assert manager.all_steps() == [0, 4]


@pytest.mark.parametrize("kind", [np.int64, np.uint8, jnp.int32])
def test_labels_of_numpy_and_jax(tmp_path: Path, kind: Any) -> None:
    with GoCkptManager(tmp_path, metadata={"run": 7}) as manager:
        manager.save(kind(4), args=gockpt.GoCkptSave(STATE))
        manager.wait_until_finished()
        assert manager.restore(kind(4))["seed"] == manager.restore(None)["seed"] == 7
        assert "seed" in manager.metadata(kind(4)).item_metadata
        asked = (manager.metadata(None), manager.metadata())
        assert [found.custom_metadata for found in asked] == [{"run": 7}] * 2
        manager.delete(kind(4))
        assert manager.all_steps() == []
        for ask in (getattr(manager, name) for name in ASKS):
            with pytest.raises(gockpt.NoCheckpointError):
                ask(-1)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Arrays of 64 bits, and others."""
    directory = tmp_path_factory.mktemp("wide")
    with enable_x64(True), GoCkptManager(directory) as manager:
        state = {
            "tokens": jnp.asarray([12884901895]), "big": jnp.asarray(1 + 2**-40),
            "w": jnp.ones(2, "f4"), "seed": np.int64(12884901895),
        }  # fmt: skip
        manager.save(4, args=gockpt.GoCkptSave(state))
    return directory


WIDE_TARGET = {
    "tokens": jax.ShapeDtypeStruct((1,), "i8"), "big": jax.ShapeDtypeStruct((), "f8"),
    "w": jax.ShapeDtypeStruct((2,), "f4"), "seed": np.int64(0),
}  # fmt: skip


@pytest.mark.parametrize("target", [None, WIDE_TARGET], ids=["no target", "as it was saved"])
def test_what_jax_would_make_smaller_numbers_of(target: Any, wide: Path) -> None:
    """It does so without a word: 12884901895 was 7, and 1e300 would be infinite."""
    args = GoCkptRestore(target, verify=True)
    with pytest.raises(gockpt.TargetError, match="2 leaves of another dtype:\n  big: f") as refused:
        restored(wide, args=args)
    assert "`jax_enable_x64` is off" in str(refused.value)
    with pytest.raises(gockpt.TargetError, match="tokens: int64"):
        restored(wide, args=GoCkptRestore(target))
    with enable_x64(True):
        found = restored(wide, args=args)
        assert (found["tokens"].tolist(), float(found["big"])) == ([12884901895], 1 + 2**-40)
    cast = restored(wide, args=GoCkptRestore(target, cast=True))
    assert {name: str(x.dtype) for name, x in cast.items()} == {
        "tokens": "int32", "big": "float32", "w": "float32", "seed": "int64",
    }  # fmt: skip


def test_numbers_of_64_bits_come_back_into_numpy(wide: Path) -> None:
    target = {**WIDE_TARGET, "tokens": np.zeros(1, "i8"), "big": np.zeros((), "f8")}
    found = restored(wide, args=GoCkptRestore(target))
    assert (found["tokens"].tolist(), float(found["big"])) == ([12884901895], 1 + 2**-40)


def test_what_is_deleted_while_it_is_restored(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job's retention: raw errors of whoever missed a file first."""
    root = Path(shutil.copytree(saved, tmp_path / "run"))
    known = restoring.known_arrays
    monkeypatch.setattr(restoring, "known_arrays", lambda item: shutil.rmtree(item) or known(item))
    with pytest.raises(
        gockpt.NoCheckpointError, match="deleted while it was restored, as by the ret"
    ):
        restored(root)
