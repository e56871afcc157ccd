"""What a plan costs. Pure arithmetic: no arrays, no clock, no JAX.

A window of K steps is played on one device and its link to the host, step by step:

    device   stage b1 | armed step | stage b2 | armed step | ... | stage the rest: sealed | step
    link              | b1 ------- | f1, b2 -------------- | ... | f, the rest ---------------
    held     b1       | b1, r + c1 | f1, b2   | f1, b2, r + c2  ...

`b` are the blocks that leave before each armed step, `f` what follows them: the retained values of
all that has left. The link takes them in this order at one rate. Each armed step retains `r`, the
values of all groups, for the armed set is fixed; `c` of what follows is copied before it travels.
The device holds

    a block          from its copy until it has been pulled,
    r + c            while the step runs, from its start,
    f, of r + c      until it has been pulled: what nothing follows is free once the step has run,
                     and so are the originals of copies.

So what follows one step is counted beside all that the next one retains. Whatever would exceed the
device budget waits, and that wait is the only stall: transfers themselves hide behind steps.
At the sealed version the rest must be copied before the next step donates it; of what exceeds the
budget, that is again a wait for the link. A snapshot is the same with nothing before it (K = 1).

The scheme and its costs are those of GoCkpt (arXiv 2511.07035, section 3 and 4), which has no
device budget: there a block is as large as a step can hide, and a block must have left before the
next one. `tests/window/test_cost.py` finds the paper's formulas with that budget.

Left out, since it is the same for every plan: the copies on the device (under 1 ms per GB).
Left out, since nothing is known of it: that a step is slower while the link is busy; replay, for
which nothing waits unless more than two steps' values wait for it (docs/decisions/0023); and that
a trainer who runs ahead of the device has to wait for the step before it if there is no room for
what both retain, since memory is taken at dispatch: the device is then idle for one dispatch.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

STEPS_IN_FLIGHT = 2
"""Of how many steps what follows may be on the host at once."""

Blocks = tuple[tuple[int, ...], ...]
"""Positions of the units that leave at each of the first K - 1 versions."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What leaves as one, in bytes on the fullest device after replica splitting.

    Attributes:
      state_bytes: Staged when it leaves.
      retained_bytes: What follows it after each later step of the window.
      group: Whose rows it is; `None`: all of a group. What a group retains is pulled as it is if
        all its rows leave in one block, and else copied first.
      is_copied: Whether what it retains is copied first in any case: small arrays are packed.
      sharers: How many replicas of a process, which all hold it, share the way to the host.
    """

    state_bytes: int
    retained_bytes: int
    group: int | None = None
    is_copied: bool = False
    sharers: int = 1

    @property
    def sent_bytes(self) -> int:
        """What a device sends when it leaves."""
        return -(-self.state_bytes // self.sharers)

    @property
    def following_bytes(self) -> int:
        """And what it sends behind it after each later step."""
        return -(-self.retained_bytes // self.sharers)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a plan is made for; all bytes are those of one device, the fullest.

    Attributes:
      units: What may leave early.
      late_bytes: What leaves at the sealed version in any case.
      shared_bytes: Of that, what other replicas send.
      retained_bytes: What one armed step retains on the device, whatever has left. Less than what
        follows only if those values are there in any case, as the paper's gradients are.
      link_bytes_per_sec: Rate from this device to the host while all devices send.
      step_secs: One training step.
      device_budget_bytes: Of staged copies and retained values; `None`: no limit.
      host_budget_bytes: Of host memory, this device's share; `None`: no limit.
      max_steps: The largest K.
    """

    units: tuple[Unit, ...]
    late_bytes: int
    retained_bytes: int
    link_bytes_per_sec: float
    step_secs: float
    device_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    max_steps: int = 8
    shared_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Of everything that a checkpoint holds, on the device."""
        return self.late_bytes + sum(u.state_bytes for u in self.units)

    @property
    def sent_bytes(self) -> int:
        """What the device sends of it."""
        return self.late_bytes - self.shared_bytes + sum(u.sent_bytes for u in self.units)

    @property
    def blocking_secs(self) -> float:
        """What a save costs that blocks for the whole transfer, as stock Orbax does."""
        return self.sent_bytes / self.link_bytes_per_sec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a plan is predicted to cost.

    Attributes:
      steps: K.
      blocks: What leaves before the sealed version.
      stall_secs: Time by which the window's steps take longer.
      drain_secs: From the seal until everything is on the host.
      moved_bytes: Over the link, followers included.
      peak_bytes: Most bytes staged and retained on the device at once.
      host_bytes: Most bytes on the host at once: the state, and of what two steps retained as much
        as follows what has left. Landing waits if more is there that has not been replayed.
      fits: Whether it keeps both budgets.
    """

    steps: int
    blocks: Blocks
    stall_secs: float
    drain_secs: float
    moved_bytes: int
    peak_bytes: int
    host_bytes: int
    fits: bool


