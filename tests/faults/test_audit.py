"""The audit: what replay got wrong does not become a checkpoint, and the trainer hears of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from bits import differing
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gockpt_jax as gockpt
from gockpt_jax.telemetry.save_record import SaveRecord
from gockpt_jax.window.audit import Auditor
from gockpt_jax.window.open_window import OpenWindow

from .states import bits_of, stock_restore
from .trainer import WINDOW_STEPS, Trainer


class CorruptedGradient:
    """Changes one element of one gradient in an update, on its way to the host.

    Args:
        monkeypatch: Puts the function back.
        element: Which, of the flat gradient. The first gradient that has it is changed; from then
            on those of its shape.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, element: int = 0) -> None:
        self.fired = 0
        self.armed = False
        self._shape: tuple[int, ...] | None = None
        follow = OpenWindow.follow

        def corrupt(array: jax.Array) -> jax.Array:
            fits = array.size > element and array.dtype == jnp.float32
            if not (self._pending and fits and self._shape in (None, array.shape)):
                return array
            self._pending, self.fired, self._shape = False, self.fired + 1, array.shape
            values = np.array(array)
            values.reshape(-1)[element] += 1
            return jax.device_put(values, array.sharding)

        def corrupting(window: OpenWindow, state: Any, cut: Any) -> None:
            self._pending = self.armed
            followed = {i for left in window._left for _, i in left.followers}
            cut = [corrupt(x) if i in followed else x for i, x in enumerate(cut)]
            follow(window, state, cut)

        monkeypatch.setattr(OpenWindow, "follow", corrupting)

    def spoil(self, trainer: Trainer) -> None:
        """The next update's gradients are corrupted, if a window is open."""
        self.armed = True
        trainer.update()
        self.armed = False
        assert self.fired


def options(**audit: Any) -> gockpt.WindowOptions:
    return gockpt.WindowOptions(steps=WINDOW_STEPS, audit=gockpt.Audit(**audit))


def metadata_of(directory: Path, step: int, item: str = "state") -> Any:
    return json.loads((directory / str(step) / item / "_METADATA").read_text())["custom_metadata"]


def assert_failed(trainer: Trainer, label: int, error: gockpt.AuditError) -> None:
    report = trainer.report(label)
    assert "AuditError" in (report.error or "")
    assert report.audit is not None
    assert report.audit.max_ulps > 0
    assert report.audit.max_relative_error > 0
    assert report.audit.worst_leaf in str(error)
    for words in ("chunk ", "ULPs", "`max_ulps=0`", "earlier checkpoints are intact"):
        assert words in str(error)
    assert trainer.bytes_in_flight() == (0, 0)


def test_corrupted_gradient_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = CorruptedGradient(monkeypatch)
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(7)
        fault.spoil(trainer)
        before = bits_of(trainer.state)
        assert trainer.save()
        del trainer.given[8]
        with pytest.raises(gockpt.AuditError) as raised:
            trainer.manager.wait_until_finished()
        assert not differing(bits_of(trainer.state), before)
        trainer.assert_intact()
        trainer.settle()
        assert_failed(trainer, 8, raised.value)
        assert 'on_failure="demote"' in str(raised.value)
        trainer.run_past_next_window()  # a single fault: the next window is right
        trainer.assert_intact()
        assert trainer.manager.last_report.audit.max_ulps == 0


def test_failure_reaches_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = CorruptedGradient(monkeypatch)
    with Trainer(tmp_path) as trainer:
        trainer.run_undisturbed(7)
        fault.spoil(trainer)
        trainer.save()
        del trainer.given[8]
        with pytest.raises(gockpt.AuditError):
            trainer.run(12)
        trainer.assert_intact()


def test_without_audit_it_is_not_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above have found is there to be found."""
    fault = CorruptedGradient(monkeypatch)
    window = gockpt.WindowOptions(steps=WINDOW_STEPS, audit=None)
    with Trainer(tmp_path, window=window) as trainer:
        trainer.run_undisturbed(7)
        fault.spoil(trainer)
        trainer.save()
        trainer.manager.wait_until_finished()
        assert trainer.report(8).audit is None
        assert metadata_of(tmp_path, 8) is None
        assert differing(stock_restore(tmp_path, 8, trainer.target), trainer.given[8])


def test_difference_within_the_bound_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = CorruptedGradient(monkeypatch)
    with Trainer(tmp_path, window=options(max_ulps=2**62)) as trainer:
        trainer.run_undisturbed(7)
        fault.spoil(trainer)
        trainer.save()
        trainer.manager.wait_until_finished()
        figures = trainer.report(8).audit
        assert figures.max_ulps > 0
        assert figures.worst_leaf
        assert metadata_of(tmp_path, 8)["gockpt_jax"]["audit"] == dataclasses.asdict(figures)


# --- Demotion ------------------------------------------------------------------------------------


def test_demoted_leaf_is_late_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that stays, in every update of the larger leaves."""
    fault = CorruptedGradient(monkeypatch, element=50)
    with Trainer(tmp_path, window=options(on_failure="demote")) as trainer:
        trainer.run_undisturbed(4)
        before = trainer.report(4)
        fault.armed = True
        trainer.run(8)
        del trainer.given[8]
        trainer.update()
        with pytest.raises(gockpt.AuditError, match="late from now on"):
            trainer.manager.wait_until_finished()
        trainer.assert_intact()
        assert_demoted_run(trainer, fault, before)


