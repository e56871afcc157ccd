"""Invariant 6: stock Orbax cannot tell a window checkpoint from one of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import nursery
import orbax.checkpoint as ocp
import pytest
from bits import Bits, differing
from programs import PROGRAMS

# The folder next door is no package; its helpers are found from here by the folder's name.
from storage.storage_helpers import disk_contents

import gockpt_jax as gockpt

from .processes import environment
from .states import bits_of
from .trainer import LIMIT_SECS, PROGRAM, WINDOW_STEPS, Trainer

CASES = ["clip_adamw", "batch_stats_dropout", "transformer_bf16"]
LABEL = 8
STOCK_LAYOUT = {"use_ocdbt": True, "use_compression": True}
LOCAL_LAYOUT = {"use_compression": False}
CHECKSUMS = "_gockpt_checksums"


def train_to_window(directory: Path, **options: Any) -> tuple[Trainer, Bits]:
    """Trains until save 8 has come from a window; returns the trainer, closed, and the state."""
    with Trainer(directory, **options) as trainer:
        trainer.run(LABEL)
        trainer.assert_intact()
        assert trainer.report(LABEL).kind == "window"
        assert trainer.report(LABEL).early_bytes
    return trainer, trainer.given[LABEL]


@pytest.mark.parametrize(
    "program",
    [CASES[0], pytest.param(CASES[1], marks=pytest.mark.thorough), CASES[2]],
)
def test_restores_without_gockpt_jax(tmp_path: Path, program: str) -> None:
    trainer, given = train_to_window(tmp_path / "run", program=program, devices=8)
    want = {path: bits.tobytes() for path, bits in given.items()}
    ways_on = {8: ["manager", "item", "mesh"]}
    if program == CASES[0]:  # a process of its own
        ways_on[1] = ["single"]
    for devices, ways in ways_on.items():
        words = [str(trainer.directory), str(LABEL), program, str(tmp_path), *ways]
        reader = nursery.run(
            str(Path(__file__).with_name("stock_reader.py")), *words,
            env=environment(devices), cwd=tmp_path, limit_secs=LIMIT_SECS,
        )  # fmt: skip
        assert reader.returncode == 0, reader.stderr
        for what in ways:
            with np.load(tmp_path / f"{what}.npz") as found:
                got = {path: found[path].tobytes() for path in found.files}
            assert got.keys() == want.keys()
            assert [path for path in want if got[path] != want[path]] == [], what


# --- The same files ------------------------------------------------------------------------------


def without_times(metadata: Path) -> Any:
    """The step's own metadata, apart from when it was written."""
    found = json.loads(metadata.read_text())
    return {key: value for key, value in found.items() if "timestamp" not in key}


def as_json(contents: dict[str, Any]) -> dict[str, Any]:
    return {
        name: json.loads(value) if name.endswith(("_METADATA", "process_0")) and value else value
        for name, value in contents.items()
    }


def files_of(directory: Path) -> list[str]:
    """All files by name; those of OCDBT's data bear random names, and ours come on top."""
    files = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return sorted(
        file.as_posix()
        for file in files
        if file.parent.name not in ("d", CHECKSUMS) and "direct" not in file.parts
    )


@pytest.mark.parametrize(
    ("program", "asynchronous", "audit"),
    [
        *((program, True, gockpt.Audit()) for program in CASES[:2]),
        pytest.param(CASES[2], True, gockpt.Audit(), marks=pytest.mark.thorough),
        (CASES[0], False, gockpt.Audit()),
        (CASES[0], True, None),
    ],
)
def test_files_are_those_of_a_stock_save(
    tmp_path: Path, program: str, asynchronous: bool, audit: gockpt.Audit | None
) -> None:
    """Names, keys, values and metadata, with the state that the window brought to the host."""
    options = {"enable_async_checkpointing": asynchronous}
    window = gockpt.WindowOptions(steps=WINDOW_STEPS, audit=audit)
    trainer, _ = train_to_window(
        tmp_path / "ours", program=program, devices=8, window=window,
        pytree_options=STOCK_LAYOUT, **options,
    )  # fmt: skip
    stock_options = ocp.CheckpointManagerOptions(**options)
    with ocp.CheckpointManager(tmp_path / "stock", options=stock_options) as stock:
        args = ocp.args.Composite(state=ocp.args.StandardSave(trainer.state))
        stock.save(LABEL, args=args)
    ours, theirs = tmp_path / "ours" / str(LABEL), tmp_path / "stock" / str(LABEL)
    assert files_of(ours) == files_of(theirs)
    assert_same_item(ours, theirs, audited=audit is not None)
    name = "_CHECKPOINT_METADATA"
    assert without_times(ours / name) == without_times(theirs / name)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"use_ocdbt": False},
        {"use_ocdbt": False, "use_compression": True},
        {"use_zarr3": True},
        {"use_ocdbt": False, "use_zarr3": True},
        {**STOCK_LAYOUT, "use_zarr3": True},
    ],
    ids=str,
)
def test_layout_options_are_those_of_stock(tmp_path: Path, layout: dict[str, bool]) -> None:
    """What the user does not say is what this disk is best at: nothing but stock's own options."""
    trainer, _ = train_to_window(tmp_path / "ours", devices=8, pytree_options=layout)
    handlers = {"state": ocp.PyTreeCheckpointHandler(**{**LOCAL_LAYOUT, **layout})}
    with ocp.CheckpointManager(tmp_path / "stock", item_handlers=handlers) as stock:
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(trainer.state))
        stock.save(LABEL, args=args)
    ours, theirs = tmp_path / "ours" / str(LABEL), tmp_path / "stock" / str(LABEL)
    assert files_of(ours) == files_of(theirs)
    assert_same_item(ours, theirs)


