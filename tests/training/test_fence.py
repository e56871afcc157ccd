"""An accelerator's run, replayed on a CPU that contracts products with additions.

This process has no fused multiply-add (`conftest.py`), as accelerators have none in elementwise
code: it trains. Another, which has it, replays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import nursery
import pytest
from training_helpers import analyse
from updates import UPDATES, gradient

from gockpt_jax.training.recipe import make_recipe

EARLY = [name for name, update in UPDATES.items() if update.groups]
STEPS = 5
ROOT = str(Path(__file__).parents[2])


def found_in(name):
    return analyse(UPDATES[name].step, UPDATES[name].state, gradient())


def train(path: Path) -> None:
    """Stores the state at each version, and what the step to it retained."""
    arrays: dict[str, np.ndarray] = {}
    for name in EARLY:
        found = found_in(name)
        for version, (leaves, cut) in enumerate(found.run_many(STEPS, lambda n: [gradient(n)])):
            arrays |= {f"{name}/{version}/{i}": np.array(x) for i, x in enumerate(leaves)}
            arrays |= {
                f"{name}/{version}/cut{i}": np.array(cut[v])
                for i, v in enumerate(found.cut.values)
                if version
            }
    np.savez(path, **arrays)


def replay(path: Path, how: str, names: Sequence[str] = EARLY) -> list[str]:
    """Names of the updates of which some element is not as it was trained."""
    stored = np.load(path)
    fence = np.int32(0) if how == "fenced" else None
    torn = set()
    for name in names:
        found = found_in(name)
        for group in found.cut.groups:
            update = jax.jit(make_recipe(group, found.leaves).apply)
            chunks = [stored[f"{name}/0/{j}"] for j in group.leaves]
            for version in range(1, STEPS + 1):
                cut = {v: stored[f"{name}/{version}/cut{i}"]
                       for i, v in enumerate(found.cut.values)}  # fmt: skip
                retained, scalars = ([cut[v] for v in vs] for vs in (group.retained, group.scalars))
                chunks = update(chunks, retained, scalars, fence)
            for j, chunk in zip(group.leaves, chunks, strict=True):
                if np.asarray(chunk).tobytes() != stored[f"{name}/{STEPS}/{j}"].tobytes():
                    torn.add(name)
    return sorted(torn)


def replay_in_a_process_of_its_own(path: Path, how: str, names: Sequence[str]) -> list[str]:
    result = nursery.run(
        __file__, str(path), how, *names, env=os.environ | {"XLA_FLAGS": "", "PYTHONPATH": ROOT},
        cwd=path.parent, limit_secs=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("fence") / "trained.npz"
    train(path)
    return path


@pytest.mark.xdist_group("fence")
def test_fenced_replay_is_a_step_without_contraction(trained):
    assert jax.default_backend() == "cpu"
    assert replay(trained, "plain") == []
    assert replay_in_a_process_of_its_own(trained, "fenced", EARLY) == []


@pytest.mark.xdist_group("fence")
def test_without_the_fence_it_is_not(trained):
    if not _has_fma():
        pytest.skip("this CPU has no fused multiply-add to fence off")
    assert replay_in_a_process_of_its_own(trained, "plain", ["adam"]) == ["adam"]


def _has_fma() -> bool:
    try:
        return " fma " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


if __name__ == "__main__":
    print(*replay(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]), sep="\n")
