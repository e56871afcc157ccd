"""The training programs themselves: what every other test takes for granted about them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import PROGRAMS, Job
from programs.common import is_bad

STEPS = 5  # With a bad batch among them, and a step after it.

every_program = pytest.mark.parametrize("name", PROGRAMS)
every_devices = pytest.mark.parametrize("devices", [1, 8])


def states(job: Job) -> Iterator[Any]:
    """Yield the first state, and then the state after each step; a step kills the one before."""
    state = job.state
    yield state
    for n in range(STEPS):
        state = job.advance(job.step, state, n)
        yield state


def by_path(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def to_host(tree: Any) -> dict[str, np.ndarray]:
    """Return a copy of every leaf by its path; of a key, its numbers."""

    def host(leaf: Any) -> np.ndarray:
        is_key = jnp.issubdtype(jax.dtypes.result_type(leaf), jax.dtypes.prng_key)
        return np.array(jax.random.key_data(leaf) if is_key else leaf)

    return {path: host(leaf) for path, leaf in by_path(tree).items()}


def differing(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> set[str]:
    assert a.keys() == b.keys()
    return {path for path in a if a[path].tobytes() != b[path].tobytes()}


def params_of(paths: Iterable[str]) -> set[str]:
    """Return the paths of parameters: of those that carry the name, and have elements."""
    return {path for path in paths if re.search(r"^\W+params\b(?!.*empty)", path)}


@every_program
@every_devices
def test_tree_shapes_and_dtypes_are_stable(name: str, devices: int) -> None:
    def abstract(tree: Any) -> Any:
        return jax.tree.map(lambda x: (jnp.shape(x), jax.dtypes.result_type(x)), tree)

    first, *later = map(abstract, states(PROGRAMS[name].build(devices)))
    assert all(state == first for state in later)


@every_program
@every_devices
def test_layout_is_stable(name: str, devices: int) -> None:
    def shardings(tree: Any) -> dict[str, Any]:
        arrays = {path: leaf for path, leaf in by_path(tree).items() if hasattr(leaf, "sharding")}
        return {path: (leaf.sharding, leaf.ndim) for path, leaf in arrays.items()}

    def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return all(a[path][0].is_equivalent_to(*b[path]) for path in a)

    program = PROGRAMS[name]
    first, second, *later = map(shardings, states(program.build(devices)))
    assert all(same(second, state) for state in later)
    if devices == 1:
        assert all(len(sharding.device_set) == 1 for sharding, _ in second.values())
        return
    assert same(first, second) == ("resharded" not in program.marks)
    # The axes over which leaves are split: none, one of them, both.
    axes = {frozenset(sharding.spec) - {None} for sharding, _ in second.values()}
    every_kind = {frozenset(kind) for kind in [(), ("fsdp",), ("tensor",), ("fsdp", "tensor")]}
    assert axes == ({frozenset()} if "replicated" in program.marks else every_kind)


@every_program
@every_devices
def test_donates_what_it_promises(name: str, devices: int) -> None:
    program = PROGRAMS[name]
    old_states = list(states(program.build(devices)))[1:-1]  # The first may have to be moved.
    for leaf in jax.tree.leaves(old_states):
        if "no_donation" in program.marks:
            assert not leaf.is_deleted()
        elif leaf.size > 1:  # Jit drops what the step does not read: flags, empty moments.
            assert leaf.is_deleted()


@every_program
@every_devices
def test_builds_agree_bit_for_bit(name: str, devices: int) -> None:
    first, second = (map(to_host, states(PROGRAMS[name].build(devices))) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert not differing(a, b)


@every_program
@every_devices
def test_state_moves_and_stays_finite(name: str, devices: int) -> None:
    program = PROGRAMS[name]
    first, *later = map(to_host, states(program.build(devices)))
    moved = differing(first, later[-1])
    if "frozen" in program.marks:
        assert moved
        assert moved != first.keys()
    else:
        assert moved >= params_of(first)
    for path, leaf in later[-1].items():
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            assert np.isfinite(leaf.astype(np.float32)).all(), path


@pytest.mark.parametrize("name", [p.name for p in PROGRAMS.values() if "skips" in p.marks])
@every_devices
def test_bad_batches_are_skipped_where_marked(name: str, devices: int) -> None:
    history = list(map(to_host, states(PROGRAMS[name].build(devices))))
    for n, (before, after) in enumerate(itertools.pairwise(history)):
        moved = params_of(differing(before, after))
        assert moved == (set() if is_bad(n) else params_of(before))