def assert_demoted_run(
    trainer: Trainer, fault: CorruptedGradient, before: gockpt.SaveReport
) -> None:
    assert fault.fired
    trainer.run(16)
    trainer.assert_intact()
    report = trainer.report(16)
    assert (report.kind, report.error, report.audit.max_ulps) == ("window", None, 0)
    assert 0 < report.early_bytes < before.early_bytes
    assert 0 < report.gradient_bytes < before.gradient_bytes  # it has not left for nothing
    assert report.late_leaves
    assert all("late since the audit of the save of step 8" in why for why in report.late_leaves)
    told = trainer.manager._gockpt_session.explain().splitlines()
    assert any(
        line.startswith("not early any more") and report.late_leaves[0] in line for line in told
    )


def test_demotion_reaches_the_window_that_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its early chunks are dropped, and the leaf is staged at the seal."""
    with Trainer(tmp_path, window=options(on_failure="demote")) as trainer:
        trainer.run_undisturbed(7)
        auditor = trainer.manager._gockpt_session._opener._auditor
        (*_, group) = trainer.step.program.cut.groups
        path = trainer.step.program.positions.paths[group.leaves[0]]
        trainer.update()
        assert auditor._demote(SaveRecord(kind="window", reason="a test", step=4), path)
        trainer.save()
        trainer.assert_intact()
        assert path in trainer.report(8).late_leaves[0]
        trainer.run_past_next_window()
        trainer.assert_intact()


def test_when_all_is_demoted_saves_are_snapshots(tmp_path: Path) -> None:
    with Trainer(tmp_path, window=options(on_failure="demote")) as trainer:
        trainer.run_undisturbed(4)
        assert "not early any more" not in trainer.manager._gockpt_session.explain()
        auditor = trainer.manager._gockpt_session._opener._auditor
        for path in trainer.step.program.positions.paths:
            auditor._demote(SaveRecord(kind="window", reason="a test"), path)
        trainer.run(8)
        trainer.assert_intact()
        report = trainer.report(8)
        assert (report.kind, report.audit) == ("snapshot", None)
        assert "audit of an earlier save failed" in report.reason, "of what has no label"


def test_several_processes_do_not_demote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = CorruptedGradient(monkeypatch)
    with Trainer(tmp_path, window=options(on_failure="demote")) as trainer:
        trainer.run_undisturbed(7)
        fault.spoil(trainer)
        with monkeypatch.context() as patch:
            patch.setattr("gockpt_jax.window.audit.jax.process_count", lambda: 2)
            trainer.settle()
            auditor: Auditor = trainer.manager._gockpt_session._opener._auditor
            assert not auditor._demote(SaveRecord(kind="window", reason="a test"), "a leaf")
        assert auditor.demoted(["a leaf"]) is None


# --- What is told --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save", "given"),
    [
        (gockpt.GoCkptSave, None),
        (ocp.args.StandardSave, {"run": 7}),
        (ocp.args.PyTreeSave, ["a", "list"]),
    ],
    ids=["ours", "standard", "tree"],
)
def test_figures_stand_beside_the_users_metadata(tmp_path: Path, save: Any, given: Any) -> None:
    mine = None if given is None else json.loads(json.dumps(given))
    with Trainer(tmp_path) as trainer:
        while trainer.label <= 8:
            trainer.update()
            trainer.save(args=save(trainer.state, custom_metadata=given))
        trainer.assert_intact()
        assert given == mine
        figures = trainer.report(8).audit
        assert figures.chunks == 8  # two leaves' moments, on two devices
        assert (figures.max_ulps, figures.max_relative_error, figures.worst_leaf) == (0, 0.0, None)
        assert 0 < figures.compared_bytes <= trainer.report(8).early_bytes
        told = {"gockpt_jax": {"audit": dataclasses.asdict(figures)}}
        want = given if isinstance(given, list) else (given or {}) | told
        assert metadata_of(tmp_path, 8) == want
        # The first save was a snapshot: nothing was replayed.
        assert trainer.report(0).audit is None
        assert metadata_of(tmp_path, 0) == given
    found = ocp.PyTreeCheckpointHandler().metadata(tmp_path / "8" / "state")
    assert found.custom_metadata == want


def test_each_item_tells_of_its_own_leaves(tmp_path: Path) -> None:
    with Trainer(tmp_path) as trainer:
        while trainer.label <= 8:
            trainer.update()
            state = trainer.state
            parts = {"opt": state.opt_state, "params": state.params}
            trainer.save(
                args=ocp.args.Composite(**{k: gockpt.GoCkptSave(v) for k, v in parts.items()})
            )
        trainer.manager.wait_until_finished()
        told = {item: metadata_of(tmp_path, 8, item) for item in parts}
        opt = told["opt"]["gockpt_jax"]["audit"]
        assert opt == dataclasses.asdict(trainer.report(8).audit)
        assert told["params"] is None


def test_a_leaf_of_two_items_is_in_both(tmp_path: Path) -> None:
    """The first has what left early; the second takes its own."""
    with Trainer(tmp_path) as trainer:
        while trainer.label <= 8:
            trainer.update()
            items = {name: gockpt.GoCkptSave(trainer.state) for name in ("state", "copy")}
            trainer.save(args=ocp.args.Composite(**items))
        trainer.manager.wait_until_finished()
        assert trainer.report(8).kind == "window"
        target = gockpt.GoCkptRestore(trainer.target)
        found = trainer.manager.restore(8, args=ocp.args.Composite(state=target, copy=target))
        assert not differing(bits_of(found["state"]), trainer.given[8])
        assert not differing(bits_of(found["copy"]), trainer.given[8])
        trainer.settle()
        assert trainer.bytes_in_flight() == (0, 0)


# --- Shards, rotation and budgets ----------------------------------------------------------------

SIZE = 16 * 1024
LEAF_BYTES = SIZE * 4


@jax.jit
def momentum(state: Any) -> Any:
    g = jnp.cos(state["w"])
    m = 0.5 * state["m"] + g
    return {"m": m, "w": jnp.tanh(state["w"] - m)}


def run_momentum(manager: gockpt.GoCkptManager, saves: int, devices: int) -> dict[int, str]:
    """Saves every third update; returns what the audit said of which save."""
    mesh = jax.make_mesh((devices,), ("a",), axis_types=(AxisType.Auto,))
    state = jax.device_put(
        {"m": jnp.zeros(SIZE), "w": jnp.linspace(-1.0, 1.0, SIZE)},
        NamedSharding(mesh, PartitionSpec("a")),
    )
    step, failed = manager.wrap(momentum), {}
    for n in range(saves):
        for _ in range(3):
            state = step(state)
        manager.save(n, args=gockpt.GoCkptSave(state))
        try:
            manager.wait_until_finished()
        except gockpt.AuditError as error:
            failed[n] = str(error)
    return failed


@pytest.mark.parametrize("devices", [1, 8])
def test_wrong_element_is_met_once_in_a_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int
) -> None:
    """It is wrong in every window; half of each shard is looked at in each."""
    shard = SIZE // devices
    fault = CorruptedGradient(monkeypatch, element=SIZE - 5)
    fault.armed = True
    window = gockpt.WindowOptions(steps=2, audit=gockpt.Audit(fraction=1 / 2))
    with gockpt.GoCkptManager(tmp_path, window=window) as manager:
        failed = run_momentum(manager, 7, devices)
        figures = [r.audit for r in manager.reports]
        steps = manager.all_steps()
    windows = [n for n, f in enumerate(figures) if f is not None]
    assert list(failed) == windows[1::2]
    assert sorted({*steps, *failed}) == list(range(7))
    assert not {*steps} & {*failed}
    for n in windows:
        assert (figures[n].chunks, figures[n].compared_bytes) == (devices, LEAF_BYTES // 2)
        assert (figures[n].max_ulps > 0) == (n in failed)
    for text in failed.values():
        assert f"`['m']`, chunk 1 of 2 in the shard at [{SIZE - shard}:{SIZE}]: 1 of " in text


@pytest.mark.parametrize("fraction", [1 / 4, 1.0])
@pytest.mark.parametrize("devices", [1, 8])
def test_samples_keep_the_device_budget(tmp_path: Path, fraction: float, devices: int) -> None:
    budget = 2 * LEAF_BYTES // devices  # a gradient of each of two steps
    window = gockpt.WindowOptions(
        steps=2, device_budget_bytes=budget, audit=gockpt.Audit(fraction=fraction)
    )
    with gockpt.GoCkptManager(tmp_path, window=window) as manager:
        assert run_momentum(manager, 5, devices) == {}
        session = manager._gockpt_session
        session.resources.worker.wait_until_idle()
        assert (session.resources.device.used_bytes, session.host.used_bytes) == (0, 0)
        report = manager.last_report
        wanted = max(LEAF_BYTES * fraction, 4096 * devices)
        assert report.audit.compared_bytes == wanted
        assert report.peak_device_bytes <= budget
