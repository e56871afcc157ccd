"""What `save` leaves to another thread, and what it has done when it returns."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from signals import Signals
from storage_helpers import assert_same_arrays

import gockpt_jax as gockpt
from gockpt_jax.storage.files import _compat as of_orbax
from gockpt_jax.storage.saving.hand_over import HandedOver, _MadeWhenRun
from gockpt_jax.storage.saving.state_handler import StateHandler
from gockpt_jax.storage.saving.taken import TakenSave, as_tree_save
from gockpt_jax.storage.saving.written import Written
from gockpt_jax.storage.writing import write_budget
from gockpt_jax.storage.writing.host_array import HostArray, HostShard
from gockpt_jax.storage.writing.write_budget import WriteStats, collected_here, collecting
from gockpt_jax.telemetry.save_record import SaveRecord

WAIT_SECS = 60
STATS = WriteStats()


def managers(path):
    """Ours, and stock's with our handler."""
    yield gockpt.GoCkptManager(path / "ours")
    yield ocp.CheckpointManager(path / "stock", item_handlers=gockpt.GoCkptHandler())


@pytest.fixture
def gate(monkeypatch):
    """Holds stock's handler back until it is set; counts who has asked it."""
    gate, asked_by = threading.Event(), []
    stock = ocp.PyTreeCheckpointHandler.async_save

    async def held(self, *args, **kwargs):
        asked_by.append(threading.current_thread())
        assert gate.wait(WAIT_SECS)
        return await stock(self, *args, **kwargs)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "async_save", held)
    gate.asked_by = asked_by
    yield gate
    gate.set()


def test_save_returns_before_stock_has_looked_at_the_tree(tmp_path, gate):
    """What the caller changes then changes nothing: as in stock, which has copied it."""
    for manager in managers(tmp_path):
        gate.clear()
        inner = {"numpy": np.arange(6.0), "number": 3, "text": "old"}
        state = {"w": jnp.arange(4.0), "inner": inner, "list": [np.float32(2), None]}
        assert manager.save(0, args=gockpt.GoCkptSave(state))
        inner["numpy"][:] = -1
        inner["number"], inner["text"], inner["more"] = -1, "new", jnp.ones(1)
        state["list"].append(1)
        state["w"].delete()
        assert manager.latest_step() == 0
        gate.set()
        manager.wait_until_finished()
        restored = manager.restore(0, args=gockpt.GoCkptRestore())
        expected = {"numpy": np.arange(6.0), "number": 3, "text": "old"}
        assert_same_arrays(restored["w"], np.arange(4.0, dtype=np.float32))
        assert_same_arrays(restored["inner"], expected)
        assert len(restored["list"]) == 2
        manager.close()
    assert threading.main_thread() not in gate.asked_by


@pytest.fixture
def asked(monkeypatch):
    """Set when stock's handler is asked; what is held back goes nowhere by itself."""
    stock, asked = ocp.PyTreeCheckpointHandler.async_save, threading.Event()

    async def asking(self, *args, **kwargs):
        asked.set()
        return await stock(self, *args, **kwargs)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "async_save", asking)
    monkeypatch.setattr("gockpt_jax.storage.saving.hand_over._HELD_SECS", WAIT_SECS)
    return asked


def is_held(asked):
    """Whether nobody asks: it would take milliseconds."""
    return not asked.wait(0.5)


def step(state):
    return {"w": state["w"] + 1}


def test_stock_is_asked_when_the_next_step_is_on_its_way(tmp_path, asked, monkeypatch):
    """Beside a thread that runs Python the trainer's would wait wherever it gives that away."""
    with gockpt.GoCkptManager(tmp_path) as manager:
        wrapped = manager.wrap(jax.jit(step))
        state = wrapped({"w": jnp.ones(3)})
        begin_update = manager._gockpt_session._begin_update

        def watched(*args):
            assert is_held(asked)
            return begin_update(*args)

        for label in (0, 1):
            asked.clear()
            assert manager.save(label, args=gockpt.GoCkptSave(state))
            with monkeypatch.context() as patch:
                patch.setattr(manager._gockpt_session, "_begin_update", watched)
                state = wrapped(state)
            assert asked.wait(WAIT_SECS / 2), "the step lets go, not the time"


