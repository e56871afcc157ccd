"""`verify` of what lies beside the trees of a step: other items, and the step's own metadata."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from click.testing import CliRunner
from data_position import Position

import gockpt_jax as gockpt
from gockpt_jax.cli.main import main
from gockpt_jax.storage.inspecting import verify as verify_module
from gockpt_jax.storage.inspecting import verify_step
from gockpt_jax.storage.inspecting.verify import verify
from gockpt_jax.storage.saving.state_handler import StateHandler

WAIT_SECS = 200  # only ends a test that hangs
ITEMS = {"state": "state", "cursor": "metadata", "metrics": "metrics"}


class NotesHandler(ocp.CheckpointHandler):
    """A user's own, which writes its last word as it is finalized."""

    def save(self, directory: Any, args: Any) -> None:
        (directory / "notes.txt").write_text(args.text)

    def finalize(self, directory: Any) -> None:
        (directory / "notes.txt").write_text("finalized")

    def restore(self, directory: Any, args: Any) -> str:
        return str((directory / "notes.txt").read_text())


class JsonCheckpointHandler(NotesHandler):
    """Likewise, by a name of Orbax's."""


@ocp.args.register_with_handler(NotesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Notes(ocp.args.CheckpointArgs):
    """What it is given."""

    text: str = ""


@ocp.args.register_with_handler(JsonCheckpointHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class JsonNotes(Notes):
    """Likewise."""


def save(root: Path, given: dict[str, Any] | None = None, **more: Any) -> None:
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"], **given or {})
    items = ocp.args.Composite(
        state=gockpt.GoCkptSave({"w": jnp.ones(4)}),
        cursor=ocp.args.JsonSave({"epoch": 3, "position": 12345}),
        **more,
    )
    with gockpt.GoCkptManager(root, options=options) as manager:
        metadata = {"lr": 0.5, "notes": ["é", None, float("inf")]}
        manager.save(7, args=items, metrics={"loss": 1.5}, custom_metadata=metadata)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved") / "run"
    save(root)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def found(root: Path) -> tuple[int, list[str]]:
    """The exit code, and what is told."""
    code = CliRunner().invoke(main, ["verify", str(root)]).exit_code
    return code, [line for v in verify(root) for line in (*v.faults, *v.notes)]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"enable_async_checkpointing": False},
        {"temporary_path_class": ocp.path.atomicity.CommitFileTemporaryPath},
    ],
    ids=["", "synchronous", "under its own name from the start, as in buckets"],
)
def test_whole(tmp_path: Path, given: dict[str, Any]) -> None:
    save(tmp_path / "run", given)
    assert found(tmp_path / "run") == (0, [])


def test_the_steps_metadata_is_written_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax has a thread write it, which may come behind the end of the save."""
    may_write = threading.Event()
    submit, finalize = ThreadPoolExecutor.submit, StateHandler.finalize

    def late(pool: ThreadPoolExecutor, run: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(run, "__name__", "") != "_update_and_log":
            return submit(pool, run, *args, **kwargs)
        return submit(pool, lambda: may_write.wait(WAIT_SECS) and run(*args, **kwargs))

    def complete(handler: Any, directory: Any) -> None:
        wait = handler.wait_for_metadata
        handler.wait_for_metadata = lambda: (may_write.set(), wait())
        try:
            finalize(handler, directory)
        finally:
            may_write.set()

    monkeypatch.setattr(ThreadPoolExecutor, "submit", late)
    monkeypatch.setattr(StateHandler, "finalize", complete)
    save(tmp_path / "run")
    assert found(tmp_path / "run") == (0, [])


def test_another_items_content(root: Path) -> None:
    file = root / "7/cursor/metadata"
    file.write_text(file.read_text().replace("12345", "92345"))
    told = "`cursor/metadata` is damaged: its content has changed"
    assert found(root) == (1, [told])
    with (
        gockpt.GoCkptManager(root) as manager,
        pytest.raises(gockpt.VerifyError, match="cursor/metadata"),
    ):
        manager.restore(7, args=ocp.args.Composite(cursor=ocp.args.JsonRestore()), verify=True)


def test_a_step_of_which_nothing_is_known_is_not_restored_as_verified(root: Path) -> None:
    """Neither its metadata nor its tree is there, which know what was written."""
    (root / "7/_CHECKPOINT_METADATA").unlink()
    shutil.rmtree(root / "7/state")
    (root / "7/cursor/metadata").write_text("{}")
    args = ocp.args.Composite(cursor=ocp.args.JsonRestore())
    with (
        gockpt.GoCkptManager(root) as manager,
        pytest.raises(gockpt.VerifyError, match="7 is damaged:\n  it holds no tree of arrays"),
    ):
        manager.restore(7, args=args, verify=True)


def test_another_items_files(root: Path) -> None:
    (root / "7/cursor/metadata").unlink()
    (root / "7/cursor/other").write_text("{}")
    (root / "7/metrics/metrics").write_text("{")
    code, told = found(root)
    assert code == 1
    assert [line.partition(" (")[0] for line in told] == [
        "`cursor/metadata` is missing",
        "`cursor/other` is foreign: it was not there when the checkpoint was committed",
        "`metrics/metrics` has 1 bytes, 13 were written",
    ]
    shutil.rmtree(root / "7/cursor")
    assert found(root)[1][0] == "the item `cursor` is missing"


@pytest.mark.parametrize("key", ["custom_metadata", "item_handlers"])
def test_the_steps_metadata(root: Path, key: str) -> None:
    file = root / "7/_CHECKPOINT_METADATA"
    content = json.loads(file.read_text())
    content[key] = {**content[key], "state": "other"}
    file.write_text(json.dumps(content))
    told = f"`_CHECKPOINT_METADATA` is damaged: its `{key}` has changed"
    assert found(root) == (1, [told])


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("performance_metrics", {"perforiance_metrics": {}}),
        ("metrics", {"metrigs": {}}),
        ("commit_timestamp_nsecs", {"commit_timestamp_nsecs": "1"}),
    ],
)
def test_metadata_that_orbax_cannot_read(root: Path, key: str, change: dict[str, Any]) -> None:
    """With it no manager can be made in the directory, stock's neither; nor does it name a file."""
    file = root / "7/_CHECKPOINT_METADATA"
    content = json.loads(file.read_text())
    del content[key]
    file.write_text(json.dumps({**content, **change}))
    with pytest.raises(ValueError):
        ocp.CheckpointManager(root).close()
    code, (told,) = found(root)
    assert (code, told.partition(":")[0]) == (1, "`_CHECKPOINT_METADATA` is damaged")


