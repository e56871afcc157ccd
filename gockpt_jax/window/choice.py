"""Which plan costs least, among windows of every K, of equal traffic or of equal blocks."""

import collections
import dataclasses
import functools
import heapq
from collections.abc import Iterator, Sequence
from typing import Literal

from gockpt_jax.window.cost import Blocks, Cost, Terms, Unit, describe_bytes, predict

_LEVELS = 8
"""Of what may leave early, plans let 1/8, 2/8, ... leave: the rest is late and needs no replay."""
_RESOLUTION_SECS = 1e-3
"""Stalls that differ by less are taken for equal; fewer bytes then decide."""
_LEAST_SHRINKING = 0.05


Kind = Literal["copy", "window", "snapshot"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan that costs least.

    Attributes:
      kind: `"copy"`: one device copy of everything, without any stall. `"window"`: several steps.
        `"snapshot"`: nothing is gained by a window.
      cost: Of the plan.
      reason: Why it is that kind, with numbers.
    """

    kind: Kind
    cost: Cost
    reason: str


def choose(terms: Terms) -> Choice:
    """The plan with the least stall, then the fewest bytes, then the smallest K.

    Which plans are compared depends neither on the budgets nor on the link: so a larger budget or a
    faster link never leads to a worse one, and since the snapshot is among them, none is worse.
    """
    snapshot = predict(terms, ())
    budget = terms.device_budget_bytes
    if budget is None or terms.state_bytes <= budget:
        limit = (
            "no device budget"
            if budget is None
            else f"the device budget of {describe_bytes(budget)}"
        )
        reason = f"one device copy of the state fits: {describe_bytes(terms.state_bytes)}, {limit}"
        return Choice(kind="copy", cost=snapshot, reason=reason)
    windows = windows_of(terms)
    best = min([snapshot, *windows], key=_rank)
    if best.steps > 1:
        peak = f"{describe_bytes(best.peak_bytes)} of {describe_bytes(budget)}"
        reason = (
            f"{best.steps} steps: predicted stall {best.stall_secs:.3f} s, of a snapshot "
            f"{snapshot.stall_secs:.3f} s; at most {peak} staged and retained on the device"
        )
        return Choice(kind="window", cost=best, reason=reason)
    if not terms.units:
        why = "no leaf may leave early"
    elif not windows:
        why = f"no window fits the device budget of {describe_bytes(budget)} and the host budget"
    else:
        least = min(w.stall_secs for w in windows)
        why = f"no window gains: predicted stall at least {least:.3f} s"
    reason = f"{why}; of a snapshot {snapshot.stall_secs:.3f} s"
    return Choice(kind="snapshot", cost=best, reason=reason)


def windows_of(terms: Terms) -> list[Cost]:
    """The windows that keep both budgets, of all K up to the largest."""
    played = (predict(terms, blocks) for blocks in _candidates(terms.units, terms.max_steps))
    return [cost for cost in played if cost.fits]


def best_per_steps(terms: Terms) -> list[Cost]:
    """The best plan of each K, a snapshot first; no entry where no window fits."""
    best: dict[int, Cost] = {}
    for cost in [predict(terms, ()), *windows_of(terms)]:
        best[cost.steps] = min(best.get(cost.steps, cost), cost, key=_rank)
    return [best[steps] for steps in sorted(best)]


def _rank(cost: Cost) -> tuple[int, int, int]:
    return round(cost.stall_secs / _RESOLUTION_SECS), cost.moved_bytes, cost.steps


@functools.lru_cache(maxsize=16)
def _candidates(units: tuple[Unit, ...], max_steps: int) -> tuple[Blocks, ...]:
    """Windows worth a try: every K, and several parts of what may leave early."""
    found: dict[Blocks, None] = {}
    for early in _levels(units):
        for steps in range(2, max_steps + 1):
            for shrinking in (True, False):
                found[fill(units, steps, early, shrinking=shrinking)] = None
    return tuple(found)


def _levels(units: Sequence[Unit]) -> Iterator[list[int]]:
    """Units that may leave early without the others, more and more: what gains most first."""
    order = _in_order(units)
    total = sum(u.state_bytes for u in units)
    taken_bytes, level = 0, 1
    for n, u in enumerate(order, start=1):
        taken_bytes += units[u].state_bytes
        if n == len(order) or taken_bytes * _LEVELS >= level * total:
            yield order[:n]
            level = taken_bytes * _LEVELS // max(total, 1) + 1


def _in_order(units: Sequence[Unit]) -> list[int]:
    """Positions, each after those that must not leave later, otherwise by gain.

    Raises:
      ValueError: if units wait for each other; they should be one.
    """
    waiting = [len(set(u.after)) for u in units]
    allows: dict[int, list[int]] = collections.defaultdict(list)
    for position, unit in enumerate(units):
        for first in set(unit.after):
            allows[first].append(position)

    def entry(u: int) -> tuple[float, int, int]:
        return units[u].retained_bytes / max(units[u].state_bytes, 1), -units[u].state_bytes, u

    ready = [entry(u) for u, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        *_, u = heapq.heappop(ready)
        order.append(u)
        for v in allows[u]:
            waiting[v] -= 1
            if waiting[v] == 0:
                heapq.heappush(ready, entry(v))
    if len(order) < len(units):
        stuck = [u for u, n in enumerate(waiting) if n]
        raise ValueError(f"units {stuck} must not leave later than each other; make them one")
    return order


def fill(
    units: Sequence[Unit], steps: int, early: Sequence[int] | None = None, *, shrinking: bool
) -> Blocks:
    """Spreads units over K - 1 blocks.

    Args:
      units: All of them.
      steps: K.
      early: Positions of those that leave early, with all that must not leave later; `None`: all.
      shrinking: Every step moves the same bytes. What follows what has left grows from step to
        step, so blocks shrink: if `q` is what is retained over what leaves, each is `1 - q` times
        the one before. Otherwise blocks are even, and the largest of them is as small as can be.

    Returns:
      Positions by block, ascending; blocks may be empty where units are few.
    """
    early = range(len(units)) if early is None else early
    if steps == 1 or not early:
        return ()
    total = sum(units[u].state_bytes for u in early)
    followed = sum(units[u].retained_bytes for u in early) / max(total, 1)
    shrinks = max(1 - followed, _LEAST_SHRINKING) if shrinking else 1.0
    weights = [shrinks**i for i in range(steps - 1)]
    room = [total * w / sum(weights) for w in weights]
    blocks: list[list[int]] = [[] for _ in room]
    block_of: dict[int, int] = {}
    depth = _depths(units)
    for u in sorted(early, key=lambda u: (depth.get(u, 0), -units[u].state_bytes, u)):
        first = max((block_of[v] for v in units[u].after), default=0) if units[u].after else 0
        block = room.index(max(room[first:]), first)
        blocks[block].append(u)
        block_of[u] = block
        room[block] -= units[u].state_bytes
    return tuple(tuple(sorted(block)) for block in blocks)


def _depths(units: Sequence[Unit]) -> dict[int, int]:
    """How long the chain is of what must not leave later than each; empty if there is none."""
    depth: dict[int, int] = {}
    if not any(unit.after for unit in units):
        return depth
    for u in _in_order(units):
        depth[u] = max((depth[v] + 1 for v in units[u].after), default=0)
    return depth
