"""A compiled program as expressions: what each result is made of, wherever it is computed.

An optimised program computes a value wherever it is needed: two fusions may hold the same product,
and a fusion may compute anew what another one writes to memory. Here each expression has a number,
the same for the same expression, so that only what is computed counts and not where.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from bench.compiled.collectives import COLLECTIVES, DONE, GROUPS, PART, START, listed_groups
from bench.compiled.hlo import Instruction, Module, Shape, Shapes, split

# What names, places and schedules an instruction, and changes no number.
_WITHOUT_MEANING = (
    "metadata", "frontend_attributes", "sharding", "origin", "control-predecessors",
    "backend_config", "calls", "to_apply", "body", "condition", "branch_computations",
    "true_computation", "false_computation", "output_to_operand_aliasing",
    "cross_program_prefetch_index", "channel_id", "use_global_device_ids", "replica_groups",
    "constrain_layout", "device_ids",
)  # fmt: skip
_BODIES = (
    "to_apply", "body", "condition", "calls", "branch_computations", "true_computation",
    "false_computation",
)  # fmt: skip
# What is called and is its body; and what moves an array and leaves it as it is.
_CALLS = ("fusion", "call", "async-start")
_MOVES = (
    "copy", "copy-start", "copy-done", "slice-done", "async-update", "async-done",
    "optimization-barrier",
)  # fmt: skip
PARAMETER, CHOICE, ELEMENT = "parameter", "choice", "get-tuple-element"
BITCAST = "bitcast"
"""The same elements in memory taken for another shape: it depends on how both lie there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Expression:
    """One operation on others.

    Attributes:
      opcode: As in HLO; `CHOICE` for a branch's results, by the number of the branch.
      shape: Of its result; how that lies in memory does not count.
      operands: Numbers of expressions.
      attributes: What else it depends on.
    """

    opcode: str
    shape: Shapes
    operands: tuple[int, ...]
    attributes: tuple[tuple[str, str], ...]


_Tree = int | tuple["_Tree", ...]


class Expressions:
    """The expressions of one program, or of several that are compared."""

    def __init__(self) -> None:
        self._numbers: dict[Expression, int] = {}
        self._all: list[Expression] = []

    def __getitem__(self, number: int) -> Expression:
        return self._all[number]

    def number(self, expression: Expression) -> int:
        """The number of an expression, new or known."""
        number = self._numbers.setdefault(expression, len(self._all))
        if number == len(self._all):
            self._all.append(expression)
        return number

    def parameter(self, position: int, shape: Shape) -> int:
        """The number of an argument of the program."""
        attributes = (("position", str(position)),)
        return self.number(Expression(PARAMETER, _anyhow(shape), (), attributes))


