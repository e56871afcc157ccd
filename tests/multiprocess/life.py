"""What one process of a job does in a life that was drawn (`drawn.py`), with what it must assert.

Beside the run with windows goes one without, by the user's own step: each state that is given to
`save` must be that one's, bit for bit, and is kept for whoever reads the checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gockpt_jax as gockpt
from gockpt_jax.storage.saving import state_handler
from gockpt_jax.storage.saving.written import Written
from gockpt_jax.storage.writing import array_handler, leaf_writer
from gockpt_jax.transfer import staging
from gockpt_jax.window import early, seal
from gockpt_jax.window.host_budget import HostBudget

from .drawn import Fault, JobLife
from .scenarios import replaced, say, small_slices
from .training import Loop, abstract, shards_of

STAGES: dict[str, tuple[Any, str]] = {
    "land": (early.EarlyChunks, "land_block"),
    "finish": (early.EarlyChunks, "finish"),
    "write": (leaf_writer, "_check_data"),
    "begin": (array_handler, "collected_here"),
    "written": (Written, "result"),
    "finalize": (state_handler.StateHandler, "finalize"),
    "stage": (staging, "stage"),
    "admit": (HostBudget, "admit_save"),
    "seal": (seal.Seal, "take"),
}
SLOW_STAGES = ("land", "write", "written", "finalize", "seal")
TIMEOUT_SECS = 40  # of Orbax, for processes that do not come


class InjectedError(OSError):
    """What a process fails of."""


@dataclasses.dataclass
class Fate:
    """The fault of a life: it comes once, in one process."""

    fault: Fault | None
    loop: Loop
    has_come: bool = False

    def at(self, place: str) -> None:
        """This process comes to a place; it may not come further."""
        fault = self.fault
        if fault is None or self.has_come or fault.place != place:
            return
        if jax.process_index() != fault.process or self.loop.label < fault.label:
            return
        self.has_come = True
        say("fault", self.loop.label)
        if fault.deed == "raises":
            raise InjectedError(f"injected at `{place}`")
        os.kill(os.getpid(), signal.SIGKILL if fault.deed == "dies" else signal.SIGTERM)


def life(directory: Path) -> None:
    """Lives a job that `life.json` tells of."""
    told = json.loads((directory.parent / "life.json").read_text())
    job = JobLife.of(told["job"])
    with small_slices() if job.small_slices else contextlib.nullcontext():
        loop = Loop(
            Path(told["run"]), job.mesh, layout=job.layout,
            window=gockpt.WindowOptions(audit=gockpt.Audit(fraction=1.0), **job.window),
            async_options=ocp.options.AsyncOptions(timeout_secs=TIMEOUT_SECS), **job.manager,
        )  # fmt: skip
        # A kind of call of its own, where the event is a longer batch.
        loop.rows_of = lambda label: 48 if job.events.get(label) == "longer" else 24
        with watched(Fate(job.fault, loop), job.slow) as fate:
            Lived(job, loop, fate).lead()


@contextlib.contextmanager
def watched(fate: Fate, slow: int) -> Iterator[Fate]:
    """Each stage that the process comes to may be where the fault is, or be slow."""
    rng = random.Random(jax.process_index())

    def through(place: str, old: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(old)
        def new(*args: Any, **kwargs: Any) -> Any:
            if slow == jax.process_index() and place in SLOW_STAGES and rng.random() < 0.3:
                time.sleep(rng.uniform(0, 0.2))  # nothing waits for this time to be over
            fate.at(place)
            return old(*args, **kwargs)

        return new

    with contextlib.ExitStack() as stack:
        for place, (owner, name) in STAGES.items():
            new = through(place, getattr(owner, name))
            stack.enter_context(replaced(owner, name, new, only_on=jax.process_index()))
        yield fate


class Lived:
    """A job's life in this process.

    Args:
      job: What it does.
      loop: With windows.
      fate: What goes wrong.
    """

    def __init__(self, job: JobLife, loop: Loop, fate: Fate):
        self._job, self._loop, self._fate = job, loop, fate
        self._plain = loop.state  # of the run without windows
        self._kept = Path(f"{loop.directory}_kept")
        self._accepted: list[int] = []
        self._failures: list[tuple[int, str]] = []

    def lead(self) -> None:
        """Lives it, and says what is to be found."""
        manager, loop = self._loop.manager, self._loop
        self._kept.mkdir(exist_ok=True)
        self._resume()
        self._plain = _copied(loop.state)
        while loop.label < self._job.last:
            if self._one_step():
                break
        else:
            self._hear_of_preemption()
        self._guarded(manager.wait_until_finished)
        self._guarded(manager.wait_until_finished)  # that of a save that waited
        self._tell()
        manager.close()
        resources = loop.session.resources
        assert resources.device.used_bytes == 0 == resources.host.used_bytes

    def _resume(self) -> None:
        newest = self._loop.manager.latest_step()
        self._loop.label = self._job.first
        if newest is None:
            return
        target = gockpt.GoCkptRestore(abstract(self._tree(self._loop.state)))
        restored = self._loop.manager.restore(newest, args=target)
        self._loop.state = restored["train"]
        np.savez(self._kept / f"restored_{newest}_{jax.process_index()}.npz", **shards_of(restored))

    def _one_step(self) -> bool:
        """An update, its event and its save; whether this was the last before a preemption."""
        loop, manager = self._loop, self._loop.manager
        label, event = loop.label, self._job.events.get(loop.label, "")
        self._guarded(functools.partial(self._fate.at, "loop"))
        if event == "edited":
            loop.state, self._plain = (_edited(x) for x in (loop.state, self._plain))
        elif event == "expected":
            manager.expect_save(in_steps=1 + label % 4)
        batch = loop.batch()
        self._plain, _ = loop.users_step(self._plain, batch)
        while loop.label == label:
            self._guarded(loop.update)
        is_forced = event == "forced" and label not in manager.all_steps()
        self._keep(label)  # what `should_save` says now a save that fails meanwhile may change
        self._guarded(functools.partial(self._save, label, force=is_forced))
        if event == "waited" and not self._guarded(manager.wait_until_finished):
            if label not in manager.all_steps():  # it was this one: once more
                self._guarded(functools.partial(self._save, label, force=True))
        elif event == "restored":
            self._go_back()
        return self._is_preempted(label)

    def _is_preempted(self, label: int) -> bool:
        reached = bool(self._loop.manager.reached_preemption(label))
        if reached:
            say("preempted", label)
        return reached

    def _hear_of_preemption(self) -> None:
        """Trains on until what one was told has come around: JAX looks for it once a second."""
        fault, loop = self._job.fault, self._loop
        if fault is None or fault.deed != "told":
            return
        while not self._is_preempted(loop.label):
            self._guarded(loop.update)

    def _go_back(self) -> None:
        """To the newest checkpoint; all know the same one."""
        manager = self._loop.manager
        self._guarded(manager.wait_until_finished)
        self._guarded(manager.wait_until_finished)
        newest = manager.latest_step()
        if newest is None:
            return
        target = gockpt.GoCkptRestore(abstract(self._tree(self._loop.state)))
        restored = manager.restore(newest, args=target)
        if newest >= self._job.first:  # other jobs have other shards
            with np.load(self._kept / f"{newest}_{jax.process_index()}.npz") as kept:
                _assert_same(shards_of(restored), kept)
        self._loop.state = restored["train"]
        self._plain = _copied(restored["train"])

    def _save(self, label: int, *, force: bool) -> None:
        tree = gockpt.GoCkptSave(self._tree(self._loop.state))
        if self._loop.manager.save(label, args=tree, force=force):
            self._accepted.append(label)

    def _keep(self, label: int) -> None:
        """Leaves the state on disk that a checkpoint of this label must hold."""
        plain = shards_of(self._tree(self._plain))
        file = self._kept / f"{label}_{jax.process_index()}.npz"
        if not file.exists():
            np.savez(file.with_suffix(".tmp.npz"), **plain)
            os.rename(file.with_suffix(".tmp.npz"), file)
        _assert_same(shards_of(self._tree(self._loop.state)), plain)

    def _tree(self, state: Any) -> dict[str, Any]:
        """What is saved: the state and, if the job has it, a leaf that is not on all processes."""
        tree = {"train": state}
        if not self._job.has_part:
            return tree
        count = jax.process_count()
        devices = [d for d in jax.devices() if d.process_index < count - 1 or count < 3]
        sharding = NamedSharding(Mesh(np.array(devices), ("part",)), PartitionSpec("part"))
        whole = np.full((24, 3), self._loop.label, np.float32)
        part = jax.make_array_from_callback(
            whole.shape, sharding, lambda i: whole[i], dtype=whole.dtype
        )
        return tree | {"part": part}

    def _guarded(self, deed: Callable[[], Any]) -> bool:
        """Does something that tells of a save that failed, and remembers; whether none had."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", gockpt.SaveFailedWarning)
            try:
                deed()
            except (gockpt.ProcessError, gockpt.StorageError, gockpt.ReplayError) as error:
                if self._is_lethal:
                    raise
                self._failures.append((self._loop.label, f"{type(error).__name__}: {error}"))
                return False
        told = [str(w.message) for w in caught if w.category is gockpt.SaveFailedWarning]
        self._failures += [(self._loop.label, text) for text in told]
        return not told

    @property
    def _is_lethal(self) -> bool:
        return self._job.fault is not None and self._job.fault.is_lethal

    def _tell(self) -> None:
        reports = {r.step: r for r in self._loop.manager.reports}  # the last one of each label
        dropped = ("skipped", "superseded")
        say("came", self._fate.has_come)
        say("outcome", json.dumps(
            sorted((s, r.kind if r.kind in dropped else "lost" if r.error else "taken")
                   for s, r in reports.items())
        ))  # fmt: skip
        say("kinds", sorted((s, r.kind, r.window_steps) for s, r in reports.items()))
        say("early", sum(r.early_bytes for r in reports.values()))
        good = [
            s for s in dict.fromkeys(self._accepted)
            if reports[s].kind not in dropped and reports[s].error is None
        ]  # fmt: skip
        say("good", json.dumps(good))
        say("failures", json.dumps(self._failures))


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _edited(state: Any) -> Any:
    """A bias is changed by hand; the optimizer's arrays become others, of the same values."""
    params = state["params"] | {"b": _halved(state["params"]["b"])}
    return state | {"params": params, "opt": _copied(state["opt"])}


@jax.jit
def _halved(x: jax.Array) -> jax.Array:
    return x * 0.5


def _assert_same(got: dict[str, np.ndarray], want: Any) -> None:
    assert sorted(got) == sorted(want)
    differing = [key for key, shard in got.items() if shard.tobytes() != want[key].tobytes()]
    assert not differing, differing