class _Link:
    """The way to the host, and what is held on the device until it has gone."""

    def __init__(self, terms: Terms):
        self._rate = terms.link_bytes_per_sec
        self._budget = terms.device_budget_bytes
        self._held: collections.deque[tuple[float, int]] = collections.deque()  # until, bytes
        self._held_bytes = 0
        self.free_at = 0.0
        self.peak_bytes = 0
        self.fits = True

    def room_at(self, now: float, num_bytes: int) -> float:
        """When the device has room for more."""
        while self._held and self._held[0][0] <= now:
            self._held_bytes -= self._held.popleft()[1]
        while self._held and self._exceeds(num_bytes):
            now, freed = self._held.popleft()
            self._held_bytes -= freed
        return now

    def hold(
        self, ready_at: float, num_bytes: int, sent_bytes: int, passing_bytes: int = 0
    ) -> None:
        """Holds bytes on the device until as many have been sent, from when they are ready.

        Args:
          ready_at: When they can be sent.
          num_bytes: Held from now until they have been.
          sent_bytes: What the link takes for them.
          passing_bytes: Held besides, but only until they are ready.
        """
        together = num_bytes + passing_bytes
        self.fits = self.fits and not self._exceeds(together)
        self.peak_bytes = max(self.peak_bytes, self._held_bytes + together)
        self.free_at = max(self.free_at, ready_at) + sent_bytes / self._rate
        self._held.append((self.free_at, num_bytes))
        self._held_bytes += num_bytes

    def hold_rest(self, now: float, num_bytes: int, sent_bytes: int) -> float:
        """Takes in any number of bytes, part by part as there is room; when the last are in."""
        now = self.room_at(now, num_bytes)
        begins = max(self.free_at, now)
        self.free_at = begins + sent_bytes / self._rate
        if self._exceeds(num_bytes):
            assert self._budget is not None
            self.peak_bytes = self._budget  # the others have gone, and it fills what there is
            sent_before = sent_bytes * (num_bytes - self._budget) / num_bytes
            return begins + sent_before / self._rate
        self.peak_bytes = max(self.peak_bytes, self._held_bytes + num_bytes)
        return now

    def _exceeds(self, num_bytes: int) -> bool:
        return self._budget is not None and self._held_bytes + num_bytes > self._budget


def copied_bytes(units: Sequence[Unit], blocks: Blocks) -> list[int]:
    """Of what follows each block, the bytes that are copied before they travel.

    Example:
      >>> rows = [Unit(state_bytes=8, retained_bytes=4, group=g) for g in (0, 0, 1, 1)]
      >>> copied_bytes(rows, ((0, 1), (2, 3))), copied_bytes(rows, ((0, 1, 2), (3,)))
      ([0, 0], [4, 4])
    """
    sizes = collections.Counter(unit.group for unit in units)
    copied = []
    for block in blocks:
        here = collections.Counter(units[u].group for u in block)
        copied.append(
            sum(
                unit.retained_bytes
                for unit in (units[u] for u in block)
                if unit.is_copied
                or (unit.group is not None and here[unit.group] < sizes[unit.group])
            )
        )
    return copied


def play(terms: Terms, blocks: Blocks) -> Cost:
    """Plays a window through.

    Args:
      terms: What it is played for.
      blocks: What leaves before each armed step; none for a snapshot.

    Returns:
      Its cost.

    Example:
      >>> terms = Terms(
      ...     units=(Unit(state_bytes=80, retained_bytes=40),), late_bytes=40, retained_bytes=40,
      ...     link_bytes_per_sec=10.0, step_secs=5.0, device_budget_bytes=90,
      ... )
      >>> play(terms, ()).stall_secs  # 120 bytes, of which 90 may be copied first
      3.0
      >>> play(terms, ((0,),)).stall_secs  # 40 retained must wait until the 80 have gone
      8.0
    """
    link = _Link(terms)
    now = 0.0
    left_bytes = left_sent = held_following = following_bytes = moved_bytes = 0
    copied = itertools.accumulate(copied_bytes(terms.units, blocks))
    for block, twice_bytes in zip(blocks, copied, strict=True):
        block_bytes = sum(terms.units[u].state_bytes for u in block)
        block_sent = sum(terms.units[u].sent_bytes for u in block)
        now = link.room_at(now, block_bytes)
        link.hold(now, block_bytes, block_sent)
        left_bytes += block_bytes
        left_sent += block_sent
        held_following += sum(terms.units[u].retained_bytes for u in block)
        following_bytes += sum(terms.units[u].following_bytes for u in block)
        step_bytes = terms.retained_bytes + twice_bytes
        held_bytes = min(held_following, step_bytes)
        now = link.room_at(now, step_bytes)
        link.hold(now + terms.step_secs, held_bytes, following_bytes, step_bytes - held_bytes)
        moved_bytes += block_sent + following_bytes
        now += terms.step_secs
    rest_sent = terms.sent_bytes - left_sent
    sealed_at = link.hold_rest(now, terms.state_bytes - left_bytes, rest_sent)
    host_bytes = terms.sent_bytes + STEPS_IN_FLIGHT * following_bytes
    fits_host = terms.host_budget_bytes is None or host_bytes <= terms.host_budget_bytes
    return Cost(
        steps=len(blocks) + 1,
        blocks=blocks,
        stall_secs=max(0.0, sealed_at - len(blocks) * terms.step_secs),
        drain_secs=max(0.0, link.free_at - sealed_at),
        moved_bytes=moved_bytes + rest_sent,
        peak_bytes=link.peak_bytes,
        host_bytes=host_bytes,
        fits=link.fits and fits_host,
    )
