"""What people get wrong: a named error that tells what to do, or an honest snapshot.

Whatever it is, the checkpoints that were there stay, and training can go on.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from window.training_loop import BATCH, Options, assert_same, fresh, to_host, update

import gockpt_jax as gockpt

K = 3
WHEN = 10  # the update at which something goes wrong: the last of the window of the save at 10


def manager_of(directory: Any, **options: Any) -> gockpt.GoCkptManager:
    options = {"save_interval_steps": 5} | options
    window = gockpt.WindowOptions(steps=K)
    return gockpt.GoCkptManager(directory, options=Options(**options), window=window)


@jax.jit
def tolerant(state, batch):
    """The same updates, whatever else the state holds."""
    return state | update({k: state[k] for k in ("opt", "params")}, batch)


def as_given(n, value):
    return value


@dataclasses.dataclass(frozen=True)
class Misuse:
    """A loop in which something is wrong at update `WHEN`, and what its saves are then.

    Attributes:
      state: What is done to the state before an update.
      batch: What is done to the batch.
      saved: What is given to `save` in place of the state.
      kind: Of the save at `WHEN`.
      reason: Part of its report's reason.
      afterwards: The kind of the saves after it.
      at: Where it is done.
    """

    state: Callable[[int, Any], Any] = as_given
    batch: Callable[[int, Any], Any] = as_given
    saved: Callable[[int, Any], Any] = as_given
    kind: str = "snapshot"
    reason: str = ""
    afterwards: str = "window"
    at: tuple[int, ...] = (WHEN,)

    def apply(self, n: int, state: Any, change: Callable[[int, Any], Any]) -> Any:
        return change(n, state) if n in self.at else state


def count_as_python_int(n, state):
    adam, *rest = state["opt"]
    return state | {"opt": (adam._replace(count=int(adam.count)), *rest)}


MISUSES = {
    "structure changed in mid-run": Misuse(
        state=lambda n, s: s | {"extra": jnp.ones(3)}, reason="not those it was traced for"
    ),
    "batch shape changed inside the window": Misuse(
        batch=lambda n, x: x[:1], reason="the call changed"
    ),
    "int for float": Misuse(state=lambda n, s: s | {"rate": 1}, reason="the call changed"),
    "int for an integer array": Misuse(state=count_as_python_int, reason="the call changed"),
    "other dtype inside the window": Misuse(
        state=lambda n, s: s | {"params": {"w": s["params"]["w"].astype(jnp.bfloat16)}},
        reason="the call changed",
        afterwards="snapshot",  # a program with bf16 parameters, which has no cut
    ),
    "a copy of the state": Misuse(
        saved=lambda n, s: jax.tree.map(jnp.copy, s), reason="not the state that the last wrapped"
    ),
    "the state on the host": Misuse(
        saved=lambda n, s: to_host(s), reason="none of it is a `jax.Array`; give what the last"
    ),
    "a state of its own": Misuse(
        saved=lambda n, s: fresh() | {"rate": s["rate"]}, reason="nothing given to `save` had left"
    ),
    "numbers beside the state": Misuse(saved=lambda n, s: s | {"epoch": 1}, kind="window"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_honest_saves(tmp_path, name):
    misuse = MISUSES[name]
    with manager_of(tmp_path) as manager:
        step, saved = manager.wrap(tolerant), {}
        state = alone = fresh() | {"rate": jnp.float32(0.5)}  # `alone`: the same without us
        for n in range(21):
            state, alone = (misuse.apply(n, s, misuse.state) for s in (state, alone))
            batch = misuse.apply(n, BATCH, misuse.batch)
            state, alone = step(state, batch), tolerant(alone, batch)
            given = misuse.apply(n, state, misuse.saved)
            if manager.save(n, args=gockpt.GoCkptSave(given)):
                saved[n] = to_host(given)
        manager.wait_until_finished()
        assert_same(to_host(state), to_host(alone))
        for label, want in saved.items():
            restored = manager.restore(label, args=gockpt.GoCkptRestore(want))
            assert_same(jax.tree.leaves(restored), jax.tree.leaves(want))
        reports = {r.step: r for r in manager.reports}
        assert reports[5].kind == "window"
        assert (reports[WHEN].kind, misuse.reason in reports[WHEN].reason) == (misuse.kind, True)
        assert reports[20].kind == misuse.afterwards


@pytest.mark.parametrize("is_async", [True, False])
def test_a_copy_is_no_window_in_the_report_of_any_save(tmp_path, is_async):
    """A synchronous save is over, and told of, before it is known that nothing else is taken."""
    with manager_of(tmp_path, enable_async_checkpointing=is_async) as manager:
        step, state = manager.wrap(update), fresh()
        for n in range(11):
            state = step(state, BATCH)
            manager.save(n, args=gockpt.GoCkptSave(state if n < 10 else to_host(state)))
        manager.wait_until_finished()
        assert [(r.kind, r.window_steps) for r in manager.reports[1:]] == [
            ("window", K), ("snapshot", 1),
        ]  # fmt: skip


def test_the_state_of_the_step_before(tmp_path):
    """Without donation it is alive, and what is saved is what was given."""
    with manager_of(tmp_path) as manager:
        step, state = manager.wrap(update), fresh()
        for n in range(11):
            before, state = state, step(state, BATCH)
            manager.save(n, args=gockpt.GoCkptSave(before))
        manager.wait_until_finished()
        assert_same(manager.restore(10), to_host(before))
        assert [r.kind for r in manager.reports] == ["snapshot"] * 3
        assert "not the state that the last wrapped step returned" in manager.last_report.reason


def test_save_before_any_step(tmp_path, capsys):
    with manager_of(tmp_path) as manager:
        state = fresh()
        assert manager.save(0, args=gockpt.GoCkptSave(state))
        assert_same(manager.restore(0), to_host(state))
        assert manager.last_report.kind == "snapshot"
        assert "no wrapped step has run; if steps have, call what" in manager.last_report.reason
        manager.explain()
        assert "no wrapped step has run; if steps have, call what" in capsys.readouterr().out


def test_a_save_at_every_step(tmp_path):
    with manager_of(tmp_path, save_interval_steps=1) as manager:
        step, state = manager.wrap(update), fresh()
        for n in range(6):
            state = step(state, BATCH)
            manager.save(n, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        assert [r.kind for r in manager.reports] == ["snapshot"] * 6
        assert "the step before it was saved too" in manager.last_report.reason


def test_two_managers_on_one_directory(tmp_path):
    """As with stock's, the second knows what was there when it was made: none, so 11 is its first.

    Nobody loses a checkpoint.
    """
    with manager_of(tmp_path) as first, manager_of(tmp_path) as second:
        step, other, state, saved = first.wrap(update), second.wrap(update), fresh(), {}
        for n in range(21):
            manager, wrapped = (first, step) if n < 11 else (second, other)
            state = wrapped(state, BATCH)
            if manager.save(n, args=gockpt.GoCkptSave(state)):
                saved[n] = to_host(state)
                manager.wait_until_finished()
        first.reload()
        assert first.all_steps() == [0, 5, 10, 11, 15, 20]
        for label, want in saved.items():
            assert_same(first.restore(label), want)
        # The label that another manager has saved meanwhile is refused, not overwritten.
        assert not first.save(20, args=gockpt.GoCkptSave(state))


# Errors.


def saved_once(manager):
    step, state = manager.wrap(update), fresh()
    for n in range(6):
        state = step(state, BATCH)
        manager.save(n, args=gockpt.GoCkptSave(state))
    manager.wait_until_finished()
    return state


def donated(manager):
    state = fresh()
    jax.jit(update, donate_argnums=0)(state, BATCH)
    return manager.save(10, args=gockpt.GoCkptSave(state))


def saved_after_close(manager):
    state = fresh()
    manager.close()
    return manager.save(10, args=gockpt.GoCkptSave(state))


ERRORS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "wrap twice": (
        lambda m: m.wrap(m.wrap(update)), gockpt.WrapError, "is wrapped already; wrap it",
    ),
    "wrap the state": (
        lambda m: m.wrap(fresh()), gockpt.WrapError, "needs a jitted train step, got a `dict`",
    ),
    "no state": (
        lambda m: m.save(10), ValueError, r"Must provide `args`, as in `save\(step, args=",
    ),
    "state by position": (
        lambda m: m.save(10, fresh()), TypeError, r"as in `save\(step, args=GoCkptSave\(state\)\)`",
    ),
    "bare state": (
        lambda m: m.save(10, args=fresh()), TypeError, r"got a `dict`. Write `args=GoCkptSave\(st",
    ),
    "bare target": (
        lambda m: m.restore(5, args=fresh()), TypeError, r"or `args=GoCkptRestore\(state\)` to",
    ),
    "label that is no integer": (
        lambda m: m.save(10.5, args=gockpt.GoCkptSave(fresh())), TypeError,
        "`step` must be an integer of at least 0, got 10.5",
    ),
    "negative label": (
        lambda m: m.save(-1, args=gockpt.GoCkptSave(fresh())), ValueError,
        "`step` must be an integer of at least 0, got -1",
    ),
    "step saved twice": (
        lambda m: m.save(5, args=gockpt.GoCkptSave(fresh()), force=True),
        ocp.checkpoint_manager.StepAlreadyExistsError, "step 5 already exists",
    ),
    "donated state": (
        donated, ValueError, r"\['opt'\]\[0\].count, .*: donated.*before the next step",
    ),
    "saved after close": (saved_after_close, RuntimeError, "manager is closed. Save before"),
    "another structure": (
        lambda m: m.restore(5, args=gockpt.GoCkptRestore({"other": jnp.ones(3)})),
        ValueError, "other",
    ),
    "no such step": (lambda m: m.restore(7), FileNotFoundError, "7"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_named_errors(tmp_path, name):
    misuse, kind, message = ERRORS[name]
    with manager_of(tmp_path) as manager:
        state = saved_once(manager)
        with pytest.raises(kind, match=message):
            misuse(manager)
    with manager_of(tmp_path) as manager:
        assert manager.all_steps() == [0, 5]
        assert_same(manager.restore(5), to_host(state))
        state = manager.wrap(update)(state, BATCH)
        assert manager.save(10, args=gockpt.GoCkptSave(state))


def test_a_step_saved_twice_without_force_is_refused(tmp_path):
    with manager_of(tmp_path) as manager:
        state = saved_once(manager)
        assert not manager.save(5, args=gockpt.GoCkptSave(fresh()))
        assert_same(manager.restore(5), to_host(state))


def test_no_cpu_backend(tmp_path, monkeypatch):
    """`JAX_PLATFORMS=cuda`: training goes on with snapshots, and one warning tells why."""

    def no_replay(leaves, threads):
        raise gockpt.ReplayError("replay needs JAX's CPU backend: `JAX_PLATFORMS=cuda,cpu`.")

    monkeypatch.setattr("gockpt_jax.replay.engine.Replayer.of", no_replay)
    with warnings.catch_warnings(record=True) as caught, manager_of(tmp_path) as manager:
        warnings.simplefilter("always", gockpt.SnapshotOnlyWarning)
        step, state = manager.wrap(update), fresh()
        for n in range(16):
            state = step(state, BATCH)
            manager.save(n, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        assert_same(manager.restore(15), to_host(state))
        assert [r.kind for r in manager.reports] == ["snapshot"] * 4
        assert "JAX_PLATFORMS" in manager.last_report.reason
    (warning,) = [w for w in caught if w.category is gockpt.SnapshotOnlyWarning]
    assert "`JAX_PLATFORMS=cuda,cpu`" in str(warning.message)


def test_the_result_of_wrap_is_not_used(tmp_path):
    """The loop goes on with its own step: told once, at the second save."""
    with manager_of(tmp_path) as manager:
        manager.wrap(update)
        state = fresh()
        assert manager.save(0, args=gockpt.GoCkptSave(state))  # of a first state it may be
        state = update(state, BATCH)
        with pytest.warns(gockpt.SnapshotOnlyWarning, match=r"train_step = manager\.wrap\("):
            manager.save(5, args=gockpt.GoCkptSave(state))
        assert manager.save(10, args=gockpt.GoCkptSave(state))  # once is enough
        assert_same(manager.restore(10), to_host(state))


def test_nothing_is_wrapped_where_nothing_is_trained(tmp_path, caplog):
    """A converter of checkpoints, say: no warning, which would be an error here, but a line."""
    with manager_of(tmp_path) as manager, caplog.at_level(logging.WARNING, "gockpt_jax"):
        assert manager.save(0, args=gockpt.GoCkptSave(fresh()))
        assert not caplog.records  # of a first state it may be
        for n in range(5, 16, 5):
            assert manager.save(n, args=gockpt.GoCkptSave(fresh()))
    (told,) = caplog.records  # once is enough
    assert "no step has been wrapped" in told.getMessage()
    assert "`train_step = manager.wrap(train_step)`" in told.getMessage()


@pytest.mark.parametrize("old", ["items", "save_kwargs"])
def test_a_state_in_the_old_form(tmp_path, old):
    """It has a name there, but not the one that is asked for; by position it has none."""
    with manager_of(tmp_path) as manager:
        with pytest.raises(TypeError, match=rf"`{old}=` is Orbax's old form.*write `args=\.\.\.`"):
            manager.save(0, **{old: fresh()})
        with pytest.raises(TypeError, match="got a `dict` without a name"):
            manager.save(0, fresh())


def test_a_step_without_the_states_tree(tmp_path):
    """An optimizer in place of the state: told before anything is armed, with the remedy."""
    with manager_of(tmp_path) as manager:
        step = manager.wrap(jax.jit(lambda s, x: {"loss": jnp.sum(s["w"] * x)}))
        state = {"w": jnp.ones(64), "opt": optax.sgd(0.1).init(jnp.ones(64))}
        step(state, BATCH)
        with pytest.raises(gockpt.StepMismatchError, match=r"wrap\(step, state=..., state_out="):
            step(state, BATCH)
