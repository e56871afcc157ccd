"""How far two optimizers drift when armed, with fused multiply-add, and why.

L2-coupled Adam and clipped AdamW are those of `bench cut` whose armed runs end further from the
user's than rounding in fp32 explains. Here both runs are compared step for step: from one state, so
that nothing can grow, and running on; the first in bf16, and with the matrix products in fp32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.cut import programs
from bench.cut.measure import differing
from bench.cut.runs import STEPS, Arrays, Step, Traced
from bench.record import Record
from gockpt_jax.training.cut import find_cut

_OPTIMIZER, _B1 = "adam, l2", 0.9
_CLIPPED = "adamw, clipped"
_NOTES = [
    "one step/N: the armed step and the user's, both from the user's state before step N; running/N"
    ": each from its own. By: the largest difference in a leaf, over the leaf's largest value.",
    "other bf16/N: parameters that differ after step N so that they round to another bf16 number.",
    "planted: the user's step N from the user's state, with only the parameters that round to "
    "another bf16 number taken from the armed run; N is the first step that has any.",
    "contracted/WHO/WHAT: elements of the first moment, of those that differ in step 1 from one "
    "state, that WHO computed as if the product with WHAT went into the addition unrounded.",
    "clipped: the other optimizer, in bf16. no key bias: without the biases of the keys, on which "
    "no loss depends (a softmax does not change with a number added to all of its row), and their "
    "moments: what they are given for gradients is rounding alone.",
    "Counts, not times: one run each.",
]


class _Both:
    """The user's step and the armed one, on states that lie on the host."""

    def __init__(self, model: str, optimizer: str = _OPTIMIZER) -> None:
        traced = Traced(*programs.make_step(optimizer, model))
        self.first, self.size = traced.first, len(traced.leaves)
        self.cut = find_cut(traced.leaves, even_for_nothing=False)
        self.user = functools.partial(_on_host, traced.user)
        self.armed = functools.partial(_on_host, traced.armed(self.cut))


def _on_host(step: Step, state: Arrays, n: int) -> Arrays:
    return [np.array(x) for x in step([jnp.array(x) for x in state], n)]


def run(quick: bool) -> Record:
    """Runs both, with the model as it is and with its matrix products in fp32."""
    record = Record("cut_growth", notes=list(_NOTES))
    _compare(_Both("transformer"), "bf16", record)
    _compare(_Both("transformer", _CLIPPED), "clipped", record)
    if not quick:
        _compare(_Both("transformer, fp32"), "fp32", record)
    return record


def _compare(both: _Both, name: str, record: Record) -> None:
    size = both.size
    params = range(len(jax.tree.leaves(both.first()[0])))
    user = armed = [np.array(x) for x in jax.tree.leaves(both.first())]
    planted: Arrays | None = None

    def add(figure: str, value: float) -> None:
        record.samples[f"{name}/{figure}"] = [value]

    for n in range(STEPS):
        new, from_one = both.user(user, n), both.armed(user, n)
        add(f"one step/{n}/by", differing(from_one[:size], new)[1])
        if n == 1 and name == "bf16":
            for figure, count in _contracted(both, user, new, from_one).items():
                add(figure, count)
        if planted is not None:
            add(f"planted/{n}/by", differing(both.user(planted, n), new)[1])
            planted = None
        others = sum(int(_other_bf16(armed[i], user[i]).sum()) for i in params)
        user, armed = new, both.armed(armed, n)[:size]
        add(f"running/{n}/by", differing(armed, user)[1])
        if name == "clipped":
            rest = [_without_keys(both.first(), state) for state in (armed, user)]
            add(f"running/{n}/by, no key bias", differing(*rest)[1])
        now = [_other_bf16(armed[i], user[i]) for i in params]
        add(f"other bf16/{n}", sum(int(x.sum()) for x in now))
        if not others and any(x.any() for x in now):
            planted = list(user)
            for i in params:
                planted[i] = np.where(now[i], armed[i], user[i])


def _contracted(both: _Both, old: Arrays, user: Arrays, armed: Arrays) -> dict[str, int]:
    """How each computed the first moments that differ: b1 * m + (1 - b1) * g."""
    found = {f"contracted/{who}/{what}": 0 for who in ("user", "armed") for what in ("m", "g")}
    b1, rest = np.float32(_B1), np.float32(1 - _B1)
    for group in both.cut.groups:
        (retained,) = group.retained
        g = armed[both.size + both.cut.values.index(retained)]
        for j in group.leaves:
            m = old[j]
            # A product of two fp32 numbers is exact in fp64.
            as_if = {
                "m": (np.float64(b1) * m + (rest * g)).astype(np.float32),
                "g": ((b1 * m) + np.float64(rest) * g).astype(np.float32),
            }
            if min((armed[j] != x).mean() for x in as_if.values()) > 0.01:
                continue  # a second moment
            differ = armed[j] != user[j]
            for who, values in (("user", user), ("armed", armed)):
                for what, expected in as_if.items():
                    found[f"contracted/{who}/{what}"] += int((values[j] == expected)[differ].sum())
            found["contracted/differ"] = found.get("contracted/differ", 0) + int(differ.sum())
    return found


def _without_keys(like: Any, state: Arrays) -> Arrays:
    """A flat state without the keys' third of what is of the shape of queries, keys and values."""
    paths = jax.tree_util.tree_flatten_with_path(like)[0]
    kept = []
    for (path, _), x in zip(paths, state, strict=True):
        is_bias = "['qkv']['bias']" in jax.tree_util.keystr(path)
        kept.append(np.concatenate(np.split(x, 3)[::2]) if is_bias else x)
    return kept


def _other_bf16(a: Any, b: Any) -> np.ndarray:
    half = np.dtype(jax.dtypes.bfloat16)
    return np.asarray(a.astype(half) != b.astype(half))
