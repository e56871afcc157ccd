"""Random lives of training runs, over all programs of the tests (`life.py`).

`make lives` plays many over all programs; `make test` a few.
"""

from __future__ import annotations

import random
from pathlib import Path

import orbax.checkpoint as ocp
import pytest
from bits import differing
from campaigns import seeds
from programs import PROGRAMS

import gockpt_jax as gockpt

from .life import Life, check_checkpoints, host

LIVES = seeds("LIVES")
# Arrays without elements cannot be saved.
NAMES = sorted(PROGRAMS.keys() - {"zero_size"})
CASES = [(seed, NAMES[seed % len(NAMES)], (1, 8)[seed // len(NAMES) % 2]) for seed in LIVES or ()]
CASES = CASES or [(7, "adamw", 1), (8, "adamw", 1)]  # leaves are edited behind those that left


# With `arm="always"` a life may move leaves more often than a step's changes are followed.
@pytest.mark.filterwarnings("ignore:.* its arguments changed:gockpt_jax.SnapshotOnlyWarning")
@pytest.mark.parametrize(("seed", "name", "devices"), CASES)
def test_a_life_leaves_true_checkpoints_and_the_users_training(
    tmp_path: Path, seed: int, name: str, devices: int
) -> None:
    rng, went_back = random.Random(seed), {}
    options = ocp.CheckpointManagerOptions(save_interval_steps=rng.choice([4, 5, 6]))
    window = gockpt.WindowOptions(
        steps=rng.choice([2, 4, 5, 6]),
        arm=rng.choice(["window", "window", "always"]),
        device_budget_bytes=rng.choice([None, 1 << 14]),
        audit=gockpt.Audit(fraction=1.0),
    )
    with gockpt.GoCkptManager(tmp_path, options=options, window=window) as manager:
        life = Life(seed, manager, went_back)
        state = life.lead(PROGRAMS[name].build(devices))
        manager.wait_until_finished()
        check_checkpoints(life, state)
    alone = Life(seed, None, went_back).lead(PROGRAMS[name].build(devices))
    assert not differing(host(state), host(alone))
    if not LIVES:  # of a random life nothing is known beforehand
        assert any(report.early_bytes for report in manager.reports)
