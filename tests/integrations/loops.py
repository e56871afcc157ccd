"""What the toy programs share: each runs with and without gockpt_jax, and is compared.

A program is a function `train(directory, gockpt)`, where `gockpt` is what it would import:
`gockpt_jax`, or the same names over stock Orbax, where `wrap` gives back what it was given.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from bits import to_host

import gockpt_jax

WINDOW = gockpt_jax.WindowOptions(steps=3)


@dataclasses.dataclass
class Given:
    """What one accepted save was given, by item: its bits, and a target to restore into."""

    bits: dict[str, list[np.ndarray]]
    targets: dict[str, Any]


class Recording:
    """A manager that keeps what its accepted saves were given."""

    def __init__(self, *args, **kwargs):
        self.given: dict[int, Given] = {}
        super().__init__(*args, **kwargs)

    def save(self, step, *, args, **kwargs):
        accepted = super().save(step, args=self.written(args), **kwargs)
        if accepted:
            self.given[step] = given(args)
        return accepted

    def written(self, args):
        return args


class WithWindows(Recording, gockpt_jax.GoCkptManager):
    """Ours."""


class Without(Recording, ocp.CheckpointManager):
    """Stock Orbax, called as ours is. It decides and records, but writes next to nothing."""

    def __init__(self, directory, *, window=None, item_names=None, **kwargs):
        super().__init__(directory, **kwargs)

    def written(self, args):
        return ocp.args.Composite(label=ocp.args.JsonSave({}))

    def wrap(self, step, **places):
        return step

    def expect_save(self, *, in_steps):
        pass


@dataclasses.dataclass
class Run:
    """What came of a program.

    Attributes:
      manager: Ours, closed.
      snapshots: The labels that were saved as snapshots.
      windows: The labels that were saved through windows.
      final: What the program returned.
      least_early: Of the state, what left early for each window; never none, nor all.
    """

    manager: WithWindows
    snapshots: list[int]
    windows: list[int]
    final: Any

    @property
    def least_early(self) -> float:
        windows = [r for r in self.manager.reports if r.kind == "window"]
        return min(r.early_bytes / r.state_bytes for r in windows)


def run_both(train, directory, **options) -> Run:
    """Runs a program with and without gockpt_jax; checks its training and every checkpoint.

    Programs keep their jitted step from run to run (`functools.cache`), only to compile once.
    """
    managers = []

    def made(kind):
        def make(*args, **kwargs):
            managers.append(kind(*args, **kwargs))
            return managers[-1]

        return make

    save = {WithWindows: gockpt_jax.GoCkptSave, Without: ocp.args.StandardSave}
    final = {
        kind: train(
            directory / kind.__name__,
            types.SimpleNamespace(GoCkptManager=made(kind), GoCkptSave=save[kind]),
            **options,
        )
        for kind in (Without, WithWindows)
    }
    stock, ours = managers
    assert_same(bits(final[WithWindows]), bits(final[Without]))
    assert list(ours.given) == list(stock.given)
    for label, here in ours.given.items():
        for mine, theirs in zip(
            here.bits.values(), stock.given[label].bits.values(), strict=True
        ):  # stock's unnamed item has another name
            assert_same(mine, theirs)
    assert_restores(directory / WithWindows.__name__, ours.given)
    return Run(ours, *by_kind(ours), final[WithWindows])


def by_kind(manager) -> tuple[list[int], list[int]]:
    """The labels of its snapshots, and of its windows; none failed, and all are what they say."""
    reports = manager.reports
    assert [r.error for r in reports] == [None] * len(reports)
    assert [r.step for r in reports] == list(manager.given)
    kinds = ("snapshot", "window")
    snapshots, windows = ([r.step for r in reports if r.kind == kind] for kind in kinds)
    assert all((0 < r.early_bytes < r.state_bytes) == (r.kind == "window") for r in reports)
    return snapshots, windows


def assert_restores(directory, saved: dict[int, Given]) -> None:
    """Stock Orbax restores every checkpoint to what its save was given, bit for bit."""
    names = {name for here in saved.values() for name in here.targets}
    with ocp.CheckpointManager(directory, item_names=sorted(names)) as stock:
        assert stock.all_steps() == list(saved)
        for label, here in saved.items():
            items = {name: ocp.args.StandardRestore(t) for name, t in here.targets.items()}
            restored = stock.restore(label, args=ocp.args.Composite(**items))
            for name in items:
                assert_same(bits(restored[name]), here.bits[name])


def given(args) -> Given:
    """Copies what a save is given, before the next step donates it."""
    composite = isinstance(args, ocp.args.Composite)
    items = {k: v.item for k, v in args.items() if hasattr(v, "item")} if composite else {}
    items = items or {"state": args.item}
    targets = {k: jax.tree.map(ocp.utils.to_shape_dtype_struct, v) for k, v in items.items()}
    return Given({name: bits(item) for name, item in items.items()}, targets)


def bits(tree) -> list[np.ndarray]:
    """The leaves, on the host."""
    with jax.transfer_guard("allow"):
        return list(to_host(tree).values())


def assert_same(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()
