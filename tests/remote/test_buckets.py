"""Checkpoints in buckets: whole ones, and what a server does to them that fails in the middle."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

import gockpt_jax as gockpt
from gockpt_jax.storage.files import bucket as bucket_lib
from gockpt_jax.storage.inspecting.directory import look_into
from gockpt_jax.storage.inspecting.verify import verify

from .conftest import Bucket
from .proxy import Fault

State = dict[str, Any]
PERIOD = 4
FEW = {"max_retries": 4, "initial_delay": "10ms", "max_delay": "50ms"}
# The clients' own warnings are theirs.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::gockpt_jax.SaveFailedWarning"),
]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tries as a test has patience for."""
    monkeypatch.setattr(bucket_lib, "RETRIES", FEW)


def first_state() -> State:
    return {
        "w": jnp.arange(6000.0).reshape(60, 100),
        "half": jnp.ones((8, 8), jnp.bfloat16),
        "count": jnp.zeros((), jnp.int32),
    }


@jax.jit
def train_step(state: State) -> State:
    return {
        "w": state["w"] * 0.5 + 1.0,
        "half": state["half"] * jnp.bfloat16(0.5),
        "count": state["count"] + 1,
    }


class Run:
    """Trains through windows, and knows what each checkpoint must hold."""

    def __init__(self, directory: str, on_save_error: str = "raise") -> None:
        self.directory = directory
        self.manager = gockpt.GoCkptManager(
            directory,
            options=ocp.CheckpointManagerOptions(save_interval_steps=PERIOD, max_to_keep=2),
            window=gockpt.WindowOptions(steps=2, on_save_error=on_save_error),  # type: ignore[arg-type]
        )
        self.step_fn = self.manager.wrap(train_step)
        self.state, self.label = first_state(), 0
        self.given: dict[int, State] = {}

    def train(self, past: int) -> None:
        while self.label <= past:
            self.state = self.step_fn(self.state)
            host = jax.tree.map(np.asarray, self.state)
            if self.manager.save(self.label, args=gockpt.GoCkptSave(self.state)):
                self.given[self.label] = host
            self.label += 1

    def finish(self, past: int) -> None:
        self.train(past)
        self.manager.wait_until_finished()

    def assert_intact(self, *steps: int) -> None:
        """These steps are there, whole and right, and nothing else is taken for one."""
        self.manager.reload()
        assert tuple(self.manager.all_steps()) == steps
        held = {
            step.path.name: [verdict.state for verdict in verify(step.path)]
            for step in look_into(self.directory).steps
        }  # fmt: skip
        assert {name: set(states) for name, states in held.items()} == {
            str(step): {"whole"} for step in steps
        }
        target = jax.eval_shape(lambda: self.state)
        for step in steps:
            restored = self.manager.restore(step, args=gockpt.GoCkptRestore(target))
            assert_same(restored, self.given[step])


def assert_same(got: State, want: State) -> None:
    for name, value in want.items():
        np.testing.assert_array_equal(np.asarray(got[name]), value)


@pytest.fixture
def run(bucket: Bucket) -> Iterator[Run]:
    made = Run(bucket.directory())
    yield made
    bucket.proxy.trouble(None)
    made.manager.close()


def test_windows_save_and_restore(run: Run, bucket: Bucket) -> None:
    run.finish(2 * PERIOD)
    assert run.manager.last_report.kind == "window"
    run.assert_intact(PERIOD, 2 * PERIOD)
    assert any(_is_data(line, bucket) for line in bucket.proxy.seen)
    root = epath.Path(run.directory)
    files = sorted(p.name for p in (root / str(2 * PERIOD) / "state").iterdir())
    assert "manifest.ocdbt" in files
    assert "w" not in files, "a bucket has few objects, not one for each chunk"
    with ocp.CheckpointManager(root, item_handlers={"state": ocp.StandardCheckpointHandler()}) as m:
        stock = m.restore(PERIOD, args=ocp.args.Composite(state=ocp.args.StandardRestore()))
    assert_same(stock["state"], run.given[PERIOD])


def _is_data(line: str, bucket: Bucket) -> bool:
    return Fault("cut", bucket.data).takes(line)


