"""Random lives of jobs: other meshes, options, faults and paces each time (`drawn.py`).

Whatever becomes of a job, each checkpoint that is visible is what a run without windows has at that
step, read by stock Orbax in this one process; whoever fails is named on all processes; and a job of
another size goes on from the newest one. `make jobs` plays many; `make test` one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from bits import differing
from campaigns import seeds

from gockpt_jax.storage.inspecting.verify import verify

from .drawn import JobLife, drawn
from .jobs import Ended, run_job

LIVES = seeds("JOBS")
# One that is known: with a slow process and a window that fails in it, while a save may wait.
SEEDS = LIVES or (239,)
ALL_ENDED_SECS = 250  # though one process is gone; without such limits it would be many minutes


@pytest.mark.parametrize("seed", SEEDS)
def test_a_life_leaves_true_checkpoints(tmp_path: Path, seed: int) -> None:
    first, second = drawn(seed)
    ended = live(tmp_path, "first", first)
    assert_ended(first, ended)
    steps = assert_checkpoints(tmp_path)
    assert_good_ones_are_there(first, ended, steps)
    resumed = live(tmp_path, "second", second)
    assert_resumed(tmp_path, second, resumed, steps)
    assert_good_ones_are_there(second, resumed, assert_checkpoints(tmp_path))
    assert_tampering_is_found(tmp_path / "run", seed)
    if not LIVES:  # of a random life nothing is known beforehand
        assert any(p.said("fault") for p in ended)
        assert any(int(*p.said("early")) for p in ended)


def live(directory: Path, name: str, job: JobLife) -> list[Ended]:
    """Runs a job to its end."""
    (directory / name).mkdir()
    told = {"job": dataclasses.asdict(job), "run": str(directory / "run")}
    (directory / name / "life.json").write_text(json.dumps(told, indent=1))
    started_at = time.monotonic()
    ended = run_job(directory / name, job.processes, "life", devices=job.devices)
    assert time.monotonic() - started_at < ALL_ENDED_SECS, outputs(ended)
    return ended


def assert_ended(job: JobLife, ended: list[Ended]) -> None:
    """All have ended, and say the same of every save; a process that failed is named."""
    came = any(p.said("fault") for p in ended)
    if came and job.fault is not None and job.fault.is_lethal:
        assert not any(p.did("life") for p in ended), outputs(ended)
        if job.fault.deed == "dies":
            assert ended[job.fault.process].returncode == -signal.SIGKILL
        return
    assert all(p.did("life") for p in ended), outputs(ended)
    assert len({tuple(p.said("outcome")) for p in ended}) == 1, outputs(ended)
    assert len({tuple(p.said("preempted")) for p in ended}) == 1, outputs(ended)
    if came and job.fault is not None and job.fault.deed == "told":
        assert ended[0].said("preempted"), outputs(ended)
    labels = set()
    for index, process in enumerate(ended):
        failures = json.loads(*process.said("failures"))
        if job.window["on_save_error"] == "warn" and job.fault and job.fault.process == index:
            # Its window has failed: it warns of that, and its part of the save is a snapshot.
            failures = [x for x in failures if "a window failed on the worker thread" not in x[1]]
        labels.add(tuple(label for label, _ in failures))
        for _, text in failures:
            assert job.fault is not None, text
            assert f"process {job.fault.process}: " in text, text
    assert len(labels) == 1, outputs(ended)


def assert_good_ones_are_there(job: JobLife, ended: list[Ended], steps: list[int]) -> None:
    """Of a job that has come to its end: what it has saved, or the newest of that."""
    said = ended[0].said("good")
    if not said:
        return
    good, most = json.loads(*said), job.manager.get("max_to_keep")
    found = [step for step in steps if step >= job.first]
    assert found == sorted(good)[-most:] if most else found == sorted(good), (good, steps)


def assert_resumed(run: Path, job: JobLife, ended: list[Ended], steps: list[int]) -> None:
    """It has begun with the newest checkpoint, as that is."""
    assert_ended(job, ended)
    if steps:
        newest = max(steps)
        assert_same(kept(run, f"restored_{newest}"), kept(run, str(newest)))


def assert_checkpoints(run: Path) -> list[int]:
    """Each visible one is whole and true; gives their labels."""
    directory = run / "run"
    if not directory.exists():
        return []
    steps = sorted(ocp.utils.checkpoint_steps(directory))
    for step in steps:
        assert_same(kept(run, str(step)), read_by_stock(directory / str(step) / "state"))
    verdicts = list(verify(directory)) if steps else []
    assert [v for v in verdicts if v.state != "whole"] == []
    return steps


def assert_tampering_is_found(directory: Path, seed: int) -> None:
    """One bit of a file of values is not overlooked, nor is a database that was cut short."""
    steps = ocp.utils.checkpoint_steps(directory)
    if not steps:
        return
    rng = np.random.default_rng(seed)
    item = directory / str(rng.choice(steps)) / "state"
    files = sorted(f for f in item.rglob("*") if f.is_file())
    chunks = [f for f in files if re.fullmatch(r"\d+(\.\d+)*", f.name)]
    file = chunks[rng.integers(len(chunks))] if chunks else max(files, key=os.path.getsize)
    content = bytearray(file.read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    file.write_bytes(content if chunks else content[: len(content) // 2])
    assert "damaged" in {v.state for v in verify(item.parent)}, file


def kept(run: Path, name: str) -> dict[str, np.ndarray]:
    """The whole arrays that all processes have left of a state."""
    boxes: dict[str, list[tuple[tuple[slice, ...], np.ndarray]]] = {}
    files = sorted((run / "run_kept").glob(f"{name}_[0-9].npz"))
    assert files, name
    for file in files:
        with np.load(file) as shards:
            for key, shard in shards.items():
                path, _, where = key.partition("|")
                box = tuple(slice(*map(int, x.split(":"))) for x in where.split(",") if x)
                boxes.setdefault(simple(path), []).append((box, shard))
    arrays = {}
    for path, found in boxes.items():
        shape = tuple(max(box[n].stop for box, _ in found) for n in range(found[0][1].ndim))
        arrays[path] = np.zeros(shape, found[0][1].dtype)
        for box, shard in found:
            arrays[path][box] = shard
    return arrays


def simple(path: str) -> str:
    """A leaf's path without its containers' kinds: `['opt'][1].mu` is `opt.1.mu`."""
    return path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "").strip(".")


def read_by_stock(item: Path) -> dict[str, np.ndarray]:
    """A state as stock Orbax reads it, without devices."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as stock:
        tree = stock.metadata(item).item_metadata.tree
        to_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        restored = stock.restore(item, args=ocp.args.PyTreeRestore(restore_args=to_numpy))
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(restored)
    }


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """The same leaves, bit for bit."""
    assert not differing(got, want)


def outputs(ended: list[Ended]) -> Any:
    """What the processes have said last."""
    return "\n".join(f"--- {n}: {p.returncode}\n{p.output[-4000:]}" for n, p in enumerate(ended))
