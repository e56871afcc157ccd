"""Random kills: whatever is listed is whole and right, and the resumed run ends where it should.

Two kinds. The parent kills a child a random time after a random line of its output; or the child
kills itself at a random call of one of the stages that a save goes through, so that the short ones
are met too. Each chain of runs is killed some times, and its last run must end with the state of a
run that nobody disturbed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from campaigns import seeds
from programs import PROGRAMS

from gockpt_jax.storage.files.item_files import TEMPORARY

from .child import STAGES
from .processes import run_child, said, start_child
from .states import abstract, digest_of, stock_restore, stock_steps
from .trainer import DEVICES, INTERVAL, LIMIT_SECS, PROGRAM

STEPS = 18
CHAINS = seeds("KILLS") or range(2)  # `make kills` runs 25
KILLS_PER_CHAIN = 4 if seeds("KILLS") else 2
# Calls of each stage in one run, roughly: a kill at a later call would never come.
CALLS = {
    "stage": 12, "pull": 200, "replay": 100, "write": 150, "metadata": 4, "finalize": 4,
    "rename": 24, "unlink": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Any:
    """What to restore into."""
    return abstract(PROGRAMS[PROGRAM].build(DEVICES).state)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> dict[str, str]:
    """The hash of the state under each label, and of the last one, in a run without kills."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    child = run_child(directory, cache, steps=str(STEPS))
    assert child.returncode == 0, child.stderr
    assert "window" in child.stdout
    return given_digests(directory)


def given_digests(directory: Path) -> dict[str, str]:
    """What the children left behind about the states they had given to `save`."""
    side = directory.with_name(directory.name + "_given")
    return {path.name: path.read_text() for path in side.glob("*") if path.suffix != ".tmp"}


def run_and_kill(directory: Path, cache: Path, rng: random.Random) -> int:
    """Runs a child and kills it after some line of its output; returns its exit status."""
    lines_left, delay_secs = rng.randint(1, STEPS), rng.uniform(0, 0.15)
    reading, writing = os.pipe()
    with open(reading) as output, open(writing, "w") as stdout, open(os.devnull, "w") as stderr:
        process = start_child(directory, cache, stdout, stderr, steps=str(STEPS))
        stdout.close()  # so that it ends when the child does
        watchdog = threading.Timer(LIMIT_SECS, process.kill)
        watchdog.start()
        killer = threading.Timer(delay_secs, process.kill)
        try:
            for line in output:
                if line.startswith(("start", "step")):
                    lines_left -= 1
                    if lines_left == 0:
                        killer.start()
            return process.wait(LIMIT_SECS)
        finally:
            for timer in (watchdog, killer):
                timer.cancel()
            process.kill()


def check(directory: Path, target: Any, undisturbed: dict[str, str]) -> None:
    """All that is listed is what was given to `save`, and that is what it always is."""
    given = given_digests(directory)
    for label, digest in given.items():
        assert digest == undisturbed[label], f"training itself differs at label {label}"
    for step in stock_steps(directory) if directory.exists() else ():
        assert step % INTERVAL == 0
        assert digest_of(stock_restore(directory, step, target)) == given[str(step)], step


@pytest.mark.parametrize("chain", CHAINS)
def test_killed_at_random(
    tmp_path: Path, cache: Path, target: Any, undisturbed: dict[str, str], chain: int
) -> None:
    rng = random.Random(20251107 + chain)
    directory = tmp_path / "run"
    killed = 0
    for _ in range(4 * KILLS_PER_CHAIN):  # A run may end before its kill comes: then start over.
        if killed == KILLS_PER_CHAIN:
            break
        if chain % 2:
            stage = rng.choice(sorted(STAGES))
            kill = f"{stage}:{rng.randrange(CALLS[stage])}"
            status = run_child(directory, cache, steps=str(STEPS), kill=kill).returncode
        else:
            status = run_and_kill(directory, cache, rng)
        assert status in (0, -signal.SIGKILL), status
        check(directory, target, undisturbed)
        killed += status != 0
        if status == 0:
            directory = tmp_path / f"run_{killed}_{rng.random()}"
    assert killed == KILLS_PER_CHAIN
    last = run_child(directory, cache, steps=str(STEPS))
    assert last.returncode == 0, last.stderr
    check(directory, target, undisturbed)
    assert stock_steps(directory) == list(range(0, STEPS, INTERVAL))
    assert given_digests(directory)["final"] == undisturbed["final"]
    resumed_at = int(said(last.stdout, "start")[0][0])
    assert resumed_at % INTERVAL in (0, 1)


@pytest.mark.parametrize(
    "name",
    [
        "_CHECKPOINT_METADATA",
        pytest.param("_METADATA", marks=pytest.mark.thorough),
        "manifest.ocdbt",
    ],
)
def test_killed_while_an_old_checkpoint_is_deleted(
    tmp_path: Path, cache: Path, target: Any, undisturbed: dict[str, str], name: str
) -> None:
    """It is whole as long as it is listed, and no longer listed then."""
    directory = tmp_path / "run"
    killed = run_child(directory, cache, steps=str(STEPS), keep="1", remove=name)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    check(directory, target, undisturbed)
    assert stock_steps(directory) == [INTERVAL]
    (half,) = [path.name for path in directory.iterdir() if path.name.startswith("0")]
    assert half == f"0{TEMPORARY}"
    last = run_child(directory, cache, steps=str(STEPS), keep="1")
    assert last.returncode == 0, last.stderr
    assert said(last.stdout, "start") == [[str(INTERVAL + 1)]]
    check(directory, target, undisturbed)
    assert given_digests(directory)["final"] == undisturbed["final"]