@pytest.mark.parametrize(("kind", "times"), [("throttle", 3), ("cut", 3), ("stall", 1)])
def test_a_fault_that_passes_is_outlived(run: Run, bucket: Bucket, kind: Any, times: int) -> None:
    run.finish(0)
    fault = bucket.proxy.trouble(Fault(kind, bucket.data, times))
    run.finish(PERIOD)
    assert fault is not None
    assert fault.hits == times
    bucket.proxy.trouble(None)
    run.assert_intact(0, PERIOD)


@pytest.mark.parametrize("kind", ["throttle", "stall", "cut", "refuse"])
def test_a_fault_that_stays_fails_the_save_by_name(
    run: Run, bucket: Bucket, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "stall":  # some 6 s for each try
        monkeypatch.setattr(bucket_lib, "RETRIES", {**FEW, "max_retries": 1})
    run.finish(0)
    fault = bucket.proxy.trouble(Fault(kind, bucket.data))
    began = time.monotonic()
    with pytest.raises(gockpt.StorageError) as raised:
        run.finish(PERIOD)
    assert time.monotonic() - began < 120, "tries without an end"
    assert fault is not None
    assert fault.hits > 0
    bucket.proxy.trouble(None)
    told = str(raised.value)
    assert f"{run.directory}/{PERIOD}/state failed" in told
    assert "tensorstore_spec" not in told
    assert "Nothing of this save is visible" in told
    assert "docs/storage.md" in told
    assert raised.value.__cause__ is not None
    run.given.pop(PERIOD, None)
    run.assert_intact(0)
    run.finish(2 * PERIOD)  # training goes on, and the next save works
    run.assert_intact(0, 2 * PERIOD)


def test_without_its_marker_a_save_is_invisible(run: Run, bucket: Bucket) -> None:
    """Everything is there but the last word."""
    run.finish(0)
    fault = bucket.proxy.trouble(Fault("refuse", bucket.marker(PERIOD)))
    with pytest.raises(gockpt.StorageError, match=f"step {PERIOD}"):
        run.finish(PERIOD)
    assert fault is not None
    assert fault.hits > 0
    bucket.proxy.trouble(None)
    run.given.pop(PERIOD, None)
    run.assert_intact(0)
    found = verify(f"{run.directory}/{PERIOD}")
    assert any("commit_success.txt" in fault for verdict in found for fault in verdict.faults)
    with gockpt.GoCkptManager(run.directory) as another:
        assert another.latest_step() == 0


def test_a_deletion_that_is_cut_short_leaves_nothing_that_is_listed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.finish(PERIOD)
    monkeypatch.setattr(run.manager._checkpoint_deleter._stock, "delete", lambda step: None)
    run.manager.delete(PERIOD)
    run.assert_intact(0)


def test_what_lies_beside_the_tree_is_verified(bucket: Bucket) -> None:
    items = ocp.args.Composite(
        state=gockpt.GoCkptSave(first_state()), cursor=ocp.args.JsonSave({"position": 12345})
    )
    root = epath.Path(bucket.directory())
    with gockpt.GoCkptManager(root) as manager:
        manager.save(0, args=items, custom_metadata={"lr": 0.5})
    assert {verdict.state for verdict in verify(root)} == {"whole"}
    (root / "0/cursor/metadata").write_text('{"position": 92345}')
    faults = [fault for verdict in verify(root) for fault in verdict.faults]
    assert faults == ["`cursor/metadata` is damaged: its content has changed"]


def test_a_failed_save_is_warned_of(bucket: Bucket) -> None:
    run = Run(bucket.directory(), on_save_error="warn")
    run.finish(0)
    bucket.proxy.trouble(Fault("throttle", bucket.data))
    with pytest.warns(gockpt.SaveFailedWarning, match=r"StorageError: .*failed"):
        run.finish(PERIOD)
    bucket.proxy.trouble(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", gockpt.SaveFailedWarning)
        run.finish(2 * PERIOD)
    run.given.pop(PERIOD, None)
    run.assert_intact(0, 2 * PERIOD)
    run.manager.close()
