"""Turns: which boxes of which pieces a sample takes. Pure arithmetic on what lies alike.

What is wrong throughout a leaf shows in any box of it, so all leaves have a turn, by one of their
pieces each, before any has another, by the next of its pieces. A device takes as many boxes at each
save, and what lies alike is together in its order: so one save nearly always runs the same program
as the one before.
"""

import bisect
import collections
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

FEW_BOXES = 16
"""How many boxes a sample has, unless its fraction demands more or devices are as many. Each costs
time to compile; pieces that are more than this take turns, with larger boxes."""

Leaf = Sequence[tuple[int, Hashable]]
"""Of each piece its device, by which devices can be ordered, and what the program is made from that
copies a box of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A piece that is looked at.

    Attributes:
      leaf: The number of its leaf.
      piece: Its number among the leaf's.
      part: Of the piece, what a box should have.
      time: How often it has had its turn.
    """

    leaf: int
    piece: int
    part: float
    time: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    """A piece in a round.

    Attributes:
      leaf: The number of its leaf.
      piece: Its number among the leaf's.
      kind: What its program is made from.
      count: Of the leaf's pieces.
      each: How many of them have their turn in a round.
      before: How many had it in the rounds before, and in this one.
    """

    leaf: int
    piece: int
    kind: Hashable
    count: int
    each: int
    before: int


class Turns:
    """The order in which pieces have their turns: all of each once in about 1 / fraction samples.

    Args:
      leaves: What is sampled together; none without a piece.
      fraction: Of all bytes, in a sample.

    Example:
      >>> wide, tall = [(0, "wide"), (1, "wide")], [(0, "tall")]
      >>> [(turn.leaf, turn.piece) for turn in Turns([wide, tall, wide], 1 / 64).of(0)]
      [(1, 0), (0, 0), (2, 0), (0, 1), (2, 1)]
    """

    def __init__(self, leaves: Sequence[Leaf], fraction: float):
        each = _each(leaves, fraction)
        number = math.lcm(
            *(len(x) // math.gcd(len(x), n) for x, n in zip(leaves, each, strict=True))
        )
        order = _Order(leaves)
        rounds = [order.round(each, n) for n in range(number)]
        looks: collections.Counter[int] = collections.Counter()
        for of_round in rounds:
            looks.update({device: len(on) for device, on in of_round.items()})
        boxes = _shared_out(looks)
        self._devices = [
            _Device([of[device] for of in rounds if device in of], number, fraction, boxes[device])
            for device in sorted(looks)
        ]

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
    """Turns on one device. In a round each box wanders through a section of what has its turn.

    Args:
      rounds: What has its turn in each, what is alike together.
      number: Of rounds until each comes again, those in which nothing has its turn here included.
      fraction: Of all bytes, in a sample.
      boxes: In a sample, or as many as the fraction needs.
    """

    def __init__(self, rounds: Sequence[Sequence[_Look]], number: int, fraction: float, boxes: int):
        # In samples, so that a piece that is looked at whole comes again in time.
        longest = min(look.each / (look.count * fraction) for looks in rounds for look in looks)
        needed = math.ceil(max(map(len, rounds)) / max(1, int(longest)))
        self._rounds, self._number = rounds, number
        self._lengths = [math.ceil(len(looks) / max(boxes, needed)) for looks in rounds]
        *self._starts, self._samples = itertools.accumulate(self._lengths, initial=0)
        self._fraction = fraction * self._samples / number

    def of(self, sample: int) -> list[Turn]:
        again, at = divmod(sample, self._samples)
        return [self._turn(look, again) for look in self._looks(at)]

    def casts(self) -> list[list[Turn]]:
        found: dict[Any, list[Turn]] = {}
        for at in range(self._samples):
            looks = self._looks(at)
            cast = tuple((look.kind, look.count, look.each) for look in looks)
            found.setdefault(cast, [self._turn(look, 0) for look in looks])
        return [*found.values()]

    def _looks(self, at: int) -> list[_Look]:
        n = bisect.bisect_right(self._starts, at) - 1
        looks, at = self._rounds[n], at - self._starts[n]
        boxes = math.ceil(len(looks) / self._lengths[n])
        taken = sorted((box * len(looks) // boxes + at) % len(looks) for box in range(boxes))
        return [looks[i] for i in taken]

    def _turn(self, look: _Look, again: int) -> Turn:
        before = look.before + again * self._number * look.each
        part = min(1.0, self._fraction * look.count / look.each)
        return Turn(look.leaf, look.piece, part, before // look.count)


def _each(leaves: Sequence[Leaf], fraction: float) -> list[int]:
    """How many pieces of each leaf have their turn in a round: one, unless all of them are few."""
    most = 1
    while most < max(map(len, leaves), default=0):
        if sum(min(len(leaf), most + 1) for leaf in leaves) > FEW_BOXES:
            break
        most += 1
    return [max(min(len(leaf), most), math.ceil(len(leaf) * fraction)) for leaf in leaves]


class _Order:
    """What is alike together: by names, so that it does not matter in which order leaves come."""

    def __init__(self, leaves: Sequence[Leaf]):
        self._leaves = leaves
        self._names = {kind: str(kind) for leaf in leaves for _, kind in leaf}
        # Of leaves on the same devices one begins with another device than the next.
        self._first = [0] * len(leaves)
        on_devices: collections.Counter[tuple[int, ...]] = collections.Counter()
        for n in sorted(range(len(leaves)), key=lambda n: [self._names[k] for _, k in leaves[n]]):
            devices = tuple(device for device, _ in leaves[n])
            self._first[n] = on_devices[devices]
            on_devices[devices] += 1

    def round(self, each: Sequence[int], number: int) -> dict[int, list[_Look]]:
        """What has its turn in a round, by device."""
        found: dict[int, list[_Look]] = collections.defaultdict(list)
        for n, leaf in enumerate(self._leaves):
            for before in range(number * each[n], (number + 1) * each[n]):
                piece = (self._first[n] + before) % len(leaf)
                device, kind = leaf[piece]
                found[device].append(_Look(n, piece, kind, len(leaf), each[n], before))
        for looks in found.values():
            looks.sort(key=lambda look: (self._names[look.kind], look.count))
        return dict(found)


def _shared_out(looks: Mapping[int, int]) -> dict[int, int]:
    """Of few boxes one for each device, and the others where there is the most to look at."""
    boxes = dict.fromkeys(sorted(looks), 1)
    for _ in range(FEW_BOXES - len(boxes) if boxes else 0):
        boxes[max(boxes, key=lambda device: looks[device] / boxes[device])] += 1
    return boxes