def test_items_that_were_exchanged_between_steps(tmp_path: Path) -> None:
    """Each of them is whole: half of a copy of another step, or of a backup."""
    with gockpt.GoCkptManager(tmp_path) as manager:
        for step in (1, 2):
            items = {
                name: gockpt.GoCkptSave({"w": jnp.ones(2) * step}) for name in ("ema", "state")
            }
            cursor = ocp.args.JsonSave({"at": step})
            manager.save(step, args=ocp.args.Composite(**items, cursor=cursor))
    kept = tmp_path / "1" / "state"
    kept.rename(tmp_path / "kept")
    (tmp_path / "2" / "state").rename(kept)
    told = "the item `state` is of another save than this step, as its `_CHECKPOINT_METADATA` says"
    verdicts = {v.path: v.faults for v in verify(tmp_path / "1")}
    assert verdicts == {
        f"{tmp_path}/1": (told,), f"{tmp_path}/1/ema": (), f"{tmp_path}/1/state": ()
    }  # fmt: skip
    with (
        gockpt.GoCkptManager(tmp_path) as manager,
        pytest.raises(gockpt.VerifyError, match="`state` is of another save"),
    ):
        manager.restore(1, verify=True)


@pytest.mark.parametrize("name", ["a.b", "state.x", "sta", "x.orbax-checkpoint-tmp"])
def test_names_of_items(tmp_path: Path, name: str) -> None:
    """A save that was committed is whole, whatever Orbax calls those that were not."""
    tree = gockpt.GoCkptSave({"w": jnp.zeros(2)})
    save(tmp_path / "run", **{name: ocp.args.JsonSave({"a": 1}), f"{name}2": tree})
    assert found(tmp_path / "run") == (0, [])
    (tmp_path / "run/7" / name / "metadata").write_text('{"a": 2}')
    assert found(tmp_path / "run") == (
        1,
        [f"`{name}/metadata` is damaged: its content has changed"],
    )


@pytest.mark.parametrize("notes", [Notes, JsonNotes])
def test_an_item_of_a_handler_of_the_users(tmp_path: Path, notes: type[Notes]) -> None:
    """It may write until its own end: nobody can say what it wrote."""
    save(tmp_path / "run", notes=notes("as it was given"))
    assert found(tmp_path / "run") == (3, ["the item `notes` has no checksums"])
    with gockpt.GoCkptManager(tmp_path / "run") as manager:
        assert manager.restore(7, verify=True)["state"]["w"].tolist() == [1.0] * 4


def test_the_position_of_a_data_iterator(tmp_path: Path) -> None:
    save(tmp_path / "run", data=Position({"next_index": 12}))
    assert found(tmp_path / "run") == (0, [])
    with gockpt.GoCkptManager(tmp_path / "run") as manager:
        restored = manager.restore(7, args=ocp.args.Composite(data=Position()), verify=True)
    assert restored["data"] == {"next_index": 12}
    (tmp_path / "run/7/data/process_0-of-1.json").write_text('{"next_index": 13}')
    told = "`data/process_0-of-1.json` is damaged: its content has changed"
    assert found(tmp_path / "run") == (1, [told])


def test_an_item_of_orbaxs_that_is_not_final_before_its_end(tmp_path: Path) -> None:
    """Keys are kept as items of an item, which are renamed as it is finalized."""
    save(tmp_path / "run", key=ocp.args.JaxRandomKeySave(jax.random.key(0)))
    assert found(tmp_path / "run") == (3, ["the item `key` has no checksums"])


