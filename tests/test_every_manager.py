"""Windows through stock save arguments, several items, the stock manager, and explicit meshes."""

import asyncio
import functools
import threading
from pathlib import Path
from typing import Any

import bits
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from broken_item import Broken, BrokenSave
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from patience import writers_have_no_patience
from programs import PROGRAMS

import gockpt_jax as gockpt
from gockpt_jax.storage.saving.state_handler import StateHandler

EVERY = ocp.checkpoint_managers.FixedIntervalPolicy(6)
WINDOW = gockpt.WindowOptions(steps=4)
UPDATES = 20  # labels 0, 6, 12, 18 are saved


def to_host(tree: Any) -> list[np.ndarray]:
    return list(bits.to_host(tree).values())


def assert_same(got: Any, want: list[np.ndarray]) -> None:
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == b.tobytes()


def half(params: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


SAVES = {
    "StandardSave": lambda s: ocp.args.StandardSave(s),
    "PyTreeSave": lambda s: ocp.args.PyTreeSave(s),
    "another layout": lambda s: ocp.args.StandardSave({"p": s.params, "o": s.opt_state}),
}


@pytest.mark.parametrize(
    ("save", "devices"), [*((save, 1) for save in SAVES), ("another layout", 8)]
)
def test_stock_save_arguments_get_windows(save: str, devices: int, tmp_path: Path) -> None:
    job, given = PROGRAMS["clip_adamw"].build(devices), {}
    options = ocp.CheckpointManagerOptions(save_interval_steps=6)
    with gockpt.GoCkptManager(tmp_path, options=options, window=WINDOW) as manager:
        step, state = manager.wrap(job.step), job.state
        for label in range(UPDATES):
            state = job.advance(step, state, label)
            given[label] = to_host(SAVES[save](state).item)
            manager.save(label, args=SAVES[save](state))
        manager.wait_until_finished()
        assert [(r.kind, r.window_steps) for r in manager.reports[1:]] == [("window", 4)] * 3
        for label in manager.all_steps():
            target = ocp.args.StandardRestore(SAVES[save](state).item)
            assert_same(manager.restore(label, args=target), given[label])


def test_items_of_one_save_share_a_window(tmp_path: Path) -> None:
    """Also the same leaves twice, and leaves that no step has returned."""
    job, given = PROGRAMS["ema"].build(8), {}
    options = ocp.CheckpointManagerOptions(save_interval_steps=6)
    with gockpt.GoCkptManager(tmp_path, options=options, window=WINDOW) as manager:
        step, state = manager.wrap(job.step), job.state
        for label in range(UPDATES):
            state = job.advance(step, state, label)
            items = {
                "model": state.params,
                "optimizer": (state.opt_state, state.params),
                "half": half(state.params),
            }
            given[label] = {name: to_host(item) for name, item in items.items()}
            args = {name: ocp.args.StandardSave(item) for name, item in items.items()}
            manager.save(label, args=ocp.args.Composite(**args, n=ocp.args.JsonSave({"n": label})))
        manager.wait_until_finished()
        assert [(r.kind, r.error) for r in manager.reports[1:]] == [("window", None)] * 3
        assert all(0 < r.early_bytes < r.state_bytes for r in manager.reports[1:])
        assert manager.all_steps() == [0, 6, 12, 18]
        for label in manager.all_steps():
            args = {name: ocp.args.StandardRestore(item) for name, item in items.items()}
            args["n"] = ocp.args.JsonRestore()
            restored = manager.restore(label, args=ocp.args.Composite(**args))
            assert restored["n"] == {"n": label}
            for name in items:
                assert_same(restored[name], given[label][name])


@pytest.mark.parametrize("alone", [True, False])
def test_handler_in_a_stock_manager(alone: bool, tmp_path: Path) -> None:
    job, given = PROGRAMS["clip_adamw"].build(1), {}
    handler = gockpt.GoCkptHandler(window=WINDOW, save_decision_policy=EVERY)

    def args(x: Any) -> Any:
        return x if alone else ocp.args.Composite(state=x)

    prefix = None if alone else "lr0.1"
    options = ocp.CheckpointManagerOptions(save_decision_policy=EVERY, step_prefix=prefix)
    handlers = handler if alone else {"state": handler}
    with ocp.CheckpointManager(tmp_path, options=options, item_handlers=handlers) as manager:
        step, state = handler.wrap(job.step), job.state
        for label in range(UPDATES):
            state = job.advance(step, state, label)
            given[label] = to_host(state)
            manager.save(label, args=args(gockpt.GoCkptSave(state)))
        manager.wait_until_finished()
        # It hears of accepted saves only: two of them tie labels to updates.
        assert [r.kind for r in handler.reports] == ["snapshot", "snapshot", "window", "window"]
        assert [r.step for r in handler.reports] == manager.all_steps()
        for label in manager.all_steps():
            restored = manager.restore(label, args=args(gockpt.GoCkptRestore(state)))
            assert_same(restored if alone else restored.state, given[label])


@pytest.mark.parametrize("knows", [True, False])
def test_what_the_policy_tells_a_handler(knows: bool, tmp_path: Path) -> None:
    """Without it the period of the last two saves is all, which one that is forced upsets."""
    job = PROGRAMS["clip_adamw"].build(1)
    handler = gockpt.GoCkptHandler(window=WINDOW, save_decision_policy=EVERY if knows else None)
    options = ocp.CheckpointManagerOptions(save_decision_policy=EVERY)
    with ocp.CheckpointManager(tmp_path, options=options, item_handlers=handler) as manager:
        step, state = handler.wrap(job.step), job.state
        for label in range(31):
            state = job.advance(step, state, label)
            manager.save(label, args=gockpt.GoCkptSave(state), force=label == 13)
            manager.wait_until_finished()
    windows = [r.step for r in handler.reports if r.kind == "window"]
    assert windows == [12, *([18, 24] if knows else []), 30]


@pytest.mark.parametrize("together", [False, True])
def test_a_handler_foresees_saves_by_time_by_their_period(together: bool, tmp_path: Path) -> None:
    """No label tells when the time will have come; two saves do."""
    by_time = ocp.checkpoint_managers.ContinuousCheckpointingPolicy()
    either = ocp.checkpoint_managers.AnySavePolicy([by_time, EVERY])
    policy = either if together else by_time
    job = PROGRAMS["clip_adamw"].build(1)
    handler = gockpt.GoCkptHandler(window=WINDOW, save_decision_policy=policy)
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        step, state = handler.wrap(job.step), job.state
        for label in range(25):
            state = job.advance(step, state, label)
            if label % 8 == 0:  # it is idle, and the minute is over
                manager.save(label, args=gockpt.GoCkptSave(state))
                manager.wait_until_finished()
    kinds = [(r.step, r.kind) for r in handler.reports]
    assert kinds == [(0, "snapshot"), (8, "snapshot"), (16, "window"), (24, "window")]


def test_a_handler_alone_saves_where_a_loop_runs(tmp_path: Path) -> None:
    """As in a notebook."""

    async def cell() -> None:
        with ocp.Checkpointer(gockpt.GoCkptHandler()) as checkpointer:
            checkpointer.save(tmp_path / "x", args=gockpt.GoCkptSave({"w": jnp.ones(2)}))

    asyncio.run(cell())
    with ocp.StandardCheckpointer() as stock:
        assert stock.restore(tmp_path / "x")["w"].tolist() == [1.0, 1.0]
    handler = gockpt.GoCkptHandler()
    assert handler.restore(tmp_path / "x")["w"].tolist() == [1.0, 1.0]
    handler.close()


def test_warnings_are_of_the_users_line(tmp_path: Path) -> None:
    """Though Orbax calls us, from a coroutine of its own."""
    handler = gockpt.GoCkptHandler()
    handler.wrap(jax.jit(lambda state: state))
    with ocp.AsyncCheckpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "0", args=gockpt.GoCkptSave({"w": jnp.ones(2)}))
        with pytest.warns(gockpt.SnapshotOnlyWarning, match=r"train_step = ") as told:
            checkpointer.save(tmp_path / "1", args=gockpt.GoCkptSave({"w": jnp.ones(2)}))
    assert [warning.filename for warning in told] == [__file__]