def test_stock_is_asked_where_no_step_follows(tmp_path, asked):
    with gockpt.GoCkptManager(tmp_path) as manager:
        state = manager.wrap(jax.jit(step))({"w": jnp.ones(3)})
        for label in range(3):  # a save waits for the one before, and so does who waits for it
            assert manager.save(label, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1, 2]
        asked.clear()
        assert manager.save(3, args=gockpt.GoCkptSave(state))
        assert is_held(asked)
    assert asked.is_set(), "`close` waits for it, too"


def test_who_waits_within_save_lets_go(tmp_path, asked, monkeypatch):
    """As a signal handler may, or a user's logger, when Orbax has begun to commit."""
    save, took = ocp.CheckpointManager.save, []

    def save_and_wait(manager, *args, **kwargs):
        saved = save(manager, *args, **kwargs)
        start = time.monotonic()
        manager.wait_until_finished()
        took.append(time.monotonic() - start)
        return saved

    with gockpt.GoCkptManager(tmp_path) as manager:
        state = manager.wrap(jax.jit(step))({"w": jnp.ones(3)})
        monkeypatch.setattr(ocp.CheckpointManager, "save", save_and_wait)
        assert manager.save(0, args=gockpt.GoCkptSave(state))
        assert manager.all_steps() == [0]
    assert took[0] < WAIT_SECS / 2


def test_stock_is_asked_at_once_where_nobody_would_let_go(tmp_path, asked):
    """Before a wrapped step has run, by stock's manager, and where saves are synchronous."""
    state = {"w": jnp.ones(3)}
    for manager in managers(tmp_path):
        asked.clear()
        assert manager.save(0, args=gockpt.GoCkptSave(state))
        assert asked.wait(WAIT_SECS / 2)
        manager.close()
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with gockpt.GoCkptManager(tmp_path / "synchronous", options=options) as manager:
        state = manager.wrap(jax.jit(step))(state)
        start = time.monotonic()
        assert manager.save(0, args=gockpt.GoCkptSave(state))
        assert time.monotonic() - start < WAIT_SECS / 2


def test_a_save_that_fails_in_save_lets_go(tmp_path, asked, monkeypatch):
    monkeypatch.setattr("gockpt_jax.storage.saving.hand_over._HELD_SECS", WAIT_SECS)
    with gockpt.GoCkptManager(tmp_path) as manager:
        state = manager.wrap(jax.jit(step))({"w": jnp.ones(3)})
        handler = manager._gockpt_handler
        async_save = handler.async_save

        async def fail(*args, **kwargs):
            await async_save(*args, **kwargs)
            assert not handler.begun.may_be_written.wait(0.0), "it is handed over, and held back"
            raise OSError(errno.EIO, "just now")

        with monkeypatch.context() as patch:
            patch.setattr(handler, "async_save", fail)
            with pytest.raises(gockpt.StorageError, match="just now"):
                manager.save(0, args=gockpt.GoCkptSave(state))
        # A thread that passes an open gate shuts it for a moment.
        assert handler.begun.may_be_written.wait(WAIT_SECS / 2)
        assert not handler.begun._holds
        assert manager.save(1, args=gockpt.GoCkptSave(state))


def test_what_is_never_let_go_begins_all_the_same(monkeypatch):
    """Should Orbax wait in `save` for what it was given, the trainer does not wait for ever."""
    monkeypatch.setattr("gockpt_jax.storage.saving.hand_over._HELD_SECS", 0.01)

    async def begin():
        return ocp.future.NoopFuture()

    with of_orbax.own_operation("one without a directory"):
        HandedOver(begin, threading.Event()).result(WAIT_SECS)


def test_items_of_one_save_are_handed_over_side_by_side(tmp_path, gate):
    trees = {"a": {"x": jnp.arange(4.0)}, "b": {"y": jnp.ones((3, 2)), "n": np.arange(3)}}
    saves = {name: gockpt.GoCkptSave(tree) for name, tree in trees.items()}
    with gockpt.GoCkptManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.Composite(**saves))
        gate.set()
        targets = {name: gockpt.GoCkptRestore(tree) for name, tree in trees.items()}
        restored = manager.restore(0, args=ocp.args.Composite(**targets), verify=True)
    assert_same_arrays(dict(restored.items()), trees)
    assert len(set(gate.asked_by)) == 2


