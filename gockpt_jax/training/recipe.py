"""What follows the cut, as data: the elementwise program from a group's old chunks to its new ones.

A recipe has no shapes. The same recipe serves every leaf that is updated the same way, every shard
of it and every slice of a shard, because each operation is elementwise or on scalars. Two groups
with equal recipes share one compilation per chunk size.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gockpt_jax.training.cut import Group
from gockpt_jax.training.primitives import IDENTITIES, PRODUCTS, SUMS, TELL_ZERO
from gockpt_jax.training.values import Value, in_order
from gockpt_jax.training.walk import Leaf


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A scalar known while tracing, held by its bytes so that -0.0 and NaN compare as written."""

    dtype: str
    data: bytes

    def value(self) -> np.ndarray:
        """The scalar, as a 0-d array."""
        return np.frombuffer(self.data, jnp.dtype(self.dtype)).reshape(())


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One operation on registers.

    Attributes:
      primitive: The JAX primitive; `None` spreads a scalar over the chunk.
      params: Its parameters, as sorted pairs.
      operands: Register numbers, or constants.
      is_scalar: Whether the result is one number, not a chunk.
    """

    primitive: Any
    params: tuple[tuple[str, Any], ...]
    operands: tuple[int | Constant, ...]
    is_scalar: bool

    @property
    def name(self) -> str:
        """The operation's name."""
        return "broadcast" if self.primitive is None else str(self.primitive.name)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A program over registers: first the states, the retained values, the scalars; then results.

    Attributes:
      num_states: Old chunks it takes, and new chunks it gives.
      num_retained: Chunks of cut values it takes.
      num_scalars: Scalars it takes.
      instructions: In order; the n-th writes the register after all inputs and earlier results.
      outputs: For each state, the register that holds its new chunk.
    """

    num_states: int
    num_retained: int
    num_scalars: int
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    def __hash__(self) -> int:
        """Programs are looked up by it for every shard that is replayed: worked out once."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        inputs = self.num_states, self.num_retained, self.num_scalars
        return hash((inputs, self.instructions, self.outputs))

    @functools.cached_property
    def changed(self) -> tuple[int, ...]:
        """Positions of the states that an update changes; the others are only read."""
        return tuple(i for i, o in enumerate(self.outputs) if o != i)

    @property
    def is_identity(self) -> bool:
        """Whether nothing changes: the leaves are frozen."""
        return not self.changed

    @functools.cached_property
    def tells_zero(self) -> bool:
        """Whether it tells numbers from zero, which a denormal is to the CPU backend.

        LLVM does not know that: where it sees that a number was made of bits (`through_bits`) it
        compares these.
        """
        return any(
            ins.name in TELL_ZERO or dict(ins.params).get("new_dtype") == jnp.bool_
            for ins in self.instructions
            # Of scalars none is made of bits, and NaN alone is told from itself.
            if not ins.is_scalar and len(set(ins.operands)) == len(ins.operands)
        )

    def apply(
        self,
        states: Sequence[jax.Array],
        retained: Sequence[jax.Array],
        scalars: Sequence[jax.Array],
        fence: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """Applies one update to a chunk; traceable.

        Args:
          states: Old chunks, all of one shape, in their leaves' dtypes.
          retained: Chunks of the cut values, same shape.
          scalars: Captured scalars, shape ().
          fence: An int32 zero that the compiler cannot know. Given, each product passes
            through it on its way into an addition, so that the two are not contracted: accelerators
            do not, the CPU backend would (docs/guarantees.md).

        Returns:
          The new chunks, in the order of `states`.
        """
        shape = states[0].shape
        registers: list[Any] = [*states, *retained, *scalars]

        def read(operand: int | Constant) -> Any:
            return operand.value() if isinstance(operand, Constant) else registers[operand]

        products = set[int]()
        for ins in self.instructions:
            operands = [read(o) for o in ins.operands]
            if ins.name in SUMS:
                operands = [
                    _fenced(x, fence) if o in products else x
                    for o, x in zip(ins.operands, operands, strict=True)
                ]
            elif ins.name in PRODUCTS or any(o in products for o in ins.operands):
                products.add(len(registers))  # or one that is negated, chosen, renamed, halved
            registers.append(_execute(ins, operands, shape))
        return tuple(registers[o] for o in self.outputs)


def make_recipe(group: Group, leaves: Sequence[Leaf]) -> Recipe:
    """Writes down what lies between a group's cut and its new values."""
    inputs = [*(leaves[j].old for j in group.leaves), *group.retained, *group.scalars]
    register = {value: i for i, value in enumerate(inputs)}
    instructions: list[Instruction] = []

    def before(value: Value) -> list[Value]:
        if value in register:
            return []
        assert value.op is not None, "the cut separates every input from the outputs"
        return [v for v in value.op.inputs if v not in register and not v.is_constant]

    for j in group.leaves:
        for value in in_order(leaves[j].new, before):
            if value not in register:
                instructions.append(_instruction(value, register))
                register[value] = len(inputs) + len(instructions) - 1
    outputs = tuple(register[leaves[j].new] for j in group.leaves)
    sizes = (len(group.leaves), len(group.retained), len(group.scalars))
    return Recipe(*sizes, tuple(instructions), outputs)


def _operand(value: Value, register: dict[Value, int]) -> int | Constant:
    if value.is_constant:
        return Constant(str(value.dtype), np.asarray(value.constant, value.dtype).tobytes())
    return register[value]


def _instruction(value: Value, register: dict[Value, int]) -> Instruction:
    op = value.op
    assert op is not None
    operands = tuple(_operand(v, register) for v in op.inputs)
    if op.name == "broadcast_in_dim" or op.name in IDENTITIES:
        return Instruction(None, (), operands, value.shape == ())
    params = dict(op.params)  # all of them: one left out would take another value
    if "sharding" in params:
        params["sharding"] = None  # that of the training mesh
    return Instruction(op.primitive, tuple(sorted(params.items())), operands, value.shape == ())


def _execute(ins: Instruction, operands: list[Any], shape: tuple[int, ...]) -> Any:
    if not ins.is_scalar:
        operands = [jnp.broadcast_to(x, shape) for x in operands]
    if ins.primitive is None:
        return operands[0]
    return ins.primitive.bind(*operands, **dict(ins.params))


def _fenced(product: jax.Array, fence: jax.Array | None) -> jax.Array:
    """The same bits, by a way that multiply-add contraction cannot take."""
    if fence is None or product.dtype not in (jnp.float32, jnp.float64):
        return product
    return through_bits(product, fence)


def through_bits(x: jax.Array, zero: jax.Array) -> jax.Array:
    """The same floats, through an operation on integers with a zero that no compiler can know."""
    integer = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
    bits = lax.bitcast_convert_type(x, integer) ^ lax.convert_element_type(zero, integer)
    return lax.bitcast_convert_type(bits, x.dtype)
