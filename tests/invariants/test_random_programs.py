"""Random programs in random lives: nobody has thought of the step that finds the next defect.

`make programs` runs many of them; `make test` a few.

XLA's CPU backend may wait for ever where a step has collectives of several groups of devices, and
ends the process then (`rendezvous.cc`): now and then that of seed 774 on eight devices, whose own
step does so without a manager, too.
"""

from __future__ import annotations

import functools
import gc
import random
import re
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import pytest
from bits import differing
from campaigns import seeds
from programs.random_program import RandomProgram

import gockpt_jax as gockpt
from gockpt_jax.transfer import block, layout, replicas
from gockpt_jax.window import late, units

from .life import MORE_EVENTS, Life, check_checkpoints, host

ASKED = seeds("PROGRAMS")
# Seed, devices, lives. Of those of `make test` it is known that parts leave early; the axes of the
# eight devices' mesh are explicit there.
CASES = [(s, d, 3) for s in ASKED or () for d in (1, 8)] or [
    (2, 1, 1), pytest.param(4, 1, 1, marks=pytest.mark.thorough), (4, 8, 1)
]  # fmt: skip
SAVE_ARGS = (gockpt.GoCkptSave, ocp.args.StandardSave, ocp.args.PyTreeSave)


def small_scale(patch: pytest.MonkeyPatch) -> None:
    """Sizes at which leaves of a few hundred bytes are cut, packed and shared by replicas."""
    for module in (units, late):
        patch.setattr(module, "MIN_CHUNK_BYTES", 64)
    for module in (units, late, layout):
        patch.setattr(module, "MAX_CHUNK_BYTES", 2048)
    for module in (units, layout):
        patch.setattr(module, "LARGE_BYTES", 256)
    patch.setattr(layout, "MIN_SLICE_BYTES", 64)
    patch.setattr(replicas, "MIN_SLICE_ELEMENTS", 16)
    patch.setattr(block, "_made", functools.cache(block.Block))


def options_of(rng: random.Random) -> dict[str, Any]:
    """A manager's."""
    steps, audit = rng.choice([2, 3, 4, 5, 6]), rng.random() < 0.5
    return {
        "options": ocp.CheckpointManagerOptions(save_interval_steps=rng.choice([3, 4, 5, 6])),
        "window": gockpt.WindowOptions(
            steps=steps if rng.random() < 0.9 else None,
            arm=rng.choice(["window", "window", "always"]),
            device_budget_bytes=rng.choice([None, None, 1 << 12, 1 << 14]),
            audit=gockpt.Audit(fraction=rng.choice([1.0, 0.1])) if audit else None,
            exact=not audit,
            replay_threads=rng.choice([None, 2]),
            on_busy=rng.choice([*("wait",) * 5, "newest", "newest", "skip"]),
        ),
        "pytree_options": rng.choice(
            [{}, {"chunk_byte_size": 256}, {"use_ocdbt": True, "use_compression": True}]
        ),
    }


def lead(seed: int, devices: int, life: int, directory: Path) -> tuple[gockpt.SaveReport, ...]:
    """One life of a program, checked; returns the reports of its saves."""
    program, rng, went_back = RandomProgram(seed, devices), random.Random(f"{seed}, {life}"), {}
    with program.state.in_mesh:
        return _led(program, rng, went_back, directory)


def _led(
    program: RandomProgram, rng: random.Random, went_back: dict[int, Any], directory: Path
) -> tuple[gockpt.SaveReport, ...]:
    job, events_seed = program.job(), rng.getrandbits(32)

    def alone() -> Any:
        job.state = program.state.make()
        return Life(events_seed, None, went_back, MORE_EVENTS).lead(job)

    with gockpt.GoCkptManager(directory, **options_of(rng)) as manager:
        led = Life(events_seed, manager, went_back, MORE_EVENTS, rng.choice(SAVE_ARGS))
        try:
            state = led.lead(job)
        except jax.errors.JaxRuntimeError as error:  # XLA's, which the user has without us, too
            first = str(error).partition("\n")[0]
            with pytest.raises(type(error), match=re.escape(first)):
                alone()
            return manager.reports
        manager.wait_until_finished()
        check_checkpoints(led, state)
        resources = manager._gockpt_session.resources
    assert (resources.host.used_bytes, resources.device.used_bytes) == (0, 0)
    assert not differing(host(state), host(alone()))
    return manager.reports


# With `arm="always"` a life may move leaves more often than a step's changes are followed.
@pytest.mark.filterwarnings("ignore:.* its arguments changed:gockpt_jax.SnapshotOnlyWarning")
# With explicit axes the type of a leaf that has been moved says so: it is not donated.
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize(("seed", "devices", "lives"), CASES)
def test_a_random_program_leaves_true_checkpoints_and_the_users_training(
    tmp_path: Path, seed: int, devices: int, lives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_scale(monkeypatch)
    for life in range(lives):
        gc.collect()
        before = {id(x) for x in jax.live_arrays()}
        reports = lead(seed, devices, life, tmp_path / str(life))
        gc.collect()
        left = [x for x in jax.live_arrays() if id(x) not in before]
        assert not left, [(x.shape, x.dtype) for x in left]
        if not ASKED:
            assert any(report.early_bytes for report in reports)
