"""What the devices that run one program exchange, worked out for all of them.

What moves elements from one to another is worked out; a sum over devices is drawn at random like
any other reduction, alike on all that take part.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from bench.compiled.hlo import numbers

Groups: TypeAlias = tuple[tuple[int, ...], ...]
"""Of partitions that exchange with each other."""

Sum: TypeAlias = Callable[[Sequence[np.ndarray]], np.ndarray]
"""Of arrays of one shape, element by element; or what is drawn in its place."""

_Shards: TypeAlias = Sequence[Sequence[np.ndarray]]
_Exchange: TypeAlias = Callable[[_Shards, Mapping[str, str], Sum], Sequence[np.ndarray]]
"""What the partitions of a group get, given the operands of each, all in the group's order."""

START, DONE = "-start", "-done"
GROUPS, PART = "groups", "part"
_IDS = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_MESH = re.compile(rf"mesh\[([^\]]*)\](?:, device_ids=\({_IDS}\))? \{{([^}}]*)\}}$")
_IOTA = re.compile(rf"\[([\d,]+)\]<={_IDS}$")


def groups_of(text: str, partitions: int) -> Groups:
    """The groups of a collective, as an attribute tells them.

    Raises:
      ValueError: if it tells them in a way that is not known here.

    Example:
      >>> groups_of("{{0,2},{1,3}}", 4), groups_of("[2,2]<=[2,2]T(1,0)", 4)
      (((0, 2), (1, 3)), ((0, 2), (1, 3)))
      >>> groups_of("mesh['x'=2,'y'=2] {'y'}", 4)
      ((0, 1), (2, 3))
      >>> groups_of("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}", 4)
      ((0, 2), (1, 3))
      >>> groups_of("mesh['x'=8] {'x':(2)2}", 8)
      ((0, 2), (1, 3), (4, 6), (5, 7))
    """
    if found := _MESH.match(text):
        pairs = (part.split("=") for part in found[1].split(","))
        sizes, along = {name: int(n) for name, n in pairs}, found[4].split(",")
        names = list(sizes)
        for part in (name for name in along if ":" in name):  # `'x':(2)3`, of an axis the second
            axis, begin, size = re.fullmatch(r"('.*'):\((\d+)\)(\d+)", part).groups()
            at, whole = names.index(axis), sizes.pop(axis)
            cut = {f"{axis}<": int(begin), part: int(size)}
            sizes |= cut | {f"{axis}>": whole // math.prod(cut.values())}
            names[at : at + 1] = [*cut, f"{axis}>"]
        ids = _ids(found[2] or str(partitions), found[3]).reshape([sizes[n] for n in names])
        axes = [names.index(name) for name in along if name]
        width = math.prod(ids.shape[axis] for axis in axes)
        return _rows(np.moveaxis(ids, axes, range(-len(axes), 0)).reshape(-1, width))
    if found := _IOTA.match(text):
        return _rows(_ids(found[2], found[3]).reshape(numbers(found[1])))
    if re.fullmatch(r"\{(\{[\d,]+\},?)*\}", text):
        listed = tuple(numbers(group) for group in re.findall(r"\{[\d,]+\}", text))
        return listed or (tuple(range(partitions)),)
    raise ValueError(f"groups of {partitions} partitions are told in an unknown way: {text}")


def _ids(sizes: str, order: str | None) -> np.ndarray:
    ids = np.arange(math.prod(numbers(sizes))).reshape(numbers(sizes))
    return ids.transpose(numbers(order)) if order else ids


def listed_groups(text: str, partitions: int) -> str:
    """The same groups, told in one way.

    Example:
      >>> listed_groups("[2,2]<=[4]", 4)
      '{{0,1},{2,3}}'
    """
    groups = (",".join(map(str, group)) for group in groups_of(text, partitions))
    return "{" + ",".join(f"{{{group}}}" for group in groups) + "}"


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(map(int, row)) for row in ids)


def exchanged(
    opcode: str, attributes: Mapping[str, str], shards: _Shards, summed: Sum
) -> list[np.ndarray] | None:
    """What each partition gets.

    Args:
      opcode: Of the operation.
      attributes: Its own.
      shards: Of each partition, the operands.
      summed: What a sum over partitions gives.

    Returns:
      An array for each partition; `None` if that is no exchange.
    """
    if opcode == "partition-id":
        return [np.array(i, np.uint32) for i in range(len(shards))]
    if opcode == "replica-id":
        return [np.array(0, np.uint32)] * len(shards)
    exchange = _EXCHANGES.get(opcode)
    if exchange is None:
        return None
    results: dict[int, np.ndarray] = {}
    for group in groups_of(attributes[GROUPS], len(shards)):
        got = exchange([shards[i] for i in group], attributes, summed)
        results |= zip(group, got, strict=True)
    return [results[i] for i in range(len(shards))]


def _gathered(shards: _Shards, attributes: Mapping[str, str], _: Sum) -> Sequence[np.ndarray]:
    whole = np.concatenate([x for (x,) in shards], _along(attributes))
    return [whole] * len(shards)


def _reduced(shards: _Shards, _: Mapping[str, str], summed: Sum) -> Sequence[np.ndarray]:
    return [summed([x for (x,) in shards])] * len(shards)


def _scattered(shards: _Shards, attributes: Mapping[str, str], summed: Sum) -> Sequence[np.ndarray]:
    return np.split(summed([x for (x,) in shards]), len(shards), _along(attributes))


def _dealt(shards: _Shards, attributes: Mapping[str, str], _: Sum) -> Sequence[np.ndarray]:
    """All to all: the parts of one array each, or each as many arrays as there are partitions."""
    if PART in attributes:
        return shards[int(attributes[PART])]
    along = _along(attributes)
    parts = [np.split(x, len(shards), along) for (x,) in shards]
    return [np.concatenate(to, along) for to in zip(*parts, strict=True)]


def _permuted(shards: _Shards, attributes: Mapping[str, str], _: Sum) -> Sequence[np.ndarray]:
    results = [np.zeros_like(x) for (x,) in shards]
    for source, target in re.findall(r"\{(\d+),(\d+)\}", attributes["source_target_pairs"]):
        results[int(target)] = shards[int(source)][0]
    return results


def _along(attributes: Mapping[str, str]) -> int:
    return int(attributes["dimensions"].strip("{}"))


_EXCHANGES: Mapping[str, _Exchange] = {
    "all-gather": _gathered,
    "all-reduce": _reduced,
    "reduce-scatter": _scattered,
    "all-to-all": _dealt,
    "collective-permute": _permuted,
}
COLLECTIVES = tuple(_EXCHANGES)
