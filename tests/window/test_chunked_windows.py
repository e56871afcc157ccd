"""Rows of one leaf leave at different steps, and the checkpoint is the state all the same."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gockpt_jax as gockpt
from gockpt_jax import GoCkptManager, GoCkptSave, WindowOptions
from gockpt_jax.replay.engine import Replayer
from gockpt_jax.storage.files.aligned import BLOCK_BYTES
from gockpt_jax.transfer import block, layout, replicas
from gockpt_jax.transfer.chunks import Chunk, Source
from gockpt_jax.transfer.pull import HostChunk
from gockpt_jax.window import units
from gockpt_jax.window.early import EarlyChunks
from gockpt_jax.window.landed import LandedLeaf
from gockpt_jax.window.units import units_of

P = PartitionSpec
STEPS = 5
THOROUGH = gockpt.Audit(fraction=1.0)
MESH = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def place(spec: PartitionSpec | None) -> Any:
    if spec is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(MESH, spec)


@dataclasses.dataclass
class Model:
    """One parameter with a momentum, laid out on their own; the gradient is sine-like."""

    shape: tuple[int, ...]
    parameter: PartitionSpec | None
    momentum: PartitionSpec | None

    def state(self) -> dict[str, jax.Array]:
        values = np.random.default_rng(1).standard_normal(self.shape).astype(np.float32)
        return {
            "m": jax.device_put(np.zeros_like(values), place(self.momentum)),
            "w": jax.device_put(values, place(self.parameter)),
        }

    def step(self) -> Any:
        def update(state: Any) -> Any:
            g = jnp.sin(3 * state["w"])
            m = 0.75 * state["m"] + g
            return {"m": m, "w": state["w"] - 0.125 * m}

        placed = {"m": place(self.momentum), "w": place(self.parameter)}
        return jax.jit(update, donate_argnums=0, out_shardings=placed)


MODELS = {
    "one device": Model((64, 48), None, None),
    "prime": Model((101, 7), None, None),
    "prime row": Model((1, 1009), None, None),
    "sharded": Model((64, 48), P("a", "b"), P("a", "b")),
    "replicated": Model((64, 48), P(), P()),
    "replicated, no slices": Model((67, 13), P(), P()),
    "zero-1": Model((64, 48), P(), P(("a", "b"))),
    "zero-1 over columns": Model((32, 64), P("a"), P("a", "b")),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@pytest.fixture(autouse=True)
def small_scale(monkeypatch):
    """Sizes at which small leaves are cut, and replicas share.

    Not smaller: a dozen units of a leaf are more than a window has blocks, and each chunk is an
    output of a program to compile.
    """
    monkeypatch.setattr(units, "MIN_CHUNK_BYTES", 256)
    monkeypatch.setattr(layout, "MIN_SLICE_BYTES", 64)
    monkeypatch.setattr(replicas, "MIN_SLICE_ELEMENTS", 16)
    monkeypatch.setattr(layout, "LARGE_BYTES", 256)
    monkeypatch.setattr(block, "_made", functools.cache(block.Block))


class Loop:
    """A loop under a manager, with a window before each save."""

    def __init__(self, model, directory, audit=THOROUGH):
        options = ocp.CheckpointManagerOptions(max_to_keep=None)
        window = WindowOptions(steps=STEPS, audit=audit)
        self.manager = GoCkptManager(directory, options=options, window=window)
        self.step = self.manager.wrap(model.step())
        self.state, self.version = model.state(), 0
        for _ in range(2):
            self.update()

    def update(self):
        self.state, self.version = self.step(self.state), self.version + 1

    def save(self):
        self.manager.expect_save(in_steps=STEPS)
        for _ in range(STEPS):
            self.update()
        given = jax.tree.map(lambda x: np.array(jnp.copy(x)), self.state)
        self.manager.save(self.version, args=GoCkptSave(self.state))
        self.manager.wait_until_finished()
        saved = self.manager.restore(self.version)
        report = self.manager.last_report
        assert (report.kind, report.window_steps) == ("window", STEPS)
        return {k: np.array_equal(np.asarray(saved[k]), given[k]) for k in given}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.manager.close()


@pytest.mark.sampled
@every_model
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
def test_checkpoint_is_the_state(model, cut, tmp_path, monkeypatch):
    if not cut:
        monkeypatch.setattr(units, "MIN_CHUNK_BYTES", 2**20)
    with Loop(model, tmp_path) as loop:
        assert loop.save() == {"m": True, "w": True}
        assert loop.save() == {"m": True, "w": True}
        report = loop.manager.last_report
        program = loop.step.program
        shared = loop.manager._gockpt_session.resources.replicas
        found = units_of(program.cut, [loop.state["m"], loop.state["w"]], shared)
        assert report.early_bytes > 0
        assert report.audit.max_ulps == 0
        assert (len(found) > len(program.cut.groups)) == cut


def test_a_model_of_one_leaf_has_even_blocks(tmp_path):
    with Loop(MODELS["one device"], tmp_path) as loop:
        landed = []
        land = EarlyChunks.land_block

        def noting(self, leaves, chunks, pull):
            landed.append(sum(c.num_bytes for c in chunks))
            return land(self, leaves, chunks, pull)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EarlyChunks, "land_block", noting)
            assert loop.save() == {"m": True, "w": True}
        assert len(landed) == STEPS - 1
        assert max(landed) <= 1.1 * min(landed)
        assert sum(landed) == loop.manager.last_report.early_bytes


# What can go wrong with rows is found, by the audit and by the comparison.


def rows_swapped(patch):
    """Two units of one leaf change places as they land."""
    land = EarlyChunks.land_block

    def faulty(self, leaves, chunks, pull):
        class Swapped:
            def result(_):
                found = pull.result()
                same = [n for n, c in enumerate(chunks) if c.size == chunks[0].size]
                first, *_, last = (n for n in same if leaves[n][1] == leaves[same[0]][1])
                assert first != last
                found[first], found[last] = found[last], found[first]
                return found

        return land(self, leaves, chunks, Swapped())

    patch.setattr(EarlyChunks, "land_block", faulty)


def _updates_changed(change):
    def plant(patch):
        apply, fired = Replayer.apply, []

        def faulty(self, shards):
            shards = list(shards)
            if shards and not fired:
                fired.append(True)
                shards[-1] = dataclasses.replace(shards[-1], updates=change(shards[-1].updates))
            apply(self, [s for s in shards if s.updates])

        patch.setattr(Replayer, "apply", faulty)

    return plant


FAULTS = {
    "rows swapped": rows_swapped,
    "a slice of a gradient dropped": _updates_changed(lambda updates: updates[1:]),
    "a slice of a gradient twice": _updates_changed(lambda updates: (*updates, updates[-1])),
}


@pytest.mark.sampled
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("name", ["one device", "zero-1"])
def test_rows_that_go_wrong_are_found(name, fault, tmp_path, monkeypatch):
    for audit in (None, THOROUGH):
        with Loop(MODELS[name], tmp_path / str(bool(audit)), audit) as loop:
            with monkeypatch.context() as patch:
                fault(patch)
                if audit is None:
                    assert not all(loop.save().values())
                else:
                    with pytest.raises(gockpt.AuditError):
                        loop.save()
            assert loop.save() == {"m": True, "w": True}


def test_rows_are_put_together_where_a_disk_can_take_them():
    """Storage writes past the page cache from there, without a copy."""
    source, landing = Source.of(jnp.zeros((16, 4))), LandedLeaf()
    for start in (32, 0):
        rows = HostChunk((slice(None),) * 2, np.arange(start, start + 32, dtype=np.float32))
        landing.put(Chunk(source, start, start + 32), [rows])
    assert landing.is_complete
    assert landing.flat[0].tolist() == list(range(64))
    assert landing.flat[0].ctypes.data % BLOCK_BYTES == 0
