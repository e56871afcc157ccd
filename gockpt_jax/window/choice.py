"""Which plan costs least, among windows of every K, of equal traffic or of equal blocks."""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from gockpt_jax.checks import describe_bytes
from gockpt_jax.window.cost import Blocks, Cost, Terms, Unit, play

_LEVELS = 8
"""Of what may leave early, plans let 1/8, 2/8, ... leave: the rest is late and needs no replay."""
_RESOLUTION_SECS = 1e-3
"""Stalls that differ by less are taken for equal; fewer bytes then decide."""
LEAST_GAIN_SECS = 0.03
"""Of a window over a snapshot. So much more than a device copy one took on an H200 where neither
waited for the link (docs/decisions/0033): what is not on the link no plan counts."""
_LEAST_SHRINKING = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan that costs least.

    Attributes:
      cost: Of the plan.
      reason: Why it is that one, with numbers.
    """

    cost: Cost
    reason: str


def choose(terms: Terms) -> Choice:
    """The plan with the least stall, then the fewest bytes, then the smallest K.

    A window only if it gains `LEAST_GAIN_SECS`; but for that much the following holds. Which plans
    are compared depends neither on the budgets nor on the link: so a larger budget or a faster link
    never leads to a worse one, and since the snapshot is among them, none is worse.
    """
    snapshot, budget = play(terms, ()), terms.device_budget_bytes
    if (copy := why_one_copy(terms.state_bytes, budget)) is not None:
        return Choice(cost=snapshot, reason=copy)
    assert budget is not None, "without a budget one copy fits"
    windows = windows_of(terms)
    best = min([snapshot, *windows], key=_rank)
    if snapshot.stall_secs - best.stall_secs >= LEAST_GAIN_SECS:
        peak = f"{describe_bytes(best.peak_bytes)} of {describe_bytes(budget)}"
        reason = (
            f"{best.steps} steps: predicted stall {best.stall_secs:.3f} s, of a snapshot "
            f"{snapshot.stall_secs:.3f} s; at most {peak} staged and retained on the device"
        )
        return Choice(cost=best, reason=reason)
    if not terms.units:
        why = "no leaf may leave early"
    elif not windows:
        why = f"no window fits the {_too_small(terms, budget)}"
    else:
        least = min(w.stall_secs for w in windows)
        why = f"no window gains {LEAST_GAIN_SECS} s: predicted stall at least {least:.3f} s"
    reason = f"{why}; predicted stall of a snapshot {snapshot.stall_secs:.3f} s"
    return Choice(cost=snapshot, reason=reason)


def _too_small(terms: Terms, budget_bytes: int) -> str:
    """The budget that leaves no window; the device's, if none fits whatever the host has."""
    host_bytes = terms.host_budget_bytes
    if host_bytes is None or not windows_of(dataclasses.replace(terms, host_budget_bytes=None)):
        return f"device budget of {describe_bytes(budget_bytes)}"
    return f"host budget, of which a device has {describe_bytes(host_bytes)}"


def why_one_copy(state_bytes: int, budget_bytes: int | None) -> str | None:
    """Why one device copy is all that a save needs; `None` if the device budget is too small."""
    if budget_bytes is None:
        budget = "and the device tells no free memory, nor is `device_budget_bytes` set"
    elif state_bytes <= budget_bytes:
        budget = f"the device budget of {describe_bytes(budget_bytes)}"
    else:
        return None
    return f"one device copy of the state fits: {describe_bytes(state_bytes)}, {budget}"


def windows_of(terms: Terms) -> list[Cost]:
    """The windows that keep both budgets, of all K up to the largest."""
    played = (play(terms, blocks) for blocks in _candidates(terms.units, terms.max_steps))
    return [cost for cost in played if cost.fits]


def best_per_steps(terms: Terms) -> list[Cost]:
    """The best plan of each K, a snapshot first; no entry where no window fits."""
    best: dict[int, Cost] = {}
    for cost in [play(terms, ()), *windows_of(terms)]:
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
                found[into_blocks(units, steps, early, shrinking=shrinking)] = None
    return tuple(found)


def _levels(units: Sequence[Unit]) -> Iterator[list[int]]:
    """Units that may leave early without the others, more and more: what gains most first."""
    order = _in_order(units)
    total = sum(u.state_bytes for u in units)
    taken_bytes, level = 0, 1
    for n, u in enumerate(order, start=1):
        taken_bytes += units[u].state_bytes
        if taken_bytes * _LEVELS >= level * total:
            yield order[:n]
            level = taken_bytes * _LEVELS // max(total, 1) + 1


def _in_order(units: Sequence[Unit]) -> list[int]:
    """Positions, groups by gain; rows of a group are neighbours."""
    groups: dict[int, list[int]] = collections.defaultdict(list)
    for u, unit in enumerate(units):
        groups[-1 - u if unit.group is None else unit.group].append(u)

    def rank(members: Sequence[int]) -> tuple[float, int, int]:
        """Least first: what follows of the bytes that leave, their number, the group's place."""
        state = sum(units[u].state_bytes for u in members)
        retained = sum(units[u].retained_bytes for u in members)
        return retained / max(state, 1), -state, members[0]

    return [u for members in sorted(groups.values(), key=rank) for u in members]


def into_blocks(
    units: Sequence[Unit], steps: int, early: Sequence[int] | None = None, *, shrinking: bool
) -> Blocks:
    """Cuts the units, in order, into K - 1 blocks.

    Neighbours in that order leave together, so at most one group is cut by each boundary: what the
    others retain is pulled as it is. What gains most leaves first, for it is followed longest.

    Args:
      units: All of them.
      steps: K.
      early: Positions of those that leave early, in that order; `None`: all, those that gain most
        first.
      shrinking: Every step moves the same bytes. What follows what has left grows from step to
        step, so blocks shrink: if `q` is what is retained over what leaves, each is `1 - q` times
        the one before. Otherwise blocks are even.

    Returns:
      Positions by block, ascending. A block has at most a unit more than its share; if there are
      fewer units than blocks the last ones are empty.
    """
    early = _in_order(units) if early is None else early
    if not early:
        return ()
    total = sum(units[u].state_bytes for u in early)
    followed = sum(units[u].retained_bytes for u in early) / max(total, 1)
    shrinks = max(1 - followed, _LEAST_SHRINKING) if shrinking else 1.0
    weights = [shrinks**i for i in range(steps - 1)]
    order, blocks, filled = collections.deque(early), [], 0
    for i, weight in enumerate(weights):
        # To where its share ends; or, if those before it have taken more, to its part of the rest.
        share = total * sum(weights[: i + 1]) / sum(weights)
        end = max(share, filled + (total - filled) * weight / sum(weights[i:]))
        block: list[int] = []
        while order and (
            not block or i == steps - 2 or filled + units[order[0]].state_bytes / 2 <= end
        ):
            block.append(order.popleft())
            filled += units[block[-1]].state_bytes
        blocks.append(tuple(sorted(block)))
    return tuple(blocks)