class Program:
    """The results of a module, as expressions.

    Args:
      module: Parsed.
      expressions: To which its own are added.

    Attributes:
      parameters: Numbers of the arguments, by position.
      results: Numbers of the results.
    """

    def __init__(self, module: Module, expressions: Expressions):
        self._module, self._expressions = module, expressions
        self._prints: dict[str, str] = {}
        entry = module.computations[module.entry]
        shapes = {int(i.operands[0]): i.shape for i in entry if i.opcode == PARAMETER}
        self.parameters = {
            position: expressions.parameter(position, shape)
            for position, shape in shapes.items()
            if isinstance(shape, Shape)
        }
        result = self._result(module.entry, self.parameters)
        self.results = tuple(_flat([result]))

    def _result(self, computation: str, arguments: Mapping[int, _Tree]) -> _Tree:
        values: dict[str, _Tree] = {}
        shapes: dict[str, Shapes] = {}
        result: _Tree = ()
        for i in self._module.computations[computation]:
            shapes[i.name] = i.shape
            if i.opcode == BITCAST:
                i.attributes[BITCAST] = f"{_order(shapes[i.operands[0]])} {_order(i.shape)}"
            values[i.name] = self._value(i, values, arguments)
            if i.is_root:
                result = values[i.name]
        return result

    def _value(
        self, i: Instruction, values: Mapping[str, _Tree], arguments: Mapping[int, _Tree]
    ) -> _Tree:
        if i.opcode == PARAMETER:
            return arguments[int(i.operands[0])]
        if i.opcode == "constant":
            # Elements that are not shown make it another constant than any other.
            shown = i.operands[0] if "..." not in i.operands[0] else i.name
            return self._new(i, (), {"value": shown})
        operands = [values[name] for name in i.operands]
        if i.opcode == "tuple":
            return tuple(operands)
        if i.opcode == ELEMENT and isinstance(operands[0], tuple):
            return operands[0][int(i.attributes["index"])]
        if i.opcode in _CALLS:
            body = (i.attributes.get("calls") or i.attributes["to_apply"]).lstrip("%")
            return self._converted(self._result(body, dict(enumerate(operands))), i.shape)
        if i.opcode == "conditional":
            branches = [
                self._result(body, {0: operand})
                for body, operand in zip(_bodies(i), operands[1:], strict=True)
            ]
            return self._choice(operands[0], branches)
        if i.opcode in _MOVES:
            return self._converted(operands[0], i.shape)
        if i.opcode.removesuffix(DONE) in COLLECTIVES and i.opcode.endswith(DONE):
            return operands[0]
        if i.opcode.removesuffix(START) in COLLECTIVES:
            return self._collective(i, _flat(operands))
        if i.opcode == "slice-start":  # `(operand, result, context)`
            assert isinstance(i.shape, tuple)
            return self._new(i.as_one("slice", i.shape[1]), _flat(operands), {})
        if i.attributes.get("custom_call_target") == '"ConcatBitcast"':
            whole = self._whole_of_slices(_flat(operands), i.shape)
            return self._new(i, _flat(operands), {}) if whole is None else whole
        if i.opcode == "while" and isinstance(operands[0], tuple):
            return self._loop(i, operands[0])
        return self._new(i, _flat(operands), {})

    def _collective(self, i: Instruction, operands: Sequence[int]) -> _Tree:
        """What comes of each operand: that several travel together changes no number."""
        opcode, shape = i.opcode.removesuffix(START), i.shape
        # What starts gives `(operands, results, contexts)`, but for a reduction before jax 0.11.
        is_older = opcode == "all-reduce" and not _is_nested(shape)
        if i.opcode != opcode and not is_older:
            assert isinstance(shape, tuple)
            shape = shape[1]
        told = i.attributes.get("replica_groups", "{}")
        if "device_ids" in i.attributes:  # of a mesh, behind a comma
            told = f"{told}, device_ids={i.attributes['device_ids']}"
        groups = listed_groups(told, self._module.partitions)
        if isinstance(shape, Shape):
            assert len(operands) == 1, i
            return self._new(i.of(opcode, shape), operands, {GROUPS: groups})
        results = []
        for n, (operand, part) in enumerate(zip(operands, shape, strict=True)):
            # All to all, part n of what a partition gets is of partition n.
            is_dealt = opcode == "all-to-all"
            more = {GROUPS: groups} | ({PART: str(n)} if is_dealt else {})
            results.append(self._new(i.of(opcode, part), operands if is_dealt else [operand], more))
        return tuple(results)

    def _converted(self, value: _Tree, shape: Shapes) -> _Tree:
        """What a call or a move gives: on a TPU either may convert on the way."""
        if not isinstance(value, int) or not isinstance(shape, Shape):
            return value
        made = self._expressions[value].shape
        if isinstance(made, Shape) and made.dtype != shape.dtype:
            return self._expressions.number(Expression("convert", _anyhow(shape), (value,), ()))
        return value

    def _whole_of_slices(self, parts: Sequence[int], shape: Shapes) -> int | None:
        """The array of which a TPU has fetched slices, to where they lie as in the whole."""
        slices = [self._expressions[part] for part in parts]
        arrays = {e.operands for e in slices}
        if len(arrays) > 1 or any(e.opcode != "slice" for e in slices):
            return None
        (array,) = arrays.pop()
        ranges = {e.attributes for e in slices}
        sizes = [math.prod(e.shape.dims) for e in slices if isinstance(e.shape, Shape)]
        is_all = isinstance(shape, Shape) and sum(sizes) == math.prod(shape.dims)
        is_it = self._expressions[array].shape == _anyhow(shape)
        return array if is_all and is_it and len(ranges) == len(parts) else None

    def _loop(self, i: Instruction, given: tuple[_Tree, ...]) -> _Tree:
        """What a loop makes of its parts; those that its body hands on are what they were."""
        assert isinstance(i.shape, tuple)
        loop = self._new(i, _flat([given]), {})
        parts: list[_Tree] = [
            self._expressions.number(
                Expression(ELEMENT, _anyhow(shape), (loop,), (("index", str(n)),))
            )
            for n, shape in enumerate(i.shape)
        ]
        returned = self._result(i.attributes["body"].lstrip("%"), {0: tuple(parts)})
        assert isinstance(returned, tuple)
        both = zip(given, parts, returned, strict=True)
        return tuple(before if after == part else part for before, part, after in both)

    def _new(self, i: Instruction, operands: Sequence[int], more: Mapping[str, str]) -> int:
        attributes = {k: v for k, v in i.attributes.items() if k not in _WITHOUT_MEANING} | more
        if i.opcode == "custom-call":
            attributes["backend_config"] = i.attributes.get("backend_config", "")
        attributes |= {f"body {n}": self._print(body) for n, body in enumerate(_bodies(i))}
        listed = tuple(sorted(attributes.items()))
        return self._expressions.number(
            Expression(i.opcode, _anyhow(i.shape), tuple(operands), listed)
        )

    def _choice(self, index: _Tree, branches: Sequence[_Tree]) -> _Tree:
        first = branches[0]
        if isinstance(first, tuple):
            parts = zip(*(b for b in branches if isinstance(b, tuple)), strict=True)
            return tuple(self._choice(index, part) for part in parts)
        shape = self._expressions[first].shape
        return self._expressions.number(
            Expression(CHOICE, shape, tuple(_flat([index, *branches])), ())
        )

    def _print(self, computation: str) -> str:
        """What a computation does, without the names in it, and in whatever order it is written."""
        if computation not in self._prints:
            instructions = self._module.computations[computation]
            by_name, lines = {i.name: i for i in instructions}, dict[str, str]()
            stack = [i.name for i in instructions if i.is_root]
            while stack:
                i = by_name[stack[-1]]
                of = i.operands if i.opcode not in (PARAMETER, "constant") else ()
                if todo := [name for name in of if name not in lines]:
                    stack.extend(todo)
                    continue
                places = list(lines)
                operands = [places.index(n) for n in of] if of else list(i.operands)
                bodies = [self._print(body) for body in _bodies(i)]
                kept = [f"{k}={v}" for k, v in i.attributes.items() if k not in _WITHOUT_MEANING]
                lines[i.name] = f"{i.opcode} {_anyhow(i.shape)} {operands} {kept} {bodies}"
                stack.pop()
            self._prints[computation] = "; ".join(lines.values())
        return self._prints[computation]


def _is_nested(shape: Shapes) -> bool:
    return isinstance(shape, tuple) and isinstance(shape[0], tuple)


def _anyhow(shape: Shapes) -> Shapes:
    """A shape, however it lies in memory."""
    if isinstance(shape, tuple):
        return tuple(map(_anyhow, shape))
    return Shape(shape.dtype, shape.dims, ())


def _order(shape: Shapes) -> str:
    """How an array lies in memory."""
    assert isinstance(shape, Shape)
    return ",".join(map(str, shape.order))


def _bodies(i: Instruction) -> list[str]:
    found = (i.attributes[key].strip("{}") for key in _BODIES if key in i.attributes)
    return [name.lstrip("%") for text in found for name in split(text)]


def _flat(values: Sequence[_Tree]) -> list[int]:
    return [n for v in values for n in (_flat(v) if isinstance(v, tuple) else [v])]
