"""What plans rest on: what the user said, what has been measured, what other processes know."""

import collections
import dataclasses
import functools
import json
import weakref
from collections.abc import Callable, Collection, Sequence

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


class Known:
    """The same on all processes whenever they ask each other; in between each learns for itself.

    Args:
      options: The user's.
      processes: Those that make the same plan.
      resources: What windows take.
      probe: Gives something that is ready when all steps so far have run, as `StepClock` wants it.

    Attributes:
      clock: Learns the time of a step.
    """

    def __init__(
        self, options: WindowOptions, processes: Processes, resources: Resources,
        probe: Callable[[], jax.Array | None],
    ):  # fmt: skip
        self.clock = StepClock(resources.watcher, probe)
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
        said = self._options
        host = self._host.room_bytes(leaf_bytes * num_devices)
        seen = measured_facts(self.clock)
        measured = {
            "step_secs": said.step_secs or seen.step_secs,
            "link_bytes_per_sec": said.link_bytes_per_sec or seen.link_bytes_per_sec,
            # A process may have no device with a part of the state.
            "host_budget_bytes": None if host is None or not num_devices else host // num_devices,
        }
        saves = self.saves(program)
        unsaved, beside = saves.unsaved if said.steps is None else frozenset(), saves.beside
        most = [saves.were_refused, beside.of_device, beside.in_host_memory, beside.to_host]
        mine = json.dumps([measured, sorted(unsaved), most])
        saves.were_refused = False
        answers = [json.loads(x) for x in self._processes.gather("facts", mine).values()]
        known = {name: [x[name] for x, *_ in answers if x[name] is not None] for name in measured}
        refused, *beside_bytes = map(max, zip(*(x for *_, x in answers), strict=True))
        return Facts(
            **{name: min(told, default=None) for name, told in known.items()},
            unsaved=unsaved.intersection(*(x for _, x, _ in answers)),
            was_refused=refused,
            beside=SavedBytes(*beside_bytes),
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
        leaves = program.returned.leaves(step.last.new_state)
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

    def is_rounded(self, program: StepProgram, rounded: StepProgram) -> None:
        """Told of a program with another cut of the same step: what is known of one is of both."""
        found = self.saves(program)
        self._saves[rounded] = dataclasses.replace(found, last=found.last.copy())

    def saves(self, program: StepProgram) -> Saves:
        """What is known of those of its state."""
        return self._saves.get(program) or Saves()


def measured_facts(clock: StepClock) -> Facts:
    """What has been learned so far."""
    return Facts(clock.secs, LINK.bytes_per_sec)
