"""What plans rest on: what the user said, what has been measured, what other processes know."""

import collections
import dataclasses
import functools
import json
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax

from gockpt_jax.options import WindowOptions
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.traced import TracedStep
from gockpt_jax.transfer.meter import LINK
from gockpt_jax.window.clock import StepClock
from gockpt_jax.window.facts import NO_BYTES, Facts, SavedBytes
from gockpt_jax.window.processes import Processes
from gockpt_jax.window.resources import Resources


@dataclasses.dataclass(slots=True)
class Saves:
    """Of a program's state; or of a step that had no program yet: all that it took is `beside`.

    Attributes:
      last: Of the last two, the positions of the leaves that they left out, and all that they took.
      beside: What the larger of them took beyond the leaves that one of them took.
      items: Positions of the leaves in each item of the last.
      were_refused: Whether the host has had no room for a window since the plan was looked at.
    """

    last: collections.deque[tuple[frozenset[int], SavedBytes]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=2)
    )
    beside: SavedBytes = NO_BYTES
    items: Sequence[frozenset[int]] = ()
    were_refused: bool = False

    @property
    def unsaved(self) -> frozenset[int]:
        """Positions of the leaves that neither of the last two took."""
        return frozenset.intersection(*[x for x, _ in self.last] or [frozenset()])

    def took_none_of(self, num_leaves: int) -> bool:
        """Whether two have come, and neither took any of the leaves: both were of copies."""
        return len(self.last) == self.last.maxlen and len(self.unsaved) == num_leaves


class Known:
    """The same on all processes whenever they ask each other; in between each learns for itself.

    Args:
      options: The user's.
      processes: Those that make the same plan.
      resources: What windows take.
      probe: Gives something that is ready when all steps so far have run, as `StepClock` wants it.

    Attributes:
      clock: Learns the time of a step.
      is_alone: Whether no other process makes the plan.
    """

    def __init__(
        self, options: WindowOptions, processes: Processes, resources: Resources,
        probe: Callable[[], jax.Array | None],
    ):  # fmt: skip
        self.clock = StepClock(resources.watcher, probe)
        self.is_alone = not processes.several
        self._options = options
        self._processes = processes
        self._host, self._replicas = resources.host, resources.replicas
        self._saves: weakref.WeakKeyDictionary[StepProgram | TracedStep, Saves] = (
            weakref.WeakKeyDictionary()
        )

    def facts(self, program: StepProgram, leaf_bytes: int, num_devices: int) -> Facts:
        """What the user said, else what has been measured; for a plan, on all processes.

        Every process must make the same plan, and what they measure differs: all of them go by the
        shortest step, the slowest link and the least room that one of them has seen, and by what
        any of them has saved.

        Args:
          program: The plan's.
          leaf_bytes: Of the state, what one device sends.
          num_devices: Of this process, with a part of the state.
        """
        said, seen, saves = self._options, measured_facts(self.clock), self.saves(program)
        host = self._host.room_bytes(leaf_bytes * num_devices)
        unsaved = saves.unsaved
        if said.steps is not None:  # a window of all that it may be one of
            # Of several processes none asks again, so that it would never be one any more.
            is_none = self.is_alone and saves.took_none_of(len(program.cut.paths))
            unsaved = unsaved if is_none else frozenset()
        mine = [
            said.step_secs or seen.step_secs,
            said.link_bytes_per_sec or seen.link_bytes_per_sec,
            # A process may have no device with a part of the state.
            None if host is None or not num_devices else host // num_devices,
            sorted(unsaved),
            saves.were_refused,
            saves.beside._replace(owned=0),  # that is not told
        ]
        saves.were_refused = False
        answers = self._processes.gather("facts", json.dumps(mine)).values()
        secs, rates, room, left_out, refused, beside = zip(*map(json.loads, answers), strict=True)
        return Facts(
            step_secs=_least(secs),
            link_bytes_per_sec=_least(rates),
            host_budget_bytes=_least(room),
            unsaved=frozenset.intersection(*map(frozenset, left_out)),
            was_refused=any(refused),
            beside=functools.reduce(SavedBytes.or_more, (SavedBytes(*x) for x in beside)),
        )

    def was_refused(self, program: StepProgram) -> None:
        """Told of each window for which the host had no room when it was to open."""
        self._saves.setdefault(program, Saves()).were_refused = True

    def has_saved(
        self, step: TracedStep, items: Sequence[Collection[int]], taken: SavedBytes
    ) -> None:
        """Told of each save: windows carry what one of the last two has taken.

        Args:
          step: The last that ran.
          items: Of each item, the ids of the arrays that were saved.
          taken: Of all of them.
        """
        program = step.program
        if program is None:
            self._saves[step] = Saves(beside=taken)
            return
        leaves = program.state_in(step.last)
        if leaves is not None:
            number = {id(a): j for j, a in enumerate(leaves)}
            of_items = [frozenset(number[i] for i in ids if i in number) for ids in items]
            left_out = frozenset(range(len(leaves))).difference(*of_items)
            saves = self._saves.setdefault(program, Saves())
            saves.items = of_items
            saves.last.append((left_out, taken))
            unsaved = saves.unsaved
            carried = (a for j, a in enumerate(leaves) if j not in unsaved)
            most = functools.reduce(SavedBytes.or_more, (x for _, x in saves.last))
            saves.beside = most.beyond(SavedBytes.of(carried, self._replicas))

    def has_program(
        self, step: TracedStep, program: StepProgram, leaves: Sequence[jax.Array]
    ) -> None:
        """Told of a program that is to be planned for: the first save may have come before it.

        Args:
          step: Whose it is.
          program: The program.
          leaves: Of its state.
        """
        before = self._saves.pop(step, None)
        if before is not None and program not in self._saves:
            beside = before.beside.beyond(SavedBytes.of(leaves, self._replicas))
            self._saves[program] = Saves(beside=beside)

    def was_rounded(self, program: StepProgram, rounded: StepProgram) -> None:
        """Told of a program with another cut of the same step: what is known of one is of both."""
        self._saves[rounded] = self.saves(program)

    def saves(self, program: StepProgram) -> Saves:
        """What is known of those of its state."""
        return self._saves.get(program) or Saves()


def measured_facts(clock: StepClock) -> Facts:
    """What has been learned so far."""
    return Facts(clock.secs, LINK.bytes_per_sec)


def _least(told: Iterable[Any]) -> Any:
    """Of what some of them know."""
    return min((x for x in told if x is not None), default=None)
