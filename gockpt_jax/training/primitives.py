"""What is known of JAX's primitives (0.7.2 to 0.12) by their names: all of it, and nowhere else.

First families, by what they compute; then, made of these, the answers to what is asked of an
operation. A primitive that is not named is not repeated and ends no chain of factors: not to know
one can only make leaves late.
"""

import types


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Families.

SUMS, PRODUCTS = _names("add sub add_any"), _names("mul square integer_pow")
MATRIX_PRODUCTS = _names("dot_general ragged_dot_general")
CUMULATIVE = _names("cumsum cumprod cummax cummin cumlogsumexp")
OF_MATRICES = _names("eigh qr cholesky svd lu triangular_solve")
COMPARISONS, LOGICAL = _names("eq ne lt le gt ge"), _names("and or xor not")
STEPS = _names("floor ceil sign")
FUNCTIONS = _names(
    """sqrt rsqrt cbrt exp exp2 expm1 log log1p pow tanh logistic sin cos tan asin acos atan atan2
    sinh cosh asinh acosh atanh erf erfc"""
)
# They only say something about their operand.
IDENTITIES = _names("name copy sharding_constraint stop_gradient")
# Of one array all elements elsewhere, some of them, each several times; of several arrays all.
LAYOUTS = _names("optimization_barrier reshape transpose squeeze rev")
PARTS = _names("slice split unstack dynamic_slice gather")
SPREADS, JOINS = _names("broadcast_in_dim tile"), _names("concatenate stack pad")
# Their body is the function itself; by the parameter that holds it. A gradient often comes straight
# out of a rematerialised block: what made it must be seen.
CALLS = {
    "jit": "jaxpr", "remat2": "jaxpr", "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
}  # fmt: skip

# What is known of results.

# Without operands, and known to the compiler.
KNOWN = _names("iota platform_index")
# They give all devices that take part the same result.
MEETINGS = _names("psum psum_invariant pmax pmin all_gather")

# What the host repeats (`exact.py`).

# They select or move bits, and are exact for every type. Of what was rounded they are what is
# rounded after.
EXACT = IDENTITIES | LOGICAL | _names(
    "select_n max min neg abs clamp shift_left shift_right_logical shift_right_arithmetic"
)  # fmt: skip
# Exact likewise, but of what was rounded they are something else.
# The first of the smallest numbers make what is made of zero, or something else by far.
TELL_ZERO = COMPARISONS | STEPS
LOOKS = TELL_ZERO | _names("is_finite round")
# Within a few ULPs on every machine, though not the same bits.
ROUNDED = FUNCTIONS | SUMS | PRODUCTS | _names("div")
# Of constants every compiler works these out on the host, rounded as IEEE 754 says. Not of what is
# made of constants: there it may first make another expression of all.
WORKED_OUT = _names("div sqrt")
# What is in one place of the result comes out of others, even where all shapes are alike.
MOVES = LAYOUTS - {"optimization_barrier"} | PARTS | JOINS
MOVES |= MATRIX_PRODUCTS | CUMULATIVE | OF_MATRICES | _names("sort")

# What compilers merge (`merging.py`).

# Two of these, multiplied, are one of them or none.
MELTING = _names("sqrt rsqrt exp exp2 pow")
# The larger of two of these is one of the larger operand.
RISING = _names("sqrt cbrt exp exp2 expm1 log log1p tanh logistic erf")
# Where a chain of factors ends for certain: whatever is not named XLA may move, drop or merge. Of
# `log(exp(x))` it makes `x`; what else ends none at some sizes, `may_be_erased` tells.
ENDS = MATRIX_PRODUCTS | CUMULATIVE | COMPARISONS | LOGICAL | STEPS | FUNCTIONS - {"exp", "log"}
ENDS |= OF_MATRICES | _names(
    """conv_general_dilated scan while cond gather sort ffi_call scatter scatter-add scatter-mul
    scatter-min scatter-max erf_inv lgamma digamma round rem nextafter is_finite random_bits
    random_wrap random_unwrap threefry2x32 iota argmax argmin top_k psum psum_invariant all_gather
    reduce_scatter all_to_all ppermute"""
)

# What number a value is (`drawn.py`, `numbers.py`).

# An operand's: elsewhere, or in another type.
SAME_NUMBERS = IDENTITIES | LAYOUTS | SPREADS
SAME_NUMBERS |= _names("convert_element_type reduce_precision reshard")
# Some of an operand's, and maybe others: as the parameters are, all and no others.
SOME_NUMBERS = PARTS | _names("bitcast_convert_type pad")
# An operand's, times others.
SCALES = IDENTITIES | _names("mul div neg")

# Ours, in the place of primitives.

# What makes one shard of an argument of a `shard_map`.
ENTER = types.SimpleNamespace(name="shard_map")
# `select_n` between what a compiler may take out of branches.
CHOICE = types.SimpleNamespace(name="choice")
# What one turn of a loop is given by the turn before.
CARRIED = types.SimpleNamespace(name="carried")
