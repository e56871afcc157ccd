"""Turns: which boxes of which pieces a sample takes. Pure arithmetic on what lies alike.

A device takes as many at each save, other pieces each time, so that all have their turn before any
has a second one. What lies alike is together in the order, so one save runs the same program as the
next, nearly always.
"""

import collections
import dataclasses
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence

FEW_BOXES = 16
"""How many boxes a sample has, unless its fraction demands more or devices are as many. Each costs
time to compile; pieces that are more than this take turns, with larger boxes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A piece that is looked at.

    Attributes:
      piece: Its number.
      part: Of the piece, what a box should have.
      time: Which time round it is.
    """

    piece: int
    part: float
    time: int


class Turns:
    """The order in which pieces have their turns: all of them once in about 1 / fraction samples.

    Args:
      kinds: Of each piece, its device, by which devices can be ordered, and what the program is
        made from that copies a box of it.
      fraction: Of all bytes, in a sample.

    Example:
      >>> turns = Turns([(0, "wide"), (0, "tall"), (0, "wide")], fraction=1 / 64)
      >>> [turn.piece for turn in turns.of(0)]
      [1, 0, 2]
    """

    def __init__(self, kinds: Sequence[tuple[int, Hashable]], fraction: float):
        by_device: dict[int, list[int]] = collections.defaultdict(list)
        for n, (device, _) in enumerate(kinds):
            by_device[device].append(n)
        boxes = _shared_out({device: len(on) for device, on in by_device.items()})
        self._devices = [
            _Device(sorted(on, key=lambda n: str(kinds[n][1])), kinds, fraction, boxes[device])
            for device, on in sorted(by_device.items())
        ]
        for number, on in enumerate(self._devices):
            # Devices hold shards of the same leaves: at a time they look at different ones.
            on.phase = number * on.period // len(self._devices)

    def of(self, sample: int) -> list[Turn]:
        """What a sample takes, device by device.

        Args:
          sample: Its number, from 0.
        """
        return [turn for device in self._devices for turn in device.of(sample)]

    def casts(self) -> Iterator[list[Turn]]:
        """For each program that a device will run, turns that it would copy."""
        for device in self._devices:
            yield from device.casts()


class _Device:
    """Turns on one device. A box wanders through a section of the pieces, which are in order.

    Attributes:
      period: Samples, after which all have had their turn.
      phase: Samples that it is ahead.
    """

    def __init__(
        self, pieces: Sequence[int], kinds: Sequence[tuple[int, Hashable]], fraction: float,
        boxes: int,
    ):  # fmt: skip
        boxes = max(boxes, math.ceil(len(pieces) * fraction))
        self._pieces, self._kinds = pieces, kinds
        self.period, self.phase = math.ceil(len(pieces) / boxes), 0
        self._sections = [n * len(pieces) // boxes for n in range(boxes)]
        self._part = min(1.0, fraction * self.period)

    def of(self, sample: int) -> list[Turn]:
        time, at = divmod(sample + self.phase, self.period)
        taken = sorted((start + at) % len(self._pieces) for start in self._sections)
        return [Turn(self._pieces[n], self._part, time) for n in taken]

    def casts(self) -> list[list[Turn]]:
        samples = map(self.of, range(self.period))
        return [*{tuple(self._kinds[t.piece] for t in turns): turns for turns in samples}.values()]


def _shared_out(pieces: Mapping[int, int]) -> dict[int, int]:
    """Of few boxes one for each device, and the others where there is the most to look at."""
    boxes = dict.fromkeys(pieces, 1)
    for _ in range(FEW_BOXES - len(boxes)):
        most = max(boxes, key=lambda device: pieces[device] / boxes[device], default=None)
        if most is None or boxes[most] == pieces[most]:
            break
        boxes[most] += 1
    return boxes
