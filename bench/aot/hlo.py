"""What a compiled program tells: device memory, copies, collectives."""

import collections
import dataclasses
import re
from typing import Any

_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
# `%name = type opcode(operands)`, where a tuple type holds spaces and comments.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) ([\w-]+)\(", re.MULTILINE)
_COPIES = ("copy", "copy-start")
# What moves or names bytes and computes none: a TPU copies by way of its vector memory, in slices.
# A fusion does what the instructions of its computation do, which are counted.
_NOT_COMPUTING = {
    *_COPIES, "copy-done", "slice", "slice-start", "slice-done", "dynamic-update-slice",
    "reshape", "pad", "concatenate", "fusion", "parameter", "tuple", "get-tuple-element", "bitcast",
    "bitcast-convert", "constant",
}  # fmt: skip
# A TPU joins arrays by padding each, and takes the larger of two, or adds them up: for integers
# that moves bits.
_JOINS = re.compile(r'= [su]\d+\[\S* (?:maximum|add)\(.*op_name="[^"]*concatenate"')
_NAMES_BYTES = re.compile('custom_call_target="(?:ConcatBitcast|AllocateBuffer)"')


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program, as far as it matters here; bytes are per device.

    Attributes:
      argument_bytes: Of all arguments.
      output_bytes: Of all results.
      alias_bytes: Results that take an argument's memory.
      temp_bytes: What the program needs besides.
      copies: Copy instructions, started ones included; those in a loop's body count once.
      collectives: Collective instructions, likewise.
      joins: Instructions that join integers, padded, by arithmetic.
      computing: Other instructions that do more than move or name bytes.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    copies: int
    collectives: int
    joins: int
    computing: int

    @property
    def total_bytes(self) -> int:
        """Device memory while it runs, its arguments and results included."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def read_program(compiled: Any) -> Program:
    """Reads a `jax.stages.Compiled`."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    opcodes = count_opcodes(text)
    computing = sum(n for name, n in opcodes.items() if name not in _NOT_COMPUTING)
    joins = len(_JOINS.findall(text))
    return Program(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        copies=sum(opcodes[name] for name in _COPIES),
        collectives=sum(opcodes[c] + opcodes[c + "-start"] for c in _COLLECTIVES),
        joins=joins,
        computing=computing - joins - len(_NAMES_BYTES.findall(text)),
    )


def count_opcodes(text: str) -> collections.Counter[str]:
    """Instructions by opcode in an HLO module's text, those of called computations included.

    Example:
      >>> count_opcodes("ROOT %c.1 = (f32[4]{0:T(8,128)}, s32[]) copy-start(%p)")
      Counter({'copy-start': 1})
    """
    return collections.Counter(_INSTRUCTION.findall(text))
