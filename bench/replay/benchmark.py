"""Replay on the CPU: AdamW on fp32 parameters, one and four pending updates.

The contender is the library's own `Replayer`, on memory that lies as pulled chunks do. It is
compared, in turns within one process, with a plain copy on as many threads, with the whole tree
updated by one jitted, donating program, and with `torch.optim.AdamW(fused=True)`.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.record import Record, interleaved, peak_memory, ratios
from gockpt_jax.replay.engine import Replayer
from gockpt_jax.replay.memory import own
from gockpt_jax.replay.programs import PIECE_SIZES
from gockpt_jax.replay.shards import ShardReplay, Update
from gockpt_jax.training.cut import Group
from gockpt_jax.training.graph import flatten
from gockpt_jax.training.recipe import Recipe, make_recipe
from gockpt_jax.training.walk import Leaf

B1, B2, EPS, DECAY, RATE = 0.9, 0.999, 1e-8, 0.01, 1e-3
PENDING = 4
_FLOAT_BYTES = 4
# Of one update on one parameter: three values and a gradient are read, three values written.
_TOUCHED_BYTES = 7 * _FLOAT_BYTES


def adamw(state: Any, g: jax.Array, scales: Any) -> Any:
    """AdamW as optax writes it: decay, bias-corrected moments, learning rate."""
    p, m, v = state
    m = B1 * m + (1 - B1) * g
    v = B2 * v + (1 - B2) * (g * g)
    step = m * scales[0] / (jnp.sqrt(v * scales[1]) + EPS)
    return p - RATE * (step + DECAY * p), m, v


def root_and_division(state: Any, g: jax.Array, scales: Any) -> Any:
    """The two slow operations of AdamW and nothing else, each update's on the one before."""
    return [g / (jnp.sqrt(state[0]) + scales[0])]


def recipe_of(update: Callable[..., Any], states: int) -> Recipe:
    """A whole update as a recipe, cut at the gradient and the bias corrections.

    Of AdamW the parameters would leave late by default and only the moments be replayed; all three
    are the harder case.
    """
    chunk, scalar = jnp.zeros(8), jnp.float32(1)
    traced = jax.jit(update).trace((chunk,) * states, chunk, (scalar, scalar))
    graph = flatten(traced.jaxpr)
    leaves = [Leaf(str(i), graph.inputs[i], graph.outputs[i]) for i in range(states)]
    inputs = graph.inputs[states:]
    return make_recipe(Group(tuple(range(states)), (inputs[0],), tuple(inputs[1:3])), leaves)


@dataclasses.dataclass
class Sizes:
    """How much is replayed: equal leaves, of `elements` each."""

    leaves: int
    elements: int
    repeats: int

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.leaves * self.elements


def run(quick: bool) -> Record:
    """Runs the benchmark.

    Args:
      quick: 16 M parameters instead of 200 M.
    """
    sizes = Sizes(8, 2_000_000, 5) if quick else Sizes(20, 10_000_000, 7)
    record = Record("replay")
    threads = len(os.sched_getaffinity(0))
    record.notes += [
        f"{sizes.parameters / 1e6:.0f} M fp32 parameters in {sizes.leaves} leaves; replay and copy "
        f"on {threads} threads; the whole tree and torch on all cores.",
        "copy_bandwidth_ratio: bytes read and written per second by one AdamW update (28 B per "
        "parameter), over those of np.copyto.",
        f"fused_speedup_*: parameter updates per second with {PENDING} pending updates, over "
        f"{PENDING} single updates of the other.",
        "cpu_ns_per_parameter/*: processor time of all cores together; less moved by other work on "
        "the machine than the ratios of wall time are.",
        "cpu_ns_per_parameter/one_piece/*: one piece again and again, from cache, on one thread: "
        "what of the others is not memory. root_and_division: AdamW's root and division alone, a "
        "bound for exact replay.",
        "extra_memory_ratio: growth of the resident set during replay, over the state's bytes.",
    ]
    with _contenders(sizes, threads, record) as contenders:
        secs = interleaved(contenders, sizes.repeats)
        cpu_secs = interleaved(contenders, sizes.repeats, warm_up=0, clock=time.process_time)
    _conclude(record, secs, sizes)
    for name, values in cpu_secs.items():
        cost = [1e9 * s / sizes.parameters for s in values]
        record.samples[f"cpu_ns_per_parameter/{name}"] = cost
    _one_piece(record)
    return record


def _one_piece(record: Record) -> None:
    """What is left where memory costs nothing: a piece that stays in cache, on one thread."""
    size, times, replayer = Sizes(1, PIECE_SIZES[0], 7), 32, Replayer("gpu", 1)
    shards = {
        "adamw_1": pending_shards(size, 1),
        f"adamw_{PENDING}": pending_shards(size, PENDING),
        f"root_and_division_{PENDING}": pending_shards(size, PENDING, root_and_division, 1),
    }
    contenders = {
        name: functools.partial(replayer.apply, piece * times) for name, piece in shards.items()
    }
    secs = interleaved(contenders, size.repeats, clock=time.process_time)
    for name, values in secs.items():
        cost = [1e9 * s / size.parameters / times for s in values]
        record.samples[f"cpu_ns_per_parameter/one_piece/{name}"] = cost


