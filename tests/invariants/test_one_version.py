"""Invariant 2: every byte of a checkpoint is that of the state given to `save`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from programs import PROGRAMS
from programs.cases import CASES

import gockpt_jax as gockpt

from . import faults, harness

every_case = pytest.mark.parametrize(("name", "devices"), CASES)


@every_case
def test_every_checkpoint_is_the_state_given_to_save(name: str, devices: int, shared: Path) -> None:
    torn = {s.version: s.torn for s in harness.outcome(name, devices, shared).saves}
    assert torn == {version: [] for version in harness.SAVES}


@every_case
def test_windows_had_the_announced_lengths(name: str, devices: int, shared: Path) -> None:
    """Without this the comparison above might have compared snapshots only."""
    outcome = harness.outcome(name, devices, shared)
    assert outcome.can_be_armed, "nothing leaves early any more: name it here as an exception"
    assert {s.version: s.steps for s in outcome.saves} == harness.SAVES
    for save in outcome.saves:
        assert save.kind == ("window" if save.steps > 1 else "snapshot")
        assert (save.early_bytes > 0) == (save.steps > 1)
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

    def save(self, state: Any = None, *, sound: bool = True) -> gockpt.SaveReport:
        """Saves, waits and compares; returns the report."""
        state = self.state if state is None else state
        wanted = harness.to_host(state)
        self.manager.save(self.version, args=gockpt.GoCkptSave(state))
        self.manager.wait_until_finished()
        got = harness.restore_with_stock(self.directory, self.version, state)
        assert (harness.differing(got, wanted) == []) == sound
        report = self.manager.last_report
        assert report is not None
        assert report.step == self.version
        return report


@pytest.mark.parametrize(
    ("steps", "name", "devices"),
    [*((k, "loss_first", 1) for k in (2, 5, 8)), *((k, "int_state", 8) for k in (1, 3, 8))],
)
def test_every_k_at_a_regular_interval(steps: int, name: str, devices: int, tmp_path: Path) -> None:
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


@harness.on_both("zero_size")
def test_arrays_without_elements_are_refused_by_name(
    name: str, devices: int, tmp_path: Path
) -> None:
    with Loop(name, devices, tmp_path, steps=3) as loop:
        loop.manager.expect_save(in_steps=5)
        loop.train(5)
        with pytest.raises(ValueError, match="zero size") as caught:
            loop.save()
        for path, leaf in harness.by_path(loop.state.params).items():
            assert (path.strip("[]'") in str(caught.value)) == (leaf.size == 0), path
        loop.train(2)
        loop.manager.expect_save(in_steps=4)
        loop.train(4)
        report = loop.save(harness.what_to_save(name, loop.state))
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


def replace_one(state: Any, path: str) -> Any:
    def edit(at: Any, leaf: Any) -> Any:
        return leaf + 1 if jax.tree_util.keystr(at) == path else leaf

    return jax.tree_util.tree_map_with_path(edit, state)


def named(report: gockpt.SaveReport) -> set[str]:
    """Paths of the leaves that the report calls late."""
    return {line.partition(": not what the step before returned")[0] for line in report.late_leaves}


@harness.on_both("ema")
def test_leaf_replaced_inside_a_window_is_late(name: str, devices: int, tmp_path: Path) -> None:
    with Loop(name, devices, tmp_path, steps=4) as loop:
        loop.train(2)

        def window(edit: Callable[[Any], Any]) -> tuple[gockpt.SaveReport, set[str]]:
            """Edits the state when two blocks have left; returns the paths of what it replaced."""
            loop.manager.expect_save(in_steps=4)
            loop.train(3)
            before = harness.by_path(loop.state)
            loop.state = edit(loop.state)
            replaced = {p for p, x in harness.by_path(loop.state).items() if x is not before[p]}
            loop.train(1)
            report = loop.save()
            assert (report.kind, report.window_steps) == ("window", 4)
            return report, replaced

        whole, _ = window(lambda state: state)
        assert named(whole) == set()
        for edit in (zero_moments, prune_params):
            report, replaced = window(edit)
            assert named(report)
            assert named(report) <= replaced
            assert 0 < report.early_bytes < whole.early_bytes
        # Each window has the same plan, so one of those leaves alone leaves early, too.
        one = min(named(report))
        report, replaced = window(lambda state: replace_one(state, one))
        assert named(report) == replaced == {one}


@harness.on_both("ema")
def test_leaves_replaced_before_save_are_saved_as_they_are(
    name: str, devices: int, tmp_path: Path
) -> None:
    """After the last update: what is given to `save` counts, not what the step returned."""
    with Loop(name, devices, tmp_path, steps=3) as loop:
        loop.manager.expect_save(in_steps=6)
        loop.train(6)
        report = loop.save(zero_moments(loop.state))
        whole = sum(x.nbytes for x in jax.tree.leaves((loop.state.params, loop.state.ema)))
        assert report.kind == "window"
        assert whole <= report.early_bytes < report.state_bytes


@pytest.mark.parametrize(("name", "devices"), [("ema", 1)])
def test_swapped_leaves_are_saved_where_they_are_given(
    name: str, devices: int, tmp_path: Path
) -> None:
    """Leaves are found by identity: a tree of the same arrays in other places is another tree."""
    with Loop(name, devices, tmp_path, steps=3) as loop:
        loop.manager.expect_save(in_steps=6)
        loop.train(6)
        report = loop.save(loop.state.replace(params=loop.state.ema, ema=loop.state.params))
        assert report.kind == "window"


# The call changes inside a window.


@harness.on_both("clip_adamw")
@pytest.mark.parametrize(("odd", "kind", "steps"), [(4, "window", 2), (5, "snapshot", 1)])
def test_batch_of_another_shape_inside_a_window(
    odd: int, kind: str, steps: int, name: str, devices: int, tmp_path: Path
) -> None:
    """The user's own step takes it; with a step to spare a shorter window opens behind it."""

    def cut_to(step: Any, rows: int) -> Any:
        return lambda state, batch: step(state, jax.tree.map(lambda x: x[:rows], batch))

    with Loop(name, devices, tmp_path, steps=4) as loop:
        loop.manager.expect_save(in_steps=6)
        for version in range(6):
            loop.train(1, cut_to(loop.step, 8 if version == odd else 16))
        report = loop.save()
        assert (report.kind, report.window_steps) == (kind, steps)
        assert kind == "window" or "the call changed" in report.reason
        loop.manager.expect_save(in_steps=5)
        loop.train(5)
        again = loop.save()
        assert (again.kind, again.window_steps) == ("window", 4)
        plain = PROGRAMS[name].build(devices)
        state = plain.state
        for n in range(11):
            state = plain.advance(cut_to(plain.step, 8 if n == odd else 16), state, n)
        assert harness.differing(harness.to_host(loop.state), harness.to_host(state)) == []