@pytest.mark.parametrize(
    ("of_one_save", "found"),
    [
        (lambda: of_orbax.own_operation("of one save"), of_orbax.operation),
        (lambda: collecting(STATS), lambda: collected_here() is STATS),
    ],
)
def test_an_interrupt_leaves_nothing_of_one_save_to_what_follows(of_one_save, found):
    """All that others saved later on this thread belonged to that save, and failed with it."""
    there = (of_orbax.__file__, write_budget.__file__, contextlib.__file__)
    before = found()
    for place in itertools.count(1):
        signals = Signals([place], inside=there)
        with contextlib.suppress(KeyboardInterrupt), signals.coming(), of_one_save():
            pass
        assert found() == before, signals.came_at
        if not signals.came_at:
            break
    assert place > 3


@pytest.mark.parametrize("is_in_loop", [False, True])
def test_saves_of_two_managers_wait_for_their_own_directories(
    tmp_path, gate, monkeypatch, is_in_loop
):
    """Orbax tells what waits the number of the save that has begun last, whose ever it is."""
    stock, told = ocp.PyTreeCheckpointHandler.async_save, []

    async def telling(self, *args, **kwargs):
        commit = await stock(self, *args, **kwargs)
        told.append(of_orbax.operation())
        return commit

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "async_save", telling)
    first, second = (gockpt.GoCkptManager(tmp_path / name) for name in ("first", "second"))
    take, numbers = first._gockpt_handler.take, []

    def take_beside_another(*args):
        numbers.append(of_orbax.operation())
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(second.save, 0, args=gockpt.GoCkptSave(tree)).result(WAIT_SECS)
        numbers.append(of_orbax.operation())
        return take(*args)

    monkeypatch.setattr(first._gockpt_handler, "take", take_beside_another)
    tree = {"w": jnp.ones(3)}

    async def save_in_loop():
        return first.save(0, args=gockpt.GoCkptSave(tree))

    with first, second:
        if is_in_loop:  # Orbax takes the state on another thread
            assert asyncio.run(save_in_loop())
        else:
            assert first.save(0, args=gockpt.GoCkptSave(tree))
        gate.set()
        for manager in (first, second):
            manager.wait_until_finished()
            assert_same_arrays(manager.restore(0), tree)
    assert numbers[0] == numbers[1]
    assert numbers[0] in told
    assert len(set(told)) == 2


REFUSED = {
    "empty array": {"w": jnp.ones(3), "x": jnp.ones((0, 2))},
    "empty numpy": {"w": jnp.ones(3), "x": np.ones((2, 0))},
    "no handler": {"w": jnp.ones(3), "x": object()},
    "no handler for numbers": {"w": jnp.ones(3), "x": 1j},
    "no leaves": {},
}