@contextlib.contextmanager
def _contenders(
    sizes: Sizes, threads: int, record: Record
) -> Iterator[dict[str, Callable[[], Any]]]:
    replayer, four = Replayer("gpu", threads), pending_shards(sizes, PENDING)
    one = [dataclasses.replace(shard, updates=shard.updates[:1]) for shard in four]
    replayer.apply(four)  # compiles
    with peak_memory() as grown:
        replayer.apply(four)
        replayer.apply(one)
        state_bytes = 3 * _FLOAT_BYTES * sizes.parameters
        record.samples["extra_memory_ratio"] = [grown() / state_bytes]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        contenders: dict[str, Callable[[], Any]] = {
            "copy": _copy(four, pool, threads),
            "replay_1": lambda: replayer.apply(one),
            f"replay_{PENDING}": lambda: replayer.apply(four),
            "whole_tree": _whole_tree(one),
        }
        try:
            contenders["torch"] = _torch(one)
        except ImportError:
            record.notes.append("torch is not installed: its figure is left out.")
        yield contenders


def _conclude(record: Record, secs: dict[str, list[float]], sizes: Sizes) -> None:
    copied = 2 * _FLOAT_BYTES * 3 * sizes.parameters
    touched = _TOUCHED_BYTES * sizes.parameters
    fused = secs[f"replay_{PENDING}"]
    record.samples["copy_bandwidth_ratio"] = ratios(
        secs["copy"], secs["replay_1"], touched / copied
    )
    for other in ("whole_tree", "torch"):
        if other in secs:
            name = f"fused_speedup_vs_{other}"
            record.samples[name] = ratios(secs[other], fused, PENDING)
            single = f"single_speedup_vs_{other}"
            record.samples[single] = ratios(secs[other], secs["replay_1"])
    record.samples["copy_gb_per_sec"] = [copied / s / 1e9 for s in secs["copy"]]
    for name, values in secs.items():
        record.samples[f"secs/{name}"] = values


def pending_shards(
    sizes: Sizes, updates: int, update: Callable[..., Any] = adamw, states: int = 3
) -> list[ShardReplay]:
    """Leaves with pending updates, where pulls would have put them: in XLA's memory."""
    recipe, scalars = recipe_of(update, states), (np.float32(1.1), np.float32(1.2))

    def pulled(value: float) -> np.ndarray:
        return own(np.asarray(jnp.full(sizes.elements, value)))

    return [
        ShardReplay(
            recipe,
            tuple(pulled(0.01) for _ in range(states)),
            tuple(Update((pulled(0.1 + n),), scalars) for n in range(updates)),
        )
        for _ in range(sizes.leaves)
    ]


def _copy(shards: list[ShardReplay], pool: Any, threads: int) -> Callable[[], Any]:
    """Copies as many bytes as the state has, each thread its part of each array.

    From one pending gradient to the next, which are alike: no further memory is needed.
    """
    arrays = [[update.retained[0] for update in shard.updates] for shard in shards]
    pairs = [pair for gradients in arrays for pair in itertools.pairwise(gradients)]
    assert len(pairs) == sum(len(shard.states) for shard in shards)
    bounds = np.linspace(0, shards[0].size, threads + 1, dtype=int)

    def part(n: int) -> None:
        for b, a in pairs:
            np.copyto(a[bounds[n] : bounds[n + 1]], b[bounds[n] : bounds[n + 1]])

    return lambda: list(pool.map(part, range(threads)))


def _whole_tree(shards: list[ShardReplay]) -> Callable[[], Any]:
    """One program over all leaves, the old ones donated: what a user would write."""

    def update(states: Any, gradients: Any) -> Any:
        scales = (jnp.float32(1.1), jnp.float32(1.2))
        return [adamw(s, g, scales) for s, g in zip(states, gradients, strict=True)]

    step = jax.jit(update, donate_argnums=0)
    held = [[tuple(jnp.full(x.size, 0.01) + 0 for x in shard.states) for shard in shards]]
    gradients = [jax.device_put(s.updates[0].retained[0], may_alias=True) for s in shards]

    def once() -> None:
        held[0] = jax.block_until_ready(step(held[0], gradients))

    return once


def _torch(shards: list[ShardReplay]) -> Callable[[], Any]:
    """Torch's fused AdamW, on the very memory that replay works on."""
    import torch

    parameters, state = [], {}
    for shard in shards:
        p, m, v, g = map(torch.from_numpy, (*shard.states, shard.updates[0].retained[0]))
        p.grad = g
        parameters.append(p)
        state[p] = {"step": torch.tensor(9.0), "exp_avg": m, "exp_avg_sq": v}
    optimizer = torch.optim.AdamW(
        parameters, lr=RATE, betas=(B1, B2), eps=EPS, weight_decay=DECAY, fused=True
    )
    optimizer.state.update(state)
    return optimizer.step