# The comparison can fail.

# `skip_step`: a flag that is false once in each window; `adafactor`: a decay rate that changes in
# each update.
FAULTS = {
    **{(name, d): faults.OF_CHUNKS for name in ("clip_adamw", "ema") for d in harness.DEVICES},
    **{("skip_step", d): faults.OF_SCALARS for d in harness.DEVICES},
    ("adafactor", 1): faults.OF_SCALARS,
}


@pytest.mark.parametrize(("name", "devices"), FAULTS)
def test_comparison_fails_if_replay_goes_wrong(
    name: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Loop(name, devices, tmp_path, steps=4, audit=None) as loop:
        loop.train(2)
        for fault in (*FAULTS[name, devices], faults.NOTHING):
            with monkeypatch.context() as planted:
                injected = faults.inject(fault, planted)
                loop.manager.expect_save(in_steps=4)
                loop.train(4)
                report = loop.save(sound=fault == faults.NOTHING)
            assert (report.kind, report.window_steps) == ("window", 4)
            assert injected.times > 0, fault


@pytest.mark.parametrize(
    ("name", "devices"), [("clip_adamw", 8), ("skip_step", 1), ("adafactor", 1)]
)
def test_the_audit_finds_what_the_comparison_finds(
    name: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Loop(name, devices, tmp_path, steps=4, audit=gockpt.Audit(fraction=1.0)) as loop:
        loop.train(2)
        for fault in FAULTS[name, devices]:
            with monkeypatch.context() as planted:
                injected = faults.inject(fault, planted)
                loop.manager.expect_save(in_steps=4)
                loop.train(4)
                with pytest.raises(gockpt.AuditError):
                    loop.save(sound=False)
            assert injected.times > 0, fault
        loop.manager.expect_save(in_steps=4)
        loop.train(4)
        report = loop.save()
        assert report.audit is not None
        assert (report.kind, report.audit.max_ulps) == ("window", 0)
        assert loop.manager.all_steps() == [loop.version]