def test_a_tree_that_is_no_part_of_a_step(saved: Path, tmp_path: Path) -> None:
    """Though it lies in the directory of one."""
    step = Path(shutil.copytree(saved / "7", tmp_path / "7"))
    (step / "cursor/metadata").write_text("{}")
    with ocp.Checkpointer(gockpt.GoCkptHandler()) as checkpointer:
        checkpointer.save(step / "tree", args=gockpt.GoCkptSave({"w": jnp.zeros(2)}))
    assert found(step / "tree") == (0, [])
    # Nor does it know the items of the step: one of them was damaged before it came.
    assert any("`cursor/metadata` has 2 bytes" in line for line in found(step)[1])


@pytest.mark.parametrize("newest", [False, True])
def test_a_step_that_is_deleted_meanwhile(newest, tmp_path, monkeypatch, caplog):
    """As by the retention of a job that saves there: file by file, and then it is gone."""
    with gockpt.GoCkptManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, args=gockpt.GoCkptSave({"w": jnp.ones(1000)}))
    gone, verify_item, slept = tmp_path / "2", verify_module.verify_item, []

    def deleting(path, **options):
        if str(path).startswith(str(gone)):
            for file in gone.rglob("d/*"):
                file.unlink()
        return verify_item(path, **options)

    def sleep(secs):
        slept.append(secs)
        if len(slept) == 1:
            (gone / "state" / "_METADATA").unlink()
        else:
            shutil.rmtree(gone)

    monkeypatch.setattr(verify_module, "verify_item", deleting)
    monkeypatch.setattr(verify_step.time, "sleep", sleep)
    found = {v.path: v.state for v in verify(tmp_path, newest=newest)}
    whole = [tmp_path / "1", tmp_path / "1" / "state", gone]
    assert found == {str(path): "whole" for path in whole}
    assert len(slept) == 2
    assert f"{gone} was deleted while it was verified" in caplog.text


def test_a_damaged_step_is_not_taken_for_one_that_is_deleted(tmp_path):
    save(tmp_path)
    next(tmp_path.rglob("d/*")).unlink()
    assert "damaged" in [v.state for v in verify(tmp_path)]


OTHERS: tuple[Any, ...] = (None, "x", -1, 1.5, [], {}, 10**30, True, ["a"], {"a": 1}, float("inf"))


def _nodes(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in what JSON holds."""
    yield path
    if isinstance(content, list):
        content = dict(enumerate(content))
    for key, value in content.items() if isinstance(content, dict) else ():
        yield from _nodes(value, (*path, key))


def _with(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = json.loads(json.dumps(content))
    *above, last = path
    functools.reduce(lambda node, key: node[key], above, changed)[last] = value
    return changed


JSON_FILES = (
    "_CHECKPOINT_METADATA", "state/_METADATA", "state/_sharding", "cursor/metadata",
    "state/_gockpt_checksums/item.json", "state/_gockpt_checksums/process_0.json",
)  # fmt: skip


NOT_FINAL = {"commit_timestamp_nsecs", "metrics", "performance_metrics"}
"""Of a step's metadata, what Orbax may write after its trees have ended."""


@pytest.mark.parametrize("file", JSON_FILES)
def test_whatever_stands_in_a_file_is_told_and_raises_nothing(root: Path, file: str) -> None:
    """One value of it is another; `verify` and `inspect` say so, and go on."""
    content = json.loads((root / "7" / file).read_text())
    rng, paths = random.Random(7), list(_nodes(content))
    for path in rng.sample(paths, min(len(paths), 12)):
        changed = _with(content, path, rng.choice(OTHERS))
        (root / "7" / file).write_text(json.dumps(changed))
        is_known = not NOT_FINAL.intersection(path[:1])
        for command in ("verify", "inspect"):
            ended = CliRunner().invoke(main, [command, str(root)])
            assert ended.exception is None or isinstance(ended.exception, SystemExit), path
            if command == "verify" and is_known:
                assert ended.exit_code == (changed != content), path


UNREADABLE = (
    "_CHECKPOINT_METADATA", "state/_METADATA", "state/_gockpt_checksums/item.json",
    "state/_gockpt_checksums/process_0.json", "state/_sharding", "state/manifest.ocdbt",
)  # fmt: skip


@pytest.mark.parametrize("file", UNREADABLE)
def test_a_file_that_cannot_be_read_is_a_fault_of_its_step_alone(file, tmp_path):
    """It ended the whole of it, and nothing was said of the other steps."""
    with gockpt.GoCkptManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, args=gockpt.GoCkptSave({"w": jnp.ones(1000)}))
    lost = tmp_path / "1" / file
    lost.unlink()
    lost.symlink_to(lost.name)  # a loop
    verdicts = {v.path: v for v in verify(tmp_path)}
    states = {path: v.state for path, v in verdicts.items()}
    assert [states[f"{tmp_path}/2{item}"] for item in ("", "/state")] == ["whole"] * 2
    damaged = [v for v in verdicts.values() if v.state == "damaged"]
    assert any(lost.name in fault for v in damaged for fault in v.faults)
    assert CliRunner().invoke(main, ["verify", str(tmp_path)]).exit_code == 1
