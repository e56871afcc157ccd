"""What a directory of checkpoints is found to hold, made by hand: no name of it is by chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.files.item_files import FOLDER, STEP_METADATA, TEMPORARY
from gockpt_jax.storage.inspecting.directory import look_into

TREE = "_METADATA"
COMMITTED = {"item_handlers": {"state": "h"}, "commit_timestamp_nsecs": 7}
NO_METADATA = f"`{STEP_METADATA}` is missing: this is no whole checkpoint"
NEVER_ENDED = f"`{STEP_METADATA}` names no time of commit: the save never ended"


def make(root: Path, *files: str, metadata: Any = None) -> Path:
    """Files, or folders if they end so; and a step's metadata."""
    root.mkdir(parents=True, exist_ok=True)
    for file in files:
        path = root / file
        (path if file.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not file.endswith("/"):
            path.touch()
    if metadata is not None:
        (root / STEP_METADATA).write_text(json.dumps(metadata))
    return root


def faults_of(step: Path) -> tuple[str, ...]:
    (found,) = look_into(step).steps
    return found.faults


def test_what_lies_side_by_side(tmp_path):
    trees = ("weights/_METADATA", "best/state/_METADATA", f"last/state/{FOLDER}/")
    unfinished = f"11{TEMPORARY}-1/state/_METADATA"
    make(tmp_path, *trees, unfinished, "9/", "run_10/", "logs/a/b", "notes.txt", "x1/")
    make(tmp_path / "final", metadata=COMMITTED)
    found = look_into(tmp_path)
    assert found.kind == "root"
    names = [step.path.name for step in found.steps]
    assert names == ["best", "final", "last", "weights", "9"]
    assert [step.trees for step in found.steps] == [("state",), (), ("state",), ("",), ()]
    assert found.leftovers == (f"11{TEMPORARY}-1",)
    assert found.others == ("logs", "notes.txt", "run_10", "x1")


@pytest.mark.parametrize("names", [("runA", "run_7"), ("7",), ("1", "2")])
def test_a_directory_of_runs_holds_no_steps(tmp_path, names):
    """`run_7` was taken for a damaged step, and `verify` called it so."""
    for name in names:
        make(tmp_path / name / "1", "state/_METADATA", metadata=COMMITTED)
    found = look_into(tmp_path)
    assert (found.kind, found.steps, found.others) == ("root", (), names)


@pytest.mark.parametrize(
    ("whole", "steps"),
    [("5", ["3", "5"]), ("logs_5", ["logs_1", "3", "logs_5"]), (None, ["logs_1", "run_2", "3"])],
)
def test_empty_folders_are_steps_if_they_are_called_like_them(tmp_path, whole, steps):
    """Or `verify` would not see that one is gone, or take the folder of a log for a damaged one."""
    make(tmp_path, "logs_1/", "run_2/", "3/", "log4/")
    if whole is not None:
        make(tmp_path / whole, metadata=COMMITTED)
    assert [step.path.name for step in look_into(tmp_path).steps] == steps


@pytest.mark.parametrize("name", ["7", "run_7"])
def test_a_step_without_metadata_is_no_directory_of_steps(tmp_path, name):
    step = make(tmp_path / name, "state/_METADATA", "data/x")
    assert look_into(step).kind == "step"
    assert faults_of(step) == (NO_METADATA,)
    make(step / "3", metadata=COMMITTED)
    assert look_into(step).kind == "root"


def test_what_was_being_written_into_it_is_none_of_its_trees(tmp_path):
    run = make(tmp_path / "run_7", f"3{TEMPORARY}-1/_METADATA")
    assert look_into(run).kind == "root"
    assert look_into(run).leftovers == (f"3{TEMPORARY}-1",)


def test_items_are_those_that_are_named(tmp_path):
    named = f"b{TEMPORARY}"  # by a user
    metadata = COMMITTED | {"item_handlers": dict.fromkeys(("state", named, "lost"), "h")}
    files = ("state/_METADATA", f"{named}/_METADATA", f"c{TEMPORARY}/_METADATA", "d/", "notes.txt")
    step = make(tmp_path / "7", *files, bucket.MARKER, metadata=metadata)
    (found,) = look_into(step).steps
    assert (list(found.items), found.trees) == ([named, "d", "state"], (named, "state"))
    assert found.faults == (
        "the item `lost` is missing",
        "`d` is foreign: no item",
        "`notes.txt` is foreign: no part of a checkpoint",
    )


@pytest.mark.parametrize(
    ("metadata", "faults"),
    [
        (COMMITTED, ()),
        ({"commit_timestamp_nsecs": 7}, ()),  # by an Orbax that named no items
        (COMMITTED | {"commit_timestamp_nsecs": None}, (NEVER_ENDED,)),
        ({"item_handlers": {"state": "h"}}, (NEVER_ENDED,)),
        (5, ("is damaged: TypeError",)),
        ("x", ("is damaged: ValueError",)),
    ],
)
def test_what_its_metadata_says(tmp_path, metadata, faults):
    step = make(tmp_path / "7", "state/_METADATA", metadata=metadata)
    found = faults_of(step)
    assert len(found) == len(faults)
    assert all(said in fault for said, fault in zip(faults, found, strict=True))


def test_in_a_bucket_the_marker_says_that_it_is_committed(tmp_path, monkeypatch):
    """There is no renaming."""
    monkeypatch.setattr(bucket, "is_bucket", lambda path: True)
    for name in ("7", "8"):
        make(tmp_path / name, "state/_METADATA", metadata=COMMITTED)
    (tmp_path / "7" / bucket.MARKER).touch()
    found = look_into(tmp_path)
    assert ([step.path.name for step in found.steps], found.leftovers) == (["7"], ("8",))
    assert faults_of(tmp_path / "7") == ()
    assert faults_of(tmp_path / "8") == (f"`{bucket.MARKER}` is missing: the save never ended",)