@pytest.mark.parametrize("tree", REFUSED)
def test_what_stock_refuses_in_save_is_refused_there(tmp_path, tree):
    with ocp.CheckpointManager(tmp_path / "by_stock") as manager, pytest.raises(ValueError):
        manager.save(0, args=ocp.args.PyTreeSave(REFUSED[tree]))
    for manager in managers(tmp_path):
        with pytest.raises(ValueError, match="`save`"):
            manager.save(0, args=gockpt.GoCkptSave(REFUSED[tree]))
        assert manager.save(1, args=gockpt.GoCkptSave({"w": jnp.ones(3)}), force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [1]
        manager.close()


def test_save_args_that_do_not_fit_are_refused_in_save(tmp_path):
    args = gockpt.GoCkptSave({"w": jnp.ones(3)}, save_args={"v": ocp.SaveArgs()})
    for manager in managers(tmp_path):
        with pytest.raises(ValueError, match="key"):
            manager.save(0, args=args)
        manager.close()


def test_save_args_that_fit_are_heeded(tmp_path, gate):
    cast = {"w": ocp.SaveArgs(dtype=np.dtype(np.float16)), "n": ocp.SaveArgs()}
    gate.set()
    with gockpt.GoCkptManager(tmp_path) as manager:
        tree = {"w": jnp.full(3, 1.5), "n": np.arange(3)}
        manager.save(0, args=gockpt.GoCkptSave(tree, save_args=cast))
        restored = manager.restore(0)
    assert_same_arrays(restored, {"w": np.full(3, 1.5, np.float16), "n": np.arange(3)})
    assert threading.main_thread() not in gate.asked_by


@pytest.mark.parametrize("users", [["a", 1], "text", 0, {"gockpt_jax": "mine"}])
def test_metadata_that_the_audit_cannot_be_put_beside_stays_the_users(users):
    args = gockpt.GoCkptSave({"w": 1.0}, custom_metadata=users)
    assert as_tree_save(args, args.item, {"chunks": 1}).custom_metadata == users


def test_what_stocks_arguments_say_beside_the_tree_is_kept():
    args = ocp.args.PyTreeSave({"w": 1.0}, ocdbt_target_data_file_size=2**20)
    made = as_tree_save(args, {"w": 2.0}, {"chunks": 1})
    assert made.ocdbt_target_data_file_size == 2**20
    assert made.custom_metadata == {"gockpt_jax": {"audit": {"chunks": 1}}}


def test_what_was_taken_knows_its_arrays_and_its_failure():
    """Its other leaves hold no bytes of ours; what could not be taken has failed without any."""
    array, error = jnp.ones(3), OSError("gone")
    landed, failed = concurrent.futures.Future(), concurrent.futures.Future()
    landed.set_result(np.ones(3))
    failed.set_exception(error)
    box, pending = (slice(0, 3),), None
    tree = {"n": np.ones(2), "text": "x", "no": None}
    for futures, told in (([landed], None), ([landed, failed], error)):
        arrays = [HostArray.like(array, [HostShard(box, data)]) for data in futures]
        taken = TakenSave(ocp.args.PyTreeSave({**tree, "w": arrays}), pending)
        assert taken.arrays == arrays
        assert taken.failure() is told
        taken.release()
        assert taken.failure() is None
    assert TakenSave(ocp.args.PyTreeSave({}), pending, error).failure() is error


def save_and_wait(manager, args):
    manager.save(0, args=args)
    manager.wait_until_finished()


@pytest.mark.parametrize("is_handed_over", [True, False])
@pytest.mark.parametrize(
    ("owner", "name"), [(ocp.PyTreeCheckpointHandler, "async_save"), (StateHandler, "finalize")]
)
def test_what_stock_does_not_begin_or_end_is_told_and_given_back(
    tmp_path, monkeypatch, owner, name, is_handed_over
):
    begun = []

    def refuses(*args, **kwargs):
        begun.append(collected_here())
        raise OSError("the disk is gone")

    handler = gockpt.GoCkptHandler()
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        monkeypatch.setattr(owner, name, refuses)
        array = jnp.ones(3)
        args = gockpt.GoCkptSave({"w": array} if is_handed_over else array)
        with pytest.raises(OSError, match="the disk is gone"):
            save_and_wait(manager, args)
        resources = handler._gockpt_session.resources
        resources.worker.wait_until_idle()
        assert resources.host.used_bytes == 0
        assert "the disk is gone" in handler.last_report.error
        if name == "async_save":
            assert [stats.is_given_up for stats in begun] == [True], "what has begun goes on"


def test_a_report_tells_of_the_bytes_of_all_items_and_of_the_longest_write(tmp_path):
    record = SaveRecord(kind="snapshot", reason="")
    for secs, nbytes in ((3.0, 5), (2.0, 7)):
        stats = WriteStats()
        stats.write_secs, stats.written_bytes = secs, nbytes
        Written([], record, stats, tmp_path).result()
    assert (record.write_secs, record.written_bytes) == (3.0, 12)


def test_all_writes_of_an_item_are_waited_for_when_one_has_failed(tmp_path):
    """The next save may be of its label, and so in its place."""
    failed, waited = concurrent.futures.Future(), []
    failed.set_exception(OSError("the first"))

    class Writing:
        def result(self, timeout=None):
            waited.append(timeout)
            raise OSError("the second")

    written = Written(
        [failed, Writing()], SaveRecord(kind="snapshot", reason=""), WriteStats(), "x"
    )
    with pytest.raises(gockpt.StorageError, match="the first"):
        written.result()
    assert waited == [None]
    assert written.has_ended


def test_whether_writes_have_ended_where_nobody_has_waited_for_them(tmp_path):
    """A chain of Orbax's futures that is given no time has ended none of them."""
    writes = concurrent.futures.Future()
    chain = ocp.future.ChainedFuture([writes, ocp.future.NoopFuture()], lambda: None)
    written = Written([chain], SaveRecord(kind="snapshot", reason=""), WriteStats(), tmp_path)
    assert not written.has_ended
    with pytest.raises(TimeoutError):
        written.wait(0.01)
    writes.set_result(None)
    assert written.has_ended
    refused = concurrent.futures.Future()
    refused.set_exception(OSError(errno.ETIMEDOUT, "by the storage"))  # a `TimeoutError`
    assert Written([refused], SaveRecord(kind="snapshot", reason=""), WriteStats(), "x").has_ended


def test_what_is_cancelled_does_not_begin_and_what_has_begun_goes_on(monkeypatch):
    may_begin, now, began = threading.Event(), threading.Event(), []
    now.set()

    async def begin():
        began.append(threading.current_thread())
        return ocp.future.NoopFuture()

    with monkeypatch.context() as patch:
        patch.setattr(
            "orbax.checkpoint._src.futures.future.wait_for_signals",
            lambda *_, **__: may_begin.wait(WAIT_SECS),
        )
        waits = HandedOver(begin, now)
        assert waits.may_begin
        waits.cancel()
        assert (waits.may_begin, waits.will_not_begin) == (False, True)
        waits.wait(None)  # for nothing
        may_begin.set()  # its directory comes after all
        with pytest.raises(RuntimeError, match="its save has failed"):
            waits.result()
    assert began == []
    with of_orbax.own_operation("one without a directory"):
        writes = HandedOver(begin, now)
        later = threading.Event()
        held, given_up = (HandedOver(begin, later) for _ in range(2))
    writes.result()
    writes.cancel()
    assert (writes.may_begin, writes.will_not_begin, len(began)) == (False, False, 1)
    given_up.cancel()
    assert (held.may_begin, given_up.will_not_begin, len(began)) == (True, True, 1)
    later.set()
    held.result()
    with pytest.raises(RuntimeError, match="its save has failed"):
        given_up.result()
    assert len(began) == 2


def test_what_is_made_when_it_is_run_ends_as_any_coroutine():
    ended_by = []

    async def begin():
        try:
            await asyncio.sleep(0)
        except BaseException as error:
            ended_by.append(type(error))
            raise

    for end in (lambda begun: begun.throw(KeyboardInterrupt()), _MadeWhenRun.close):
        begun = _MadeWhenRun(begin)
        begun.send(None)
        with contextlib.suppress(KeyboardInterrupt):
            end(begun)
    assert ended_by == [KeyboardInterrupt, GeneratorExit]


class Counter:
    """A mutable leaf, of which only its own handler knows what a copy is."""

    def __init__(self, value):
        self.value = value


class CounterHandler(ocp.type_handlers.ScalarHandler):
    """Takes the value when it is asked to."""

    def __init__(self):
        super().__init__()
        self.taken = []

    def typestr(self):
        return "Counter"

    async def serialize(self, values, infos, args=None):
        self.taken += [x.value for x in values]
        return await super().serialize([x.value for x in values], infos, args)


def test_a_leaf_that_only_its_handler_knows_is_taken_in_save(tmp_path, gate):
    counters = CounterHandler()
    arrays = ocp.type_handlers.ArrayHandler()
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (Counter, counters)
    )
    gate.set()
    handler = gockpt.GoCkptHandler(type_handler_registry=registry)
    with ocp.CheckpointManager(tmp_path, item_handlers=handler) as manager:
        counter = Counter(7)
        manager.save(0, args=gockpt.GoCkptSave({"w": jnp.ones(3), "count": counter}))
        counter.value = 8
    assert gate.asked_by == [threading.main_thread()]
    assert counters.taken == [7]
