"""Turns: which boxes of which pieces a sample takes. Pure arithmetic on what lies alike.

Other pieces each time, but of the same kinds: so a device runs the same program at every save.
"""

import collections
import dataclasses
import math
from collections.abc import Hashable, Sequence

FEW_BOXES = 16
"""How many boxes a sample has, unless its fraction demands more or devices are as many. Each costs
time to compile; pieces that are more than this take turns, with larger boxes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A piece that is looked at.

    Attributes:
      piece: Its number.
      part: Of the piece, what a box should have.
      time: How often it has had its turn.
    """

    piece: int
    part: float
    time: int


class Turns:
    """The order in which pieces have their turns.

    A device's pieces of one kind are looked at one after another, each time as many, so that all is
    looked at once in about 1 / fraction samples. With more kinds than boxes the kinds take turns.

    Args:
      kinds: Of each piece, its device, by which devices can be ordered, and what its program is
        made from.
      fraction: Of all bytes, in a sample.

    Example:
      >>> turns = Turns([(0, "wide"), (0, "tall"), (0, "wide"), (0, "wide")], fraction=1 / 2)
      >>> [turn.piece for turn in turns.of(0)], turns.programs
      ([1, 0, 2, 3], 1)
    """

    def __init__(self, kinds: Sequence[tuple[int, Hashable]], fraction: float):
        by_device: dict[int, dict[Hashable, list[int]]] = collections.defaultdict(dict)
        for n, (device, kind) in enumerate(kinds):
            by_device[device].setdefault(kind, []).append(n)
        few = max(1, FEW_BOXES // max(1, len(by_device)))
        self._devices = [
            _Device([alike[kind] for kind in sorted(alike, key=str)], fraction, few, number)
            for number, (_, alike) in enumerate(sorted(by_device.items()))
        ]

    @property
    def programs(self) -> int:
        """After how many samples a device's kinds come again."""
        return max((len(device.groups) for device in self._devices), default=0)

    def of(self, sample: int) -> list[Turn]:
        """What a sample takes: device by device, what is alike together.

        Args:
          sample: Its number, from 0.
        """
        return [turn for device in self._devices for turn in device.of(sample)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Alike:
    """Pieces of one kind on one device.

    Attributes:
      pieces: Their numbers.
      boxes: How many of them a sample looks at.
      part: Of each.
    """

    pieces: Sequence[int]
    boxes: int
    part: float


class _Device:
    def __init__(self, alike: Sequence[Sequence[int]], fraction: float, few: int, number: int):
        self._number = number
        pieces = sum(map(len, alike))
        boxes = max(min(pieces, few), math.ceil(pieces * fraction))
        count = math.ceil(len(alike) / boxes)
        part = min(1.0, fraction * count)  # of what is in a group, at its turn
        self.groups = [_shared_out(alike[n::count], part, boxes) for n in range(count)]

    def of(self, sample: int) -> list[Turn]:
        sample, group = divmod(sample, len(self.groups))
        found = []
        for alike in self.groups[group]:
            for n in range(sample * alike.boxes, (sample + 1) * alike.boxes):
                time, at = divmod(n, len(alike.pieces))
                # Devices hold shards of the same leaves: each begins with another.
                at = (at + self._number * alike.boxes) % len(alike.pieces)
                found.append(Turn(alike.pieces[at], alike.part, time))
        return found


def _shared_out(alike: Sequence[Sequence[int]], part: float, boxes: int) -> list[_Alike]:
    """Gives each kind the boxes that it needs, and what is left to those with the most pieces."""
    found = [max(1, math.ceil(part * len(pieces))) for pieces in alike]
    for _ in range(boxes - sum(found)):
        more = max(range(len(alike)), key=lambda n: len(alike[n]) / found[n])
        if found[more] == len(alike[more]):
            break
        found[more] += 1
    return [
        _Alike(pieces, number, min(1.0, part * len(pieces) / number))
        for pieces, number in zip(alike, found, strict=True)
    ]
