"""Invariant 2: every byte of a checkpoint is that of the state given to `save`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from programs import PROGRAMS

import gockpt_jax as gockpt

from . import faults, harness

every_case = pytest.mark.parametrize(("name", "devices"), harness.CASES)
both_devices = pytest.mark.parametrize("devices", harness.DEVICES)


@every_case
def test_every_checkpoint_is_the_state_given_to_save(
    name: str, devices: int, shared: Path
) -> None:
    saves = harness.outcome(name, devices, shared).saves
    assert {save.version: save.torn for save in saves} == {version: [] for version in harness.SAVES}


@every_case
def test_windows_had_the_announced_lengths(name: str, devices: int, shared: Path) -> None:
    """Without this the comparison above might have compared snapshots only."""
    outcome = harness.outcome(name, devices, shared)
    assert outcome.can_be_armed, "nothing leaves early any more: name it here as an exception"
    kinds = {s.version: ("window" if s.steps > 1 else "snapshot", s.steps) for s in outcome.saves}
    assert {s.version: (s.kind, s.steps) for s in outcome.saves} == kinds
    assert {s.version: s.steps for s in outcome.saves} == harness.SAVES
    assert all((s.early_bytes > 0) == (s.kind == "window") for s in outcome.saves)
    assert not any(s.late_leaves for s in outcome.saves)


class Loop:
    """A program's loop with a manager, and copies of what was given to `save`."""

    def __init__(self, name: str, devices: int, directory: Path, **window: Any):
        self.job = PROGRAMS[name].build(devices)
        self.directory = directory
        self.manager = gockpt.GoCkptManager(
            directory,
            options=ocp.CheckpointManagerOptions(max_to_keep=None),
            window=gockpt.WindowOptions(**window),
        )
        self.step = self.manager.wrap(self.job.step, **self.job.wrap_kwargs)
        self.state = self.job.state
        self.version = 0
        self.saved: dict[int, dict[str, np.ndarray]] = {}

    def __enter__(self) -> "Loop":
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def train(self, updates: int, step: Callable[..., Any] | None = None) -> None:
        for _ in range(updates):
            self.state = self.job.advance(step or self.step, self.state, self.version)
            self.version += 1

    def save(self, state: Any = None) -> gockpt.SaveReport:
        """Saves, waits and compares; returns the report."""
        state = self.state if state is None else state
        wanted = harness.to_host(state)
        self.manager.save(self.version, args=gockpt.GoCkptSave(state))
        self.manager.wait_until_finished()
        got = harness.restore_with_stock(self.directory, self.version, state)
        assert harness.differing(got, wanted) == []
        report = self.manager.last_report
        assert report is not None
        assert report.step == self.version
        return report


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("name", "devices"), [("transformer_bf16", 1), ("int_state", 8)])
def test_every_k_at_a_regular_interval(
    name: str, devices: int, steps: int, tmp_path: Path
) -> None:
    """The windows are opened by what the user's policy says, without `expect_save`."""
    job = PROGRAMS[name].build(devices)
    state, wanted = job.state, {}
    options = ocp.CheckpointManagerOptions(save_interval_steps=9)
    window = gockpt.WindowOptions(steps=steps)
    with gockpt.GoCkptManager(tmp_path, options=options, window=window) as manager:
        step = manager.wrap(job.step, **job.wrap_kwargs)
        for n in range(19):
            state = job.advance(step, state, n)
            if n % 9 == 0:
                wanted[n] = harness.to_host(state)
            manager.save(n, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        lengths = {r.step: r.window_steps for r in manager.reports}
    assert lengths == {0: 1, 9: steps, 18: steps}
    for n in wanted:
        assert harness.differing(harness.restore_with_stock(tmp_path, n, state), wanted[n]) == []


# Arrays with no elements.


@both_devices
def test_arrays_without_elements_are_refused_by_name(devices: int, tmp_path: Path) -> None:
    with Loop("zero_size", devices, tmp_path, steps=3) as loop:
        loop.manager.expect_save(in_steps=5)
        loop.train(5)
        with pytest.raises(ValueError, match="zero size") as caught:
            loop.save()
        for path, leaf in harness.by_path(loop.state.params).items():
            assert (path.strip("[]'") in str(caught.value)) == (leaf.size == 0), path
        loop.train(2)
        loop.manager.expect_save(in_steps=4)
        loop.train(4)
        report = loop.save(harness.what_to_save("zero_size", loop.state))
        assert (report.kind, report.window_steps) == ("window", 3)


# Continuity: the state is edited between two steps of a window.


def zeroed(tree: Any) -> Any:
    return jax.tree.map(lambda x: x * 0, tree)  # keeps the placement, as a user's edit does


def zero_moments(state: Any) -> Any:
    adam = state.opt_state[0]
    return state.replace(opt_state=(adam._replace(mu=zeroed(adam.mu)), *state.opt_state[1:]))


def prune_params(state: Any) -> Any:
    pruned = jax.tree.map(lambda p: p * (abs(p) > 0.05), state.params)
    return state.replace(params=pruned)


def replace_one(state: Any) -> Any:
    """The leaf that leaves first: the largest."""
    kernel = state.ema["Dense_1"]["kernel"]
    dense = state.ema["Dense_1"] | {"kernel": kernel + 1}
    return state.replace(ema=state.ema | {"Dense_1": dense})


EDITS = {"zero_moments": zero_moments, "prune_params": prune_params, "replace_one": replace_one}


@both_devices
@pytest.mark.parametrize("edit", EDITS)
def test_leaf_replaced_inside_a_window_is_late(edit: str, devices: int, tmp_path: Path) -> None:
    with Loop("ema", devices, tmp_path, steps=4) as loop:
        loop.manager.expect_save(in_steps=6)
        loop.train(5)  # two blocks of the window have left, at versions 3 and 4
        before = harness.by_path(loop.state)
        loop.state = EDITS[edit](loop.state)
        replaced = {p for p, x in harness.by_path(loop.state).items() if x is not before[p]}
        loop.train(1)
        report = loop.save()
        assert (report.kind, report.window_steps) == ("window", 4)
        assert 0 < report.early_bytes
        named = {line.partition(": replaced")[0] for line in report.late_leaves}
        assert named
        assert named <= replaced
        # Another window, undisturbed, leaves nothing of this behind.
        loop.manager.expect_save(in_steps=4)
        loop.train(4)
        again = loop.save()
        assert (again.kind, again.window_steps, again.late_leaves) == ("window", 4, ())
        assert again.early_bytes > report.early_bytes


@both_devices
def test_leaves_replaced_before_save_are_saved_as_they_are(devices: int, tmp_path: Path) -> None:
    """After the last update: what is given to `save` counts, not what the step returned."""
    with Loop("ema", devices, tmp_path, steps=3) as loop:
        loop.manager.expect_save(in_steps=6)
        loop.train(6)
        report = loop.save(zero_moments(loop.state))
        whole = sum(x.nbytes for x in jax.tree.leaves((loop.state.params, loop.state.ema)))
        assert report.kind == "window"
        assert whole <= report.early_bytes < report.state_bytes


def test_swapped_leaves_are_saved_where_they_are_given(tmp_path: Path) -> None:
    """Leaves are found by identity: a tree of the same arrays in other places is another tree."""
    with Loop("ema", 1, tmp_path, steps=3) as loop:
        loop.manager.expect_save(in_steps=6)
        loop.train(6)
        report = loop.save(loop.state.replace(params=loop.state.ema, ema=loop.state.params))
        assert report.kind == "window"


# The call changes inside a window.


@both_devices
def test_batch_of_another_shape_inside_a_window(devices: int, tmp_path: Path) -> None:
    with Loop("clip_adamw", devices, tmp_path, steps=4) as loop:

        def half(state: Any, batch: Any) -> Any:
            return loop.step(state, jax.tree.map(lambda x: x[:8], batch))

        loop.manager.expect_save(in_steps=6)
        loop.train(4)
        loop.train(1, half)
        loop.train(1)
        report = loop.save()
        assert report.kind == "snapshot"
        assert "the call changed" in report.reason
        loop.manager.expect_save(in_steps=6)
        loop.train(6)
        again = loop.save()
        assert (again.kind, again.window_steps) == ("window", 4)
        plain = PROGRAMS["clip_adamw"].build(devices)
        state = plain.state
        for n in range(12):
            rows = 8 if n == 4 else 16
            state = plain.advance(
                lambda s, b, rows=rows: plain.step(s, jax.tree.map(lambda x: x[:rows], b)),
                state, n,
            )  # fmt: skip
        assert not harness.differing(harness.to_host(loop.state), harness.to_host(state))


# The comparison can fail.

TARGETS = [("clip_adamw", d) for d in harness.DEVICES] + [("ema", d) for d in harness.DEVICES]
WITH_SCALARS = [(n, d) for n in ("int_state", "adafactor") for d in harness.DEVICES]
FAULTY = [(*t, fault) for t in TARGETS for fault in faults.OF_CHUNKS] + [
    (*t, fault) for t in WITH_SCALARS for fault in faults.OF_SCALARS
]


@pytest.mark.parametrize(("name", "devices", "fault"), FAULTY)
def test_comparison_fails_if_replay_goes_wrong(
    name: str, devices: int, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    injected = faults.inject(fault, monkeypatch)
    job = PROGRAMS[name].build(devices)
    _, _, outcome = harness.run_with_windows(name, job, harness.SHORT, tmp_path)
    (save,) = outcome.saves
    assert (save.kind, save.steps) == ("window", 4)
    assert injected.times > 0
    assert (save.torn != []) == (fault not in faults.HARMLESS)
