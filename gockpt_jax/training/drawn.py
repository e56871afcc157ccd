"""What number a value is to a compiler.

A compiler finds that two values are one once it has rewritten both, by rules that are many, and
others in its next version: it turns `x - 0.1` into `x + -0.1`, orders operands, drops a `max` that
is taken twice. None of them changes what is computed. So values are worked out here, of arguments
drawn at random: those that a compiler may take for one are one number, however they are written
and however deep that is. What is not elementwise gives any numbers, and may be whatever is made of
the same: a sum of sums is the sum of all, what is sorted alone is itself, and of two arrays put
together a part is one of them. But of a matrix product nobody finds that it is what it was made of.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from gockpt_jax.training.primitives import MATRIX_PRODUCTS, SAME_NUMBERS, SOME_NUMBERS
from gockpt_jax.training.values import Op, Value, contracted, in_order, without_walls


def _chosen(which: Any, *cases: Any) -> Any:
    if is_secret(which):
        return np.nan
    chosen = cases[0]
    for n, case in enumerate(cases):
        chosen = np.where(which >= n, case, chosen)
    return chosen


# Of constants every compiler works these out on the host, rounded as IEEE 754 says.
_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide,
    "neg": np.negative, "abs": np.abs, "sign": np.sign, "max": np.maximum, "min": np.minimum,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high), "square": np.square,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
    "select_n": _chosen, "choice": _chosen,
}  # fmt: skip
# Rounded by each machine in its own way.
_OTHERS: Mapping[str, Callable[..., Any]] = {
    "sqrt": np.sqrt, "rsqrt": lambda x: 1.0 / np.sqrt(x), "cbrt": np.cbrt, "pow": np.power,
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p,
    "tanh": np.tanh, "logistic": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "sin": np.sin, "cos": np.cos, "tan": np.tan,
}  # fmt: skip
# Of flags; of bits they are another matter.
_LOGICAL: Mapping[str, Callable[..., Any]] = {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not,
}  # fmt: skip


class Source(bytes):
    """Names an argument, sums of products, or what anything else that is not elementwise gives.

    The same of the same, and of nothing else; what they are made of may be deep.

    Attributes:
      roots: Of the last, of which arguments and products it is made.
    """

    roots: "frozenset[Source]"

    @classmethod
    def of(
        cls, arguments: int, near: "frozenset[Source]" = frozenset(), *, is_product: bool = False
    ) -> "Source":
        """Names one.

        Args:
          arguments: Of the step, from which it is computed: a bit for each.
          near: Of the last kind, what it is made of.
          is_product: Whether it is of the second.
        """
        told = f"{is_product} {arguments:x} ".encode()
        source = cls(hashlib.blake2b(told + b"".join(sorted(near)), digest_size=16).digest())
        source.roots = _union([made_of.roots or frozenset({made_of}) for made_of in near])
        return source


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """What a value is, and what it is made of.

    Attributes:
      drawn: Its numbers, of arguments drawn at random; one for a constant, NaN if the compiler
        alone knows it.
      near: What it is made of by elementwise operations.
      far: What those of them that are as large as this are made of, in a way not worked out.
    """

    drawn: Any
    near: frozenset[Source] = frozenset()
    far: frozenset[Source] = frozenset()

    def may_equal(self, other: "Number") -> bool:
        """Whether nobody knows that it is not the other, though they are other numbers."""
        if not self.far or other.near <= self.near:  # then the numbers tell
            return False
        return all(
            source.roots is self.far  # all gradients of a loop, say: not compared for each again
            or all(root in self.near or root in self.far for root in source.roots or (source,))
            for source in other.near
        )


def _union(sets: Sequence[frozenset[Source]]) -> frozenset[Source]:
    """One of them, if it holds the others: a norm of all gradients is not copied for each leaf."""
    largest = max(sets, key=len, default=frozenset())
    others = [each for each in sets if each is not largest and not each <= largest]
    return largest.union(*others) if others else largest


def worked_out(value: Value) -> Number:
    """What a value is: worked out once, of what is worked out first."""
    value = without_walls(value)
    if value.number is None:
        for made in in_order(value, _unknown):
            if made.number is None:
                with np.errstate(all="ignore"):
                    made.number = _work_out(made)
    found: Number = value.number
    return found


def _unknown(value: Value) -> Sequence[Value]:
    """What has to be worked out before a value: once, be it one of a thousand results."""
    op = value.op
    if op is None or op.near is not None:
        return ()
    inputs = [without_walls(v) for v in op.inputs]
    if not (todo := [v for v in inputs if v.number is None]):
        op.near = _union([v.number.near for v in inputs])
    return todo


def _work_out(value: Value) -> Number:
    if value.is_constant:
        return Number(_of_constant(value))
    if (op := value.op) is None:
        return Number(_drawn(value, value.index), frozenset({Source.of(value.arguments)}))
    if value.is_folded:
        return Number(_folded(value, op, list(map(_known, op.inputs))))
    if op.name in SAME_NUMBERS | SOME_NUMBERS:
        number = _known(op.inputs[min(value.index, len(op.inputs) - 1)])
        return Number(_typed(value, number), op.near, _far(op, value.size))
    if work_out := _elementwise(op):
        number = work_out(*map(_known, op.inputs))
        if np.any(np.isfinite(number)):  # else it is nothing that can be compared
            return Number(number, op.near, _far(op, value.size))
    if (is_product := _is_product(value)) not in op.sources:
        near = frozenset[Source]() if is_product else op.near
        op.sources[is_product] = Source.of(op.arguments, near, is_product=is_product)
    source = op.sources[is_product]
    return Number(_drawn(value, "of", hex(value.arguments)), frozenset({source}), source.roots)


def _known(value: Value) -> Any:
    """The numbers of what was worked out before."""
    return without_walls(value).number.drawn


def _far(op: Op, size: int) -> frozenset[Source]:
    found: frozenset[Source] | None = op.far.get(size)
    if found is None:
        large = (without_walls(v).number for v in op.inputs if v.size >= size)
        found = op.far[size] = _union([number.far for number in large])
    return found


def _typed(value: Value, number: Any) -> Any:
    return number != 0 if value.dtype == jnp.bool_ else 1.0 * number


def _is_product(value: Value) -> bool:
    """Whether a value adds up products of several elements; of a loop, whether its turns do."""
    value = without_walls(value)
    while (op := value.op) is not None:
        if op.name in SAME_NUMBERS:
            value = op.inputs[min(value.index, len(op.inputs) - 1)]
        elif op.turn:
            value = op.turn[value.index]
        else:
            return _adds_products(op)
        value = without_walls(value)
    return False


def _adds_products(op: Op) -> bool:
    """Whether an operation adds up products of several elements: no compiler undoes that."""
    if op.name in MATRIX_PRODUCTS:
        return any(size > 1 for size in contracted(op))
    return op.name == "conv_general_dilated" and op.inputs[1].size > 1


def _elementwise(op: Op) -> Callable[..., Any] | None:
    if op.name == "integer_pow":
        return lambda x: x ** op.params["y"]
    if op.name in _LOGICAL:
        return _LOGICAL[op.name] if op.inputs[0].dtype == jnp.bool_ else None
    return _ELEMENTWISE.get(op.name) or _OTHERS.get(op.name)


def _folded(value: Value, op: Op, given: Sequence[Any]) -> Any:
    """What is made of constants, rounded after each operation as the compiler does.

    Whether it drops a rounding to less than fp32, because another follows, it alone knows.
    """
    work_out = np.sqrt if op.name == "sqrt" else _ELEMENTWISE.get(op.name)
    is_real = _is_numeric(value) and not jnp.issubdtype(value.dtype, jnp.complexfloating)
    is_told = is_real and (work_out or op.name in SAME_NUMBERS - {"reduce_precision"})
    if not is_told or any(np.ndim(x) or np.float32(x) != x for x in given):
        return np.nan
    typed = [np.asarray(x, v.dtype) for x, v in zip(given, op.inputs, strict=True)]
    number = np.asarray(work_out(*typed) if work_out else typed[0])
    wide = np.asarray(work_out(*given) if work_out else given[0])
    made = np.float64(number.astype(value.dtype))
    is_narrow = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 4
    return np.nan if is_narrow and made != wide else made


def _of_constant(value: Value) -> Any:
    """The number of a constant, if it is one; some that are drawn, if it has several."""
    if not _is_numeric(value):
        return np.nan
    numbers = np.asarray(value.constant, value.dtype)
    if not np.iscomplexobj(numbers) and numbers.size and np.all(numbers == numbers.flat[0]):
        return np.float64(numbers.flat[0])
    return _drawn(value, hashlib.blake2b(numbers.tobytes()).digest())  # it may be large


def _is_numeric(value: Value) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.number) or value.dtype == jnp.bool_)


def is_secret(number: Any) -> bool:
    """Whether it is that of a constant which the compiler alone knows."""
    return not np.ndim(number) and bool(np.isnan(number))


def _drawn(value: Value, *what: Any) -> Any:
    """Many numbers of either sign, large and small, the same of the same in every process.

    Of whole ones one is 0, and some are beyond all that a step may compare with.
    """
    digest = hashlib.blake2b(repr(what).encode()).digest()
    bits = np.frombuffer(digest, "<u2")
    numbers = np.where(bits & 1, 1, -1) * 10.0 ** (bits / 2.0**14 - 2.0)
    if value.dtype == jnp.bool_:
        return numbers > 0
    if jnp.issubdtype(value.dtype, jnp.integer):
        numbers[-3:] = 1e30, -1e30, 0.0
    return abs(numbers) if jnp.issubdtype(value.dtype, jnp.unsignedinteger) else numbers
