"""How long the call of `save` holds the trainer's thread: ours beside stock's, in turns.

All save the same tree, at the same steps of the same training; each call finds all saves before it
committed, so none waits for storage, nor for a thread that writes another's.
"""

import contextlib
import dataclasses
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import gockpt_jax as gockpt
from bench.garbage import frozen, full_collections, grown_old
from bench.record import Record, ratios

_STEPS = 4  # from save to save, and K of the windows
_WARM_UP = 3  # saves: the first is no window, and what follows compiles


@dataclasses.dataclass
class _Trainer:
    """A training loop with a manager.

    Attributes:
      manager: Ours or stock's.
      arguments: What makes the state an argument of `save`.
      step: The jitted step, wrapped or not.
      state: Its state.
      calls: Seconds of each call that saved.
      idle: Of each call that did not.
      cpu: Of each call that saved, the thread's own processor time.
      with_step: Of each call that saved, with the call of the step behind it.
      has_stepped: Whether the next step has been made.
    """

    manager: Any
    arguments: Any
    step: Any
    state: Any
    calls: list[float] = dataclasses.field(default_factory=list)
    idle: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    with_step: list[float] = dataclasses.field(default_factory=list)
    has_stepped: bool = False

    def run(self, label: int) -> None:
        """One step, and the call that follows it; behind a save the next step, and the commit."""
        if not self.has_stepped:
            self.state = jax.block_until_ready(self.step(self.state))
        if isinstance(self.manager, gockpt.GoCkptManager):
            self.manager._gockpt_session.resources.worker.wait_until_idle()
        args = self.arguments(self.state)
        wall, cpu = time.perf_counter(), time.thread_time()
        saved = self.manager.save(label, args=args)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        self.has_stepped = saved
        if saved:
            start = time.perf_counter()
            self.state = self.step(self.state)
            with_step = wall + time.perf_counter() - start
            jax.block_until_ready(self.state)
            self.manager.wait_until_finished()  # nor does another's save run beside it
        if label < _WARM_UP * _STEPS:
            return
        if saved:
            self.calls.append(wall)
            self.cpu.append(cpu)
            self.with_step.append(with_step)
        else:
            self.idle.append(wall)


def measure(record: Record, model: Any, saves: int) -> None:
    """Adds the figures to a record.

    Args:
      record: Takes them.
      model: Makes a state and its donating jitted step.
      saves: How many calls of each.
    """
    with tempfile.TemporaryDirectory() as directory:
        trainers = {name: _trainer(name, Path(directory) / name, *model()) for name in _NAMES}
        labels = _STEPS * (_WARM_UP + saves)
        for label in range(labels):
            for trainer in trainers.values():
                trainer.run(label)
        _add(record, trainers)
        alone = range(labels, labels + _STEPS * saves)
        for name, trainer in trainers.items():
            _add_collections(record, _NAMES[name], trainer, alone)
        later = range(alone.stop, alone.stop + len(alone))
        with frozen():
            took = "full_collection_frozen_ms"
            _add_collections(record, "_frozen", trainers["snapshot"], later, took)
        for trainer in trainers.values():
            trainer.manager.close()


def _add(record: Record, trainers: dict[str, _Trainer]) -> None:
    leaves = len(jax.tree.leaves(trainers["stock"].state))
    kinds = {r.kind for r in trainers["window"].manager.reports[_WARM_UP:]}
    assert kinds == {"window"}, kinds
    for name, trainer in trainers.items():
        suffix = _NAMES[name]
        record.samples[f"save_call{suffix}_ms"] = [1e3 * secs for secs in trainer.calls]
        record.samples[f"save_and_step{suffix}_ms"] = [1e3 * secs for secs in trainer.with_step]
        record.samples[f"save_call_cpu{suffix}_ms"] = [1e3 * secs for secs in trainer.cpu]
        record.samples[f"save_idle{suffix}_us"] = [1e6 * secs for secs in trainer.idle]
    stock = trainers["stock"].calls
    record.samples["save_call_ratio"] = ratios(trainers["window"].calls, stock)
    held_back = ratios(trainers["snapshot"].with_step, trainers["beside"].with_step)
    record.samples["held_back_ratio"] = held_back
    record.notes.append(
        f"save_call_ms: a call of `save` that ends a window of {_STEPS} steps, of {leaves} leaves;"
        " save_call_snapshot_ms: one without a window; save_call_stock_ms: asynchronous stock"
        " Orbax, same tree, in turns; before a call our worker is idle, as where steps are long;"
        " save_call_ratio: the first over stock's; save_call_cpu: of"
        " it, the thread's own processor time; save_idle: a call that saves nothing;"
        " save_and_step: with the call of the step behind it; _beside: of a snapshot whose writing"
        " begins in `save`, not when that step is on its way; held_back_ratio:"
        " save_and_step_snapshot_ms over save_and_step_beside_ms."
    )


def _add_collections(
    record: Record, suffix: str, trainer: _Trainer, labels: range,
    took: str = "full_collection_ms",
) -> None:  # fmt: skip
    """Counts the collections of all garbage while one of them trains alone."""
    gc.collect()
    with full_collections() as secs, grown_old() as counts:
        for label in labels:
            trainer.run(label)
    saves = len(labels) / _STEPS
    record.samples[f"full_collections_per_save{suffix}"] = [len(secs) / saves]
    record.samples[f"grown_old_per_save{suffix}"] = [sum(counts) / saves]
    if secs:
        record.samples.setdefault(took, []).extend(1e3 * each for each in secs)
    if not suffix:
        record.notes.append(
            "full_collections_per_save: how often Python's garbage collector looked at all objects "
            f"of the process, of which there were {len(gc.get_objects())}, while that way trained "
            f"alone, {_STEPS} steps for a save; grown_old_per_save: the objects that came to its "
            "oldest generation meanwhile, of steps and of the save (where they are a quarter of "
            "the rest it looks at all); full_collection_ms: each of these, of all ways; "
            "..._frozen: a snapshot's, after `gc.freeze()`."
        )


_NAMES = {"window": "", "snapshot": "_snapshot", "beside": "_beside", "stock": "_stock"}


def _trainer(name: str, directory: Path, state: Any, update: Any) -> _Trainer:
    options = ocp.CheckpointManagerOptions(save_interval_steps=_STEPS, max_to_keep=1)
    if name == "stock":
        stock = ocp.CheckpointManager(directory, options=options)
        return _Trainer(stock, ocp.args.StandardSave, update, state)
    steps = _STEPS if name == "window" else 1
    window = gockpt.WindowOptions(steps=steps)
    ours = gockpt.GoCkptManager(directory, options=options, window=window)
    if name == "beside":
        begun = ours._gockpt_handler.begun
        begun.held_back = lambda _: contextlib.nullcontext()  # type: ignore[method-assign]
    return _Trainer(ours, gockpt.GoCkptSave, ours.wrap(update), state)
