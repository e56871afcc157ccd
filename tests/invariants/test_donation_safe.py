"""Invariant 3: no transfer is started on a buffer that a step may donate, and donation goes on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from alone import owned_shards
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from programs import PROGRAMS
from programs.cases import CASES

import gockpt_jax as gockpt
from gockpt_jax.transfer.block import Block
from gockpt_jax.transfer.pull import HostChunk, Pull
from gockpt_jax.transfer.staging import stage

from . import harness
from .watch import PullWatch, pointers

every_case = pytest.mark.parametrize(("name", "devices"), CASES)
both_devices = pytest.mark.parametrize("devices", harness.DEVICES)


@every_case
def test_no_buffer_of_the_live_state_goes_to_the_host(
    name: str, devices: int, shared: Path
) -> None:
    outcome = harness.outcome(name, devices, shared)
    assert outcome.pulls > 0
    assert outcome.unsafe_pulls == []


@every_case
def test_steps_donate_what_they_donate_without_us(name: str, devices: int, shared: Path) -> None:
    """Leaf by leaf at each of the updates, and its memory is used again for the new state."""
    outcome = harness.outcome(name, devices, shared)
    assert outcome.unlike_buffers == []
    assert (outcome.donated > 0) == ("no_donation" not in PROGRAMS[name].marks)


# The watch can fail.


def pull_as_it_is(array: jax.Array) -> None:
    Pull([s.data for s in owned_shards(array)], list)


def test_watch_notices_a_pull_of_the_state() -> None:
    state = {"w": jnp.arange(6.0), "key": jax.random.key(0), "n": jnp.int32(1)}
    with PullWatch() as watch, watch.live((state,), {}, None):
        for array in stage(list(state.values())):
            pull_as_it_is(array)
        assert (watch.count, watch.unsafe) == (3, [])
        pull_as_it_is(state["w"])
        np.asarray(state["n"])
        pull_as_it_is(jax.random.key_data(state["key"]))  # a copy or not, as JAX likes
    pulled, read = (line.split(" of ")[0] for line in watch.unsafe[:2])
    assert (pulled in ("copy_to_host_async", "device_put"), read) == (True, "np.asarray")
    assert ["['w']" in watch.unsafe[0], "['n']" in watch.unsafe[1]] == [True, True]


@harness.on_both("no_donation")
def test_watch_notices_a_window_that_stages_nothing(
    name: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole run, with the staging copies left out; the step keeps its buffers, so it ends."""

    def stage(block: Block, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return list(arrays)

    def start_pull(block: Block, staged: Sequence[jax.Array]) -> Pull[Any]:
        chunks = zip(block.chunks, staged, strict=True)
        pulls = [pull_rows(array, chunk.start, chunk.stop) for chunk, array in chunks]
        return Pull([], lambda _: [pull() for pull in pulls])

    def pull_rows(array: jax.Array, start: int, stop: int) -> Any:
        shards = (
            [s for s in array.addressable_shards if s.replica_id == 0]
            if array.ndim
            else (array.addressable_shards[:1])
        )
        for shard in shards:
            shard.data.copy_to_host_async()
        return lambda: [
            HostChunk(s.index, np.asarray(s.data).reshape(-1)[start:stop]) for s in shards
        ]

    monkeypatch.setattr(Block, "stage", stage)
    monkeypatch.setattr(Block, "start_pull", start_pull)
    job = PROGRAMS[name].build(devices)
    _, _, outcome = harness.run_with_windows(name, job, harness.SHORT, tmp_path)
    assert outcome.unsafe_pulls


# Staging.

DTYPES = [
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16",
    "uint16", "int32", "uint32", "bool", "complex64", "key",
]  # fmt: skip
PACKED = ["int4", "uint4"]  # two elements to a byte
PLACEMENTS = {
    "single": None,
    "replicated": PartitionSpec(),
    "rows": PartitionSpec("a"),
    "columns": PartitionSpec(None, "b"),
    "both": PartitionSpec("a", "b"),
    "rows over both": PartitionSpec(("a", "b")),
}


def placed(placement: str, shape: tuple[int, ...]) -> jax.sharding.Sharding:
    spec = PLACEMENTS[placement]
    if spec is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[:4][-1])
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    return NamedSharding(mesh, spec if shape else PartitionSpec())


def make_arrays(placement: str, kinds: Sequence[tuple[str, tuple[int, ...]]]) -> list[jax.Array]:
    """Of each dtype and shape one, by one program: each costs its compilation."""

    def make() -> list[jax.Array]:
        return [make_one(dtype, shape) for dtype, shape in kinds]

    def make_one(dtype: str, shape: tuple[int, ...]) -> jax.Array:
        if dtype == "key":
            return jax.random.split(jax.random.key(1), shape) if shape else jax.random.key(1)
        size = int(np.prod(shape, dtype=int))
        return (jnp.arange(size) % 8).reshape(shape).astype(dtype)

    return jax.jit(make, out_shardings=[placed(placement, shape) for _, shape in kinds])()