@pytest.mark.parametrize("names", [("7", "8"), ("7", "7")])
def test_saves_of_a_handler_alone_are_told_apart(names: tuple[str, str], tmp_path: Path) -> None:
    """With no step between them, in one directory, or one in the place of the other."""
    handler = gockpt.GoCkptHandler()
    with ocp.AsyncCheckpointer(handler) as checkpointer:
        for name in names:
            args = gockpt.GoCkptSave({"w": jnp.ones(2)})
            checkpointer.save(tmp_path / name, args=args, force=True)
            checkpointer.wait_until_finished()
    assert [(str(r.step), r.state_bytes) for r in handler.reports] == [(n, 8) for n in names]


def test_a_stock_manager_saves_a_label_again(tmp_path: Path) -> None:
    handler = gockpt.GoCkptHandler()
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        for _ in range(2):
            manager.save(7, args=gockpt.GoCkptSave({"w": jnp.ones(2)}))
            manager.wait_until_finished()
            manager.delete(7)
    assert [(r.step, r.state_bytes) for r in handler.reports] == [(7, 8)] * 2


@pytest.mark.parametrize("at", ["leaf_writer._check_data", "tree_handler.why_no_files"])
@pytest.mark.parametrize("is_handed_over", [True, False])
def test_a_save_that_fails_under_a_stock_manager_is_reported(
    at: str, is_handed_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it writes, and where it is begun: on a thread of Orbax's, or on the trainer's."""

    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    def save(label: int) -> None:
        manager.save(label, args=gockpt.GoCkptSave({"w": jnp.ones(2)}))
        manager.wait_until_finished()

    if not is_handed_over:
        monkeypatch.setattr("gockpt_jax.storage.saving.state_handler.settled", lambda *_: None)
    handler = gockpt.GoCkptHandler(use_ocdbt=False)
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        save(0)
        with monkeypatch.context() as patch:
            patch.setattr(f"gockpt_jax.storage.writing.{at}", fail)
            with pytest.raises(OSError, match="the disk is gone"):
                save(1)
        assert handler.window_status == "idle"
        session = handler._gockpt_session
        session.resources.worker.wait_until_idle()
        assert session.host.used_bytes == 0
        told = [(r.step, r.error and "the disk is gone" in r.error) for r in handler.reports]
        assert told == [(0, None), (1, True)]


@pytest.mark.parametrize("then", ["another save", "close"])
def test_a_save_that_a_stock_manager_gives_up_is_reported(then: str, tmp_path: Path) -> None:
    """It does not tell us: another item has failed, or the directory could not be made."""
    handler = gockpt.GoCkptHandler()
    handlers = {"broken": Broken(), "state": handler}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
        state = gockpt.GoCkptSave({"w": jnp.ones(2)})
        manager.save(0, args=ocp.args.Composite(broken=BrokenSave(), state=state))
        with pytest.raises(OSError, match="the disk is gone"):
            manager.wait_until_finished()
        assert handler.reports == ()
        for item in handler.begun._items.values():
            item.wait(60)  # what is being written may be of another manager's healthy save
        if then == "another save":
            manager.save(1, args=ocp.args.Composite(state=state))
            manager.wait_until_finished()
    told = [(r.step, r.error is None) for r in handler.reports]
    assert told == [(0, False), *[(1, True)] * (then == "another save")]
    assert "the manager has raised why" in handler.reports[0].error


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set, it lets saves be written; until then their writing does not begin."""
    may_write, write = threading.Event(), StateHandler._begin_writing

    async def write_late(*args: Any) -> Any:
        assert await asyncio.to_thread(may_write.wait, 60)
        return await write(*args)

    monkeypatch.setattr(StateHandler, "_begin_writing", write_late)
    return may_write


def test_managers_may_share_a_handler(tmp_path: Path, may_write: threading.Event) -> None:
    """The save of one begins while the other's has not begun to be written."""
    handler = gockpt.GoCkptHandler()
    with (
        ocp.CheckpointManager(tmp_path / "near", item_handlers=handler) as near,
        ocp.CheckpointManager(tmp_path / "far", item_handlers=handler) as far,
    ):
        for manager in (near, far):
            manager.save(0, args=gockpt.GoCkptSave({"w": jnp.ones(2)}))
        may_write.set()
        for manager in (near, far):
            manager.wait_until_finished()
            assert manager.restore(0)["w"].tolist() == [1.0, 1.0]


def test_checkpointers_may_share_a_handler(tmp_path: Path, may_write: threading.Event) -> None:
    """One for the best and one for the last, in one directory."""
    handler = gockpt.GoCkptHandler()
    with ocp.AsyncCheckpointer(handler) as best, ocp.AsyncCheckpointer(handler) as last:
        for checkpointer, name in ((best, "best_1"), (last, "last_2")):
            checkpointer.save(tmp_path / name, args=gockpt.GoCkptSave({"w": jnp.ones(2)}))
        may_write.set()
        for checkpointer, name in ((best, "best_1"), (last, "last_2")):
            checkpointer.wait_until_finished()
            assert checkpointer.restore(tmp_path / name)["w"].tolist() == [1.0, 1.0]
        assert sorted((r.step, r.error) for r in handler.reports) == [(1, None), (2, None)]


def test_what_a_checkpointer_has_no_directory_for_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells nobody; the thread that was to write waits for the directory, up to 300 s."""
    (tmp_path / "file").write_text("")
    handler, state = gockpt.GoCkptHandler(), {"w": jnp.ones(2)}
    worker, host = (getattr(handler._gockpt_session.resources, x) for x in ("worker", "host"))

    failing = ocp.AsyncCheckpointer(handler)
    with writers_have_no_patience(monkeypatch):
        failing.save(tmp_path / "file" / "1", args=gockpt.GoCkptSave(state))
        with pytest.raises(OSError, match="file"):
            failing.wait_until_finished()
    worker.wait_until_idle()
    assert host.used_bytes > 0
    with ocp.AsyncCheckpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "2", args=gockpt.GoCkptSave(state))
        checkpointer.wait_until_finished()
        worker.wait_until_idle()
        assert host.used_bytes == 0
    assert [(r.step, r.error is None) for r in handler.reports] == [(1, False), (2, True)]


def test_leaves_on_several_meshes_of_the_same_devices(tmp_path: Path) -> None:
    """Axes of the same names, and shards of the same sizes, which are not the same shards."""
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    meshes = [jax.make_mesh(s, ("x", "y"), (AxisType.Auto,) * 2) for s in ((2, 4), (4, 2), (8, 1))]
    places = [NamedSharding(mesh, PartitionSpec("x", "y")) for mesh in meshes]
    state = [jax.device_put(values + n, place) for n, place in enumerate(places)]
    with gockpt.GoCkptManager(tmp_path) as manager:
        manager.save(0, args=gockpt.GoCkptSave(state))
        restored = manager.restore(0)
    assert_same(restored, to_host(state))
    assert [x.sharding for x in restored] == places


def test_explicit_mesh_axes(tmp_path: Path) -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    rows = NamedSharding(mesh, PartitionSpec("d", None))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, opt_state: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return (jnp.einsum("bi,ij->bj", x, p["w"], out_sharding=rows) + p["b"]).var()

        updates, opt_state = tx.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    options = ocp.CheckpointManagerOptions(save_interval_steps=6)
    with jax.set_mesh(mesh), gockpt.GoCkptManager(
        tmp_path, options=options, window=WINDOW
    ) as manager:  # fmt: skip
        params = {
            "w": jax.device_put(jnp.ones((16, 24)), rows),
            "b": jax.device_put(jnp.zeros(24), NamedSharding(mesh, PartitionSpec())),
        }
        state = (params, jax.jit(tx.init)(params))
        step, given = manager.wrap(update, state=(0, 1)), {}
        for label in range(UPDATES):
            x = np.random.default_rng(label).standard_normal((32, 16), np.float32)
            state = step(*state, jax.device_put(x, rows))
            given[label] = to_host(state)
            manager.save(label, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        assert [(r.kind, r.window_steps) for r in manager.reports[1:]] == [("window", 4)] * 3
        for label in manager.all_steps():
            restored = manager.restore(label, args=gockpt.GoCkptRestore(state))
            assert_same(restored, given[label])