def assert_same_item(ours: Path, theirs: Path, *, audited: bool = True) -> None:
    """The item's files hold the same bytes, its databases the same keys and values.

    What ours tells of the audit, where stock has no custom metadata, and the checksums are all that
    it has more.
    """
    got, want = (as_json(disk_contents(path / "state")) for path in (ours, theirs))
    assert {got.pop(f"{CHECKSUMS}/{name}.json") for name in ("process_0", "item")}
    told = got["_METADATA"].pop("custom_metadata")
    assert want["_METADATA"].pop("custom_metadata") is None
    if audited:
        assert told["gockpt_jax"]["audit"]["chunks"] > 0
        assert told["gockpt_jax"]["audit"]["max_ulps"] == 0
    else:
        assert told is None
    assert got.keys() == want.keys()
    for name in want:
        assert got[name] == want[name], name
    assert {"_METADATA", "_sharding", "array_metadatas/process_0"} <= got.keys()


# --- What stock wrote ----------------------------------------------------------------------------


@pytest.mark.parametrize("item", ["state", "default"])
@pytest.mark.parametrize("how", ["gockpt", "standard", "none"])
def test_checkpoints_of_stock_restore(tmp_path: Path, item: str, how: str) -> None:
    state = PROGRAMS[PROGRAM].build(8).state
    with ocp.CheckpointManager(tmp_path) as stock:
        args: Any = ocp.args.StandardSave(state)
        stock.save(2, args=args if item == "default" else ocp.args.Composite(state=args))
    with Trainer(tmp_path, devices=8) as trainer:
        target = trainer.target
        kwargs = {
            "gockpt": {"args": gockpt.GoCkptRestore(target)},
            "standard": {"args": ocp.args.StandardRestore(target)},
            "none": {},
        }[how]
        assert trainer.manager.latest_step() == 2
        for step in (2, None):
            restored = trainer.manager.restore(step, **kwargs)
            assert not differing(bits_of(restored), bits_of(state))
            if how != "none":
                assert jax.tree.structure(restored) == jax.tree.structure(state)
        trainer.label = 3
        trainer.run(LABEL)
        trainer.manager.wait_until_finished()
        assert trainer.report(LABEL).kind == "window"
        assert sorted(trainer.manager.all_steps()) == [2, 4, 8]
        restored = trainer.manager.restore(LABEL, args=gockpt.GoCkptRestore(target))
        assert not differing(bits_of(restored), trainer.given[LABEL])


# --- The rest of a manager -----------------------------------------------------------------------


@pytest.mark.parametrize("save", [gockpt.GoCkptSave, ocp.args.StandardSave])
def test_composite_with_a_json_sibling(tmp_path: Path, save: Any) -> None:
    with Trainer(tmp_path) as trainer:
        while trainer.label <= LABEL:
            trainer.update()
            place = ocp.args.JsonSave({"epoch": trainer.label - 1})
            trainer.save(args=ocp.args.Composite(state=save(trainer.state), place=place))
        trainer.assert_intact()
        args = ocp.args.Composite(
            state=gockpt.GoCkptRestore(trainer.target), place=ocp.args.JsonRestore()
        )
        restored = trainer.manager.restore(LABEL, args=args)
        assert restored["place"] == {"epoch": LABEL}
        assert not differing(bits_of(restored["state"]), trainer.given[LABEL])
    with ocp.CheckpointManager(tmp_path) as stock:
        restored = stock.restore(LABEL)
        assert restored["place"] == {"epoch": LABEL}
        assert not differing(bits_of(restored["state"]), trainer.given[LABEL])


def test_max_to_keep(tmp_path: Path) -> None:
    with Trainer(tmp_path, max_to_keep=2) as trainer:
        trainer.run(16)
        trainer.given = {label: trainer.given[label] for label in (12, 16)}
        trainer.assert_intact()


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_fn_with_metrics(tmp_path: Path, mode: str) -> None:
    loss = {0: 5.0, 4: 1.0, 8: 2.0, 12: 9.0, 16: 4.0}
    options = {"best_fn": lambda metrics: metrics["loss"], "best_mode": mode, "max_to_keep": 2}
    with Trainer(tmp_path, **options) as trainer:
        while trainer.label <= 16:
            trainer.update()
            trainer.save(metrics={"loss": loss.get(trainer.label - 1, 0.0)})
        trainer.manager.wait_until_finished()
        best = sorted(loss, key=loss.__getitem__, reverse=mode == "max")[:2]
        assert trainer.manager.best_step() == best[0]
        assert sorted(trainer.manager.all_steps()) == sorted(best)
        for label in best:
            restored = trainer.manager.restore(label, args=gockpt.GoCkptRestore(trainer.target))
            assert not differing(bits_of(restored), trainer.given[label])
    with ocp.CheckpointManager(tmp_path) as stock:
        assert sorted(stock.all_steps()) == sorted(best)
        assert stock.metrics(best[0]) == {"loss": loss[best[0]]}
