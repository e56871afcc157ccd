"""The training programs themselves: what every other test takes for granted about them."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bits import by_path, differing, to_host
from programs import PROGRAMS
from programs.cases import CASES
from programs.common import is_bad

STEPS = 5  # With a bad batch among them, and a step after it.


@dataclasses.dataclass(frozen=True)
class Seen:
    """What was seen of a state when it was new, and whether the next step took its buffers."""

    abstract: Any
    shardings: dict[str, tuple[Any, int]]
    host: dict[str, np.ndarray]
    deleted: dict[str, bool]


def run(name: str, devices: int) -> list[Seen]:
    """Runs a program anew: the first state, and the state after each step."""
    job = PROGRAMS[name].build(devices)
    state, leaves, seen = job.state, [], []
    for n in range(STEPS + 1):
        leaves.append(by_path(state))
        abstract = jax.tree.map(lambda x: (jnp.shape(x), jax.dtypes.result_type(x)), state)
        arrays = {path: x for path, x in leaves[-1].items() if hasattr(x, "sharding")}
        shardings = {path: (x.sharding, x.ndim) for path, x in arrays.items()}
        seen.append((abstract, shardings, to_host(state)))
        if n < STEPS:
            state = job.advance(job.step, state, n)  # it kills the state before
    gone = [{p: x.is_deleted() for p, x in old.items() if hasattr(x, "sharding")} for old in leaves]
    return [Seen(*parts, deleted) for parts, deleted in zip(seen, gone, strict=True)]


def params_of(paths: Iterable[str]) -> set[str]:
    """Return the paths of parameters: of those that carry the name, and have elements."""
    return {path for path in paths if re.search(r"^\W+params\b(?!.*empty)", path)}


def tree_shapes_and_dtypes_are_stable(name: str, devices: int, history: list[Seen]) -> None:
    first, *later = history
    assert all(state.abstract == first.abstract for state in later)


def layout_is_stable(name: str, devices: int, history: list[Seen]) -> None:
    def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return all(a[path][0].is_equivalent_to(*b[path]) for path in a)

    program = PROGRAMS[name]
    first, second, *later = (state.shardings for state in history)
    assert all(same(second, state) for state in later)
    if devices == 1:
        assert all(len(sharding.device_set) == 1 for sharding, _ in second.values())
        return
    assert same(first, second) == ("resharded" not in program.marks)
    # The axes over which leaves are split: none, one of them, both.
    axes = {frozenset(sharding.spec) - {None} for sharding, _ in second.values()}
    kinds: list[tuple[str, ...]] = [(), ("fsdp",), ("tensor",), ("fsdp", "tensor")]
    if "replicated" in program.marks:
        kinds = [()]
    elif "one_axis" in program.marks:
        kinds = [(), ("tensor",)]
    assert axes == {*map(frozenset, kinds)}


def donates_what_it_promises(name: str, devices: int, history: list[Seen]) -> None:
    for state in history[1:-1]:  # The first may have to be moved.
        for path, is_deleted in state.deleted.items():
            if "no_donation" in PROGRAMS[name].marks:
                assert not is_deleted
            elif state.host[path].size > 1:  # Jit drops what the step does not read.
                assert is_deleted


def builds_agree_bit_for_bit(name: str, devices: int, history: list[Seen]) -> None:
    for a, b in zip(history, run(name, devices), strict=True):
        assert not differing(a.host, b.host)


def state_moves_and_stays_finite(name: str, devices: int, history: list[Seen]) -> None:
    program = PROGRAMS[name]
    first, *later = (state.host for state in history)
    moved = set(differing(later[-1], first))
    if "frozen" in program.marks:
        assert moved
        assert moved != first.keys()
    else:
        assert moved >= params_of(first)
    for path, leaf in later[-1].items():
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            assert np.isfinite(leaf.astype(np.float32)).all(), path


def bad_batches_are_skipped_where_marked(name: str, devices: int, history: list[Seen]) -> None:
    del devices
    if "skips" not in PROGRAMS[name].marks:
        return
    hosts = [state.host for state in history]
    for n, (before, after) in enumerate(itertools.pairwise(hosts)):
        moved = params_of(differing(before, after))
        assert moved == (set() if is_bad(n) else params_of(before))


@pytest.mark.parametrize(("name", "devices"), CASES)
def test_what_is_taken_for_granted(name: str, devices: int) -> None:
    """All checks on one run: compiling a program is what takes long."""
    history = run(name, devices)
    for check in (
        tree_shapes_and_dtypes_are_stable,
        layout_is_stable,
        donates_what_it_promises,
        builds_agree_bit_for_bit,
        state_moves_and_stays_finite,
        bad_batches_are_skipped_where_marked,
    ):
        check(name, devices, history)
