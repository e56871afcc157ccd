"""What replay costs a training step that runs beside it, by the number of replay threads.

Training has half of the cores. Replay runs in a process of its own on the same cores or on the
others, or in the training process itself, where the two share the interpreter as well. It is
stopped between the phases, which take turns with phases of undisturbed training.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.record import ROOT, Record, sampled

_PARAMETERS = 16_000_000
_WIDTH, _BATCH = 768, 256


def run(quick: bool) -> Record:
    """Runs the benchmark.

    Args:
      quick: Fewer steps per phase, and at most two replay threads.
    """
    cores = sorted(os.sched_getaffinity(0))
    here, there = cores[: (len(cores) + 1) // 2], cores[(len(cores) + 1) // 2 :] or cores
    os.sched_setaffinity(0, here)  # before JAX sizes its pools
    record = Record("replay_beside_training")
    steps, rounds = (10, 5) if quick else (20, 7)
    record.notes += [
        f"training: an MLP of width {_WIDTH} with Adam on cores {here}, median of {steps} steps per"
        f" phase; replay: {_PARAMETERS / 1e6:.0f} M fp32 parameters, AdamW, one pending update,"
        " again and again.",
        "inflation/WHERE/threads_T: step time with replay beside it, over that of the undisturbed"
        " phase just before. same: own process, the training cores; separate: own process, the"
        " other cores; in_process: the training process, its cores.",
        "rate/WHERE/threads_T: parameter updates per second that replay reached meanwhile, in G"
        " (in_process only).",
    ]
    threads = [n for n in (1, 2, 4) if n <= len(cores) and (n <= 2 or not quick)]
    with contextlib.ExitStack() as stack:
        phases = {
            f"{where}/threads_{n}": stack.enter_context(_other_process(on, n))
            for n in threads
            for where, on in (("same", here), ("separate", there))
        }
        phases |= {
            f"in_process/threads_{n}": stack.enter_context(_this_process(n, record))
            for n in threads
        }
        _measure(record, phases, steps, rounds)
    return record


def _measure(record: Record, phases: dict[str, Any], steps: int, rounds: int) -> None:
    step = _training_step()
    for _ in range(rounds):
        for name, replaying in phases.items():
            alone = _step_secs(step, steps)
            with replaying():
                beside = _step_secs(step, steps)
            record.add(f"inflation/{name}", beside / alone)
            record.add("step_secs/alone", alone)


def _step_secs(step: Callable[[], None], steps: int) -> float:
    secs = []
    for n in range(steps + 2):
        start = time.perf_counter()
        step()
        if n >= 2:
            secs.append(time.perf_counter() - start)
    return statistics.median(secs)


def _training_step() -> Callable[[], None]:
    import jax
    import jax.numpy as jnp
    import optax

    tx = optax.adam(1e-3)
    weights = [jnp.eye(_WIDTH) * 0.5 for _ in range(3)]
    held = [(weights, tx.init(weights))]
    x = jnp.ones((_BATCH, _WIDTH))

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    @jax.jit
    def update(state: Any, x: Any) -> Any:
        weights, opt = state
        updates, opt = tx.update(jax.grad(loss)(weights, x), opt, weights)
        return optax.apply_updates(weights, updates), opt

    def step() -> None:
        held[0] = jax.block_until_ready(update(held[0], x))

    return step


def _replaying(threads: int) -> Callable[[], None]:
    from bench.replay.benchmark import Sizes, pending_shards
    from gockpt_jax.replay.engine import Replayer

    replayer = Replayer("gpu", threads)
    shards = pending_shards(Sizes(4, _PARAMETERS // 4, 0), updates=1)
    return lambda: replayer.apply(shards)


def replay_for_ever(threads: int) -> None:
    """What the other process does, until it is killed."""
    replay = _replaying(threads)
    replay()
    print("ready", flush=True)
    while True:
        replay()


@contextlib.contextmanager
def _other_process(cores: list[int], threads: int) -> Iterator[Any]:
    script = (
        f"import os; os.sched_setaffinity(0, {cores});"
        f"from bench.replay.beside_training import replay_for_ever; replay_for_ever({threads})"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n", "the replaying process did not start"
        child.send_signal(signal.SIGSTOP)

        @contextlib.contextmanager
        def replaying() -> Iterator[None]:
            child.send_signal(signal.SIGCONT)
            try:
                yield
            finally:
                child.send_signal(signal.SIGSTOP)

        yield replaying
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def _this_process(threads: int, record: Record) -> Iterator[Any]:
    replay = _replaying(threads)
    replay()

    @contextlib.contextmanager
    def replaying() -> Iterator[None]:
        done = 0

        def replay_once() -> None:
            nonlocal done
            replay()
            done += 1

        start = time.perf_counter()
        with sampled(replay_once, every_secs=0):
            yield
        rate = done * _PARAMETERS / (time.perf_counter() - start) / 1e9
        record.add(f"rate/in_process/threads_{threads}", rate)

    yield replaying
