"""An optimised HLO module's text, parsed."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

_HEADER = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\) -> .*\{\s*$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)[^}]*\})?")
_PARTITIONS = re.compile(r"HloModule .*\bnum_partitions=(\d+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_OPENING, _CLOSING = "([{", ")]}"


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Of an array.

    Attributes:
      dtype: As HLO names it, `f32`.
      dims: Its sizes.
      order: Its dimensions from the one whose elements lie side by side to the outermost.
    """

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...]


Shapes: TypeAlias = "Shape | tuple[Shapes, ...]"
"""Of an array, or of a tuple's parts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: Of its result.
      shape: Likewise.
      opcode: What it does.
      operands: Names; of a constant and a parameter its number, as text.
      attributes: The rest of the line, as text by name.
      is_root: Whether it is the computation's result.
    """

    name: str
    shape: Shapes
    opcode: str
    operands: tuple[str, ...]
    attributes: dict[str, str]
    is_root: bool

    def of(self, opcode: str, shape: Shapes) -> "Instruction":
        """The same, as another opcode and of another shape."""
        return dataclasses.replace(self, opcode=opcode, shape=shape)

    def as_one(self, opcode: str, shape: Shapes) -> "Instruction":
        """The same as another instruction, which does as much."""
        kept = {k: v for k, v in self.attributes.items() if k == opcode}
        return dataclasses.replace(self, opcode=opcode, shape=shape, attributes=kept)


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A program.

    Attributes:
      computations: By name.
      entry: The name of the one that is called.
      partitions: How many devices run it together, each on its parts of the arrays.
    """

    computations: Mapping[str, list[Instruction]]
    entry: str
    partitions: int


def parse(text: str) -> Module:
    """Parses what `jax.stages.Compiled.as_text` gives.

    Example:
      >>> module = parse('''
      ... ENTRY %main (x: f32[2]) -> f32[2] {
      ...   %x = f32[2]{0} parameter(0)
      ...   ROOT %y = f32[2]{0} negate(%x), metadata={op_name="neg"}
      ... }''')
      >>> [i.opcode for i in module.computations[module.entry]]
      ['parameter', 'negate']
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            rest = _COMMENT.sub("", found[3])
            current.append(_instruction(found[2], rest, is_root=bool(found[1])))
    found = _PARTITIONS.match(text.lstrip())
    return Module(computations, entry, int(found[1]) if found else 1)


def _instruction(name: str, rest: str, *, is_root: bool) -> Instruction:
    end = _end(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = _shape(rest[:end]), rest[end:].lstrip()
    opcode = rest[: rest.index("(")]
    end = _end(rest, len(opcode))
    operands = tuple(part.lstrip("%") for part in split(rest[len(opcode) + 1 : end]))
    pairs = (part.partition("=") for part in split(rest[end + 1 :].lstrip(", ")))
    attributes = {key: value for key, _, value in pairs}
    return Instruction(name, shape, opcode, operands, attributes, is_root)


def _shape(text: str) -> Shapes:
    if text.startswith("("):
        return tuple(map(_shape, split(text[1:-1])))
    found = _SHAPE.match(text)
    assert found is not None, text
    dims = numbers(found[2])
    order = numbers(found[3]) if found[3] is not None else tuple(reversed(range(len(dims))))
    return Shape(found[1], dims, order)


def numbers(text: str) -> tuple[int, ...]:
    """Of a list in an attribute, `{0,2}`."""
    return tuple(int(n) for n in text.strip("{}").split(",") if n)


def split(text: str) -> Iterator[str]:
    """The parts between the commas that stand in no brackets and in no quotes."""
    depth, start, quoted = 0, 0, False
    for i, letter in enumerate(text):
        quoted ^= letter == '"' and text[i - 1] != "\\"
        if quoted:
            continue
        depth += (letter in _OPENING) - (letter in _CLOSING)
        if letter == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    if text[start:].strip():
        yield text[start:].strip()


def _end(text: str, start: int) -> int:
    """Where the bracket at `start` is closed."""
    depth, quoted = 0, False
    for i in range(start, len(text)):
        quoted ^= text[i] == '"' and text[i - 1] != "\\"
        if not quoted:
            depth += (text[i] in _OPENING) - (text[i] in _CLOSING)
        if depth == 0:
            return i
    raise ValueError(f"a bracket is not closed: {text[start : start + 80]}")
