"""Several processes: windows on every mesh, one that fails, one that is slow, one that is gone.

One job runs many scenarios: starting one costs more than what it does. What must hold inside a
process, the scenario asserts (`scenarios.py`); here is what only an outsider can see.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import SingleDeviceSharding

from gockpt_jax.storage.inspecting.verify import verify

from .jobs import Ended, Job, run_job
from .training import MESHES_OF, abstract_state

pytestmark = pytest.mark.xdist_group("jobs")  # so that each job runs once
TWO = (
    "meshes", "shared", "v1", "queue", "parts", "unstaged", "unarmed", "planned", "kinds",
    "reviewed", "partly", "failures", "items", "forced", "refused", "full", "others", "asked",
    "expected", "alone", "newest", "unlike", "apart", "beside", "in_vain", "taken_away",
)  # fmt: skip
FOUR = ("meshes", "elsewhere", "some")


@pytest.fixture(scope="module")
def dying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Job]]:
    """A job of which one process dies, and where it runs."""
    directory = tmp_path_factory.mktemp("dying")
    with Job(directory, 2, "death") as job:
        yield directory, job


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, dying: tuple[Path, Job]
) -> tuple[Path, list[Ended]]:
    """A job of two processes and where it ran.

    Beside the one that dies: the other process of that one does nothing for 20 s but wait for it.
    """
    directory = tmp_path_factory.mktemp("two")
    return directory, run_job(directory, 2, *TWO)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    """A job of four processes and where it ran."""
    directory = tmp_path_factory.mktemp("four")
    return directory, run_job(directory, 4, *FOUR)


@pytest.mark.parametrize("scenario", [s for s in TWO if s not in ("meshes", "shared", "items")])
def test_two_processes(two: tuple[Path, list[Ended]], scenario: str) -> None:
    directory, ended = two
    for process in ended:
        assert process.did(scenario), process.output[-6000:]
    runs = [p.with_name(p.name[:-6]) for p in sorted((directory / scenario).glob("*_given"))]
    assert runs
    for run in runs:
        assert_checkpoints(run)


def test_a_save_of_two_items_whose_window_has_failed_on_one_process(
    two: tuple[Path, list[Ended]],
) -> None:
    for process in two[1]:
        assert process.did("items"), process.output[-6000:]


def test_queued_steps_run_on_while_save_returns(two: tuple[Path, list[Ended]]) -> None:
    _, ended = two
    assert ended[0].said("running") == ["True"] * 2, ended[0].output[-3000:]


def test_a_step_runs_armed_on_all_processes_or_on_none(two: tuple[Path, list[Ended]]) -> None:
    _, ended = two
    armed = [process.said("armed") for process in ended]
    assert armed[0] == armed[1] == [str([n for s in range(4, 21, 4) for n in (s - 1, s)])]


def test_all_processes_give_the_same_reason(two: tuple[Path, list[Ended]]) -> None:
    _, ended = two
    told = [[x.rpartition("This is")[0] for x in p.said("failure")] for p in ended]
    assert told[0] == told[1] != []
    first, second = ({r.split()[0]: r for r in p.said("reason")} for p in ended)
    assert first["compile"] == second["compile"]
    assert first["compiling"] == second["compiling"]
    assert "process 1" in first["contracts"]
    assert ended[0].said("labels") == ended[1].said("labels") != []


def test_all_processes_plan_for_the_room_of_one(two: tuple[Path, list[Ended]]) -> None:
    _, ended = two
    assert ended[0].said("room") == ended[1].said("room") != []


def test_all_processes_make_the_same_plan(two: tuple[Path, list[Ended]]) -> None:
    _, ended = two
    assert ended[0].said("planned") == ended[1].said("planned") != []


@pytest.mark.parametrize("processes", MESHES_OF)
def test_meshes(request: pytest.FixtureRequest, processes: int) -> None:
    directory, ended = request.getfixturevalue({2: "two", 4: "four"}[processes])
    for process in ended:
        assert process.did("meshes"), process.output[-6000:]
    for mesh in MESHES_OF[processes]:
        assert_mesh(directory, ended, mesh)


def assert_mesh(directory: Path, ended: list[Ended], mesh: str) -> None:
    """All processes have made one plan, and together they have written every byte once."""
    assert_checkpoints(directory / "meshes" / mesh, mesh)
    plans = [[line for line in p.said("plan") if line.startswith(mesh + " ")] for p in ended]
    assert plans[0]
    assert plans == [plans[0]] * len(ended)
    written = [
        ast.literal_eval(line.removeprefix(mesh + " "))
        for p in ended
        for line in p.said("written")
        if line.startswith(mesh + " ")
    ]
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract_state(mesh)))
    assert np.sum(written, axis=0).tolist() == [total] * 3


@pytest.mark.parametrize("mesh", ["data_parallel", "zero_1"])
def test_replicas_of_two_processes_share(two: tuple[Path, list[Ended]], mesh: str) -> None:
    """Each moves and writes its part, and the chunks are those of a stock save."""
    directory, ended = two
    for process in ended:
        assert process.did("shared"), process.output[-6000:]
    run = directory / "shared" / mesh
    assert_checkpoints(run, mesh)
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract_state(mesh)))
    said = [[x.split() for x in p.said("shared") if x.startswith(mesh + " ")] for p in ended]
    assert said[0]
    for one, other in zip(*said, strict=True):
        assert one[1] == other[1]
        for mine, others in zip(one[2:], other[2:], strict=True):
            assert 0.4 < int(mine) / (int(mine) + int(others)) < 0.6
        assert int(one[3]) + int(other[3]) == total


def test_slices_are_the_files_of_a_stock_save(two: tuple[Path, list[Ended]]) -> None:
    directory, _ = two
    stock = directory / "shared" / "data_parallel_stock"
    ours = directory / "shared" / "data_parallel" / "16" / "state"
    of_the_step = ("_CHECKPOINT_METADATA", "commit_success.txt")  # time and place
    files = [f.relative_to(stock) for f in stock.rglob("*") if f.is_file()]
    files = [f for f in files if f.name not in of_the_step]
    named = {str(f) for f in files}
    assert {"params.w/0.0", "params.w/3.0", "array_metadatas/process_1", "_sharding"} <= named
    for file in files:
        found, expected = (ours / file).read_bytes(), (stock / file).read_bytes()
        if file.name == "_METADATA":  # the audit's figures are in ours
            found, expected = (
                json.dumps(json.loads(x) | {"custom_metadata": None}).encode()
                for x in (found, expected)
            )
        assert found == expected, file


def test_a_leaf_of_which_processes_hold_no_shard(four: tuple[Path, list[Ended]]) -> None:
    directory, ended = four
    for process in ended:
        assert process.did("elsewhere"), process.output[-6000:]
    held = [process.said("kind") for process in ended]
    assert held == [["window True 2"]] * 2 + [["window True 0"]] * 2
    with ocp.CheckpointManager(directory / "elsewhere" / "run") as stock:
        half = jax.ShapeDtypeStruct(
            (8, 3), np.float32, sharding=SingleDeviceSharding(jax.devices()[0])
        )
        target = {"state": abstract_state("fsdp"), "half": half}
        restored = restore(stock, stock.directory / "4", 4, target)
    assert np.asarray(restored["half"])[:, 0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_some_processes_save_without_the_others(four: tuple[Path, list[Ended]]) -> None:
    _, ended = four
    for process in ended:
        assert process.did("some"), process.output[-6000:]


def test_a_dead_process_is_named_in_time(dying: tuple[Path, Job]) -> None:
    directory, job = dying
    survivor, dead = job.ended()
    assert survivor.did("death"), survivor.output[-6000:]
    assert dead.returncode == -9
    assert survivor.said("failure")[0].startswith("process 1 did not come to")
    assert survivor.said("steps") == ["[0, 4]"]
    assert_checkpoints(directory / "death" / "run")


# --- What they have saved, read by stock Orbax in this one process -------------------------------


def assert_checkpoints(run: Path, of: str | None = None) -> None:
    """Every checkpoint is what all processes together gave, bit for bit.

    Args:
        run: The manager's directory.
        of: The mesh of the job, if it is about meshes: then on two of them. Elsewhere bytes that
          are right on one are so on any.
    """
    meshes = ("fsdp_tensor",) if of is None else ("fsdp", "fsdp_tensor")
    given = given_by_label(run)
    assert given
    assert sorted(ocp.utils.checkpoint_steps(run)) == sorted(given)
    verdicts = list(verify(run))
    assert [v for v in verdicts if v.state != "whole"] == []
    for label, shards in given.items():
        for mesh in meshes:
            with ocp.CheckpointManager(run) as stock:
                restored = restore(stock, run / str(label), label, abstract_state(mesh, of))
            arrays = {
                jax.tree_util.keystr(path): np.asarray(x)
                for path, x in jax.tree_util.tree_flatten_with_path(restored)[0]
            }
            assert {key.partition("|")[0] for key in shards} == set(arrays)
            for key, shard in shards.items():
                path, _, where = key.partition("|")
                box = tuple(slice(*map(int, x.split(":"))) for x in where.split(",") if x)
                assert arrays[path][box].tobytes() == shard.tobytes(), (run, label, mesh, key)


def restore(stock: ocp.CheckpointManager, step: Path, label: int, target: Any) -> Any:
    """With arguments as a user of stock Orbax would give them."""
    args = ocp.args.StandardRestore(target)
    if (step / "default").exists():
        return stock.restore(label, args=args)
    return stock.restore(label, args=ocp.args.Composite(state=args))["state"]


def given_by_label(run: Path) -> dict[int, dict[str, np.ndarray]]:
    """What the processes left on disk, put together."""
    given: dict[int, dict[str, np.ndarray]] = {}
    for file in sorted(run.with_name(run.name + "_given").glob("*.npz")):
        with np.load(file) as shards:
            given.setdefault(int(file.stem.split("_")[0]), {}).update(shards)
    return given