def make_array(dtype: str, placement: str, shape: tuple[int, ...]) -> jax.Array:
    (array,) = make_arrays(placement, [(dtype, shape)])
    return array


@pytest.mark.parametrize("dtypes", [DTYPES, PACKED], ids=["whole bytes", "packed"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_staging_makes_new_buffers(placement: str, dtypes: list[str]) -> None:
    arrays = make_arrays(placement, [(d, shape) for d in dtypes for shape in ((8, 4), ())])
    staged = stage(arrays)
    again = stage(arrays)
    taken = set().union(*map(pointers, arrays))
    for array, copy, second in zip(arrays, staged, again, strict=True):
        assert pointers(copy), array
        assert not pointers(copy) & taken, array
        assert not pointers(second) & (taken | pointers(copy)), array
        plain = jax.random.key_data(array) if array.dtype == jax.random.key(0).dtype else array
        assert (copy.shape, copy.dtype) == (plain.shape, plain.dtype)
        assert copy.sharding.is_equivalent_to(plain.sharding, plain.ndim)
        assert np.array(copy).tobytes() == np.array(plain).tobytes()
    for array in arrays:
        array.delete()
    assert all(np.array(copy).size for copy in staged), "a copy lives on without its original"


# Retained values that the program was given, not ones that it computed.


@pytest.mark.parametrize("donate", [(0,), (0, 1)], ids=["state", "state and gradients"])
@both_devices
def test_retained_arguments_are_copies(
    donate: tuple[int, ...], devices: int, tmp_path: Path
) -> None:
    """The gradients are an argument, and the parameters' old value is what the average reads."""
    placement = "single" if devices == 1 else "both"

    def step(state: Any, grads: jax.Array) -> Any:
        w, m, average = state
        m = 0.5 * m + grads
        return (w - jnp.tanh(m), m, 0.5 * average + w), 0.5 * grads

    jitted = jax.jit(step, donate_argnums=donate)
    state = tuple(make_array("float32", placement, (8, 4)) + n for n in range(3))
    options = ocp.CheckpointManagerOptions(max_to_keep=None)
    window = gockpt.WindowOptions(steps=4)
    with (
        gockpt.GoCkptManager(tmp_path, options=options, window=window) as manager,
        PullWatch() as watch,
    ):
        wrapped = manager.wrap(jitted)
        manager.expect_save(in_steps=6)
        for n in range(6):
            grads = make_array("float32", placement, (8, 4)) / (n + 3)
            with watch.live((state, grads), {}, wrapped):
                new, _ = wrapped(state, grads)
            assert [x.is_deleted() for x in state] == [True] * 3
            if not grads.is_deleted():
                grads.delete()  # as a user may, at once
            state = new
        wanted = harness.to_host(state)
        manager.save(6, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        (report,) = manager.reports
    assert (report.kind, report.window_steps) == ("window", 4)
    assert report.early_bytes == 2 * 8 * 4 * 4
    assert watch.unsafe == []
    assert harness.differing(harness.restore_with_stock(tmp_path, 6, state), wanted) == []


@both_devices
def test_saves_take_no_donation_from_the_loop(devices: int, tmp_path: Path) -> None:
    """Of the state, of gradients that are retained and returned too, and of what was restored."""
    placement = "single" if devices == 1 else "both"

    def step(state: Any, x: jax.Array) -> Any:
        w, m = state
        grads = jnp.cosh(w + x)
        m = 0.5 * m + grads
        return (w - jnp.tanh(m), m), grads

    jitted = jax.jit(step, donate_argnums=0)
    accumulate = jax.jit(jnp.add, donate_argnums=1)
    x = total = make_array("float32", placement, (8, 4))
    state = (x + 1, x + 2)
    with gockpt.GoCkptManager(tmp_path, window=gockpt.WindowOptions(steps=3)) as manager:
        wrapped = manager.wrap(jitted)
        manager.expect_save(in_steps=5)
        for n in range(7):
            old = state
            state, grads = wrapped(state, x)
            total = accumulate(total, grads)
            assert [a.is_deleted() for a in (*old, grads)] == [True] * 3, n
            if n in (0, 4):
                manager.save(n, args=gockpt.GoCkptSave(state))
        manager.wait_until_finished()
        assert [report.kind for report in manager.reports] == ["snapshot", "window"]
        restored = manager.restore(4, args=gockpt.GoCkptRestore(state))
    jitted(restored, x)
    assert [a.is_deleted() for a in restored] == [True] * 2
