"""Questions about transfers beside training steps: what is hidden, and what the steps pay."""

import concurrent.futures
import itertools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from bench.transfer.asked import Asked

_PINNED_BLOCKS = 4
_LATER_SECS = 2e-3  # many times what it takes a thread to begin


class Busy:
    """A step that keeps the device busy and donates its state.

    Args:
      asked: The question.
    """

    def __init__(self, asked: Asked):
        width, depth = asked.scale.width, asked.scale.depth

        def step(state: Any) -> Any:
            w, x = state
            for _ in range(depth):
                x = jnp.tanh(x @ w)
            return w + 1e-6, x

        self._step = jax.jit(step, donate_argnums=0)
        with jax.default_device(asked.device):
            dtype = jnp.float32 if asked.device.platform == "cpu" else jnp.bfloat16
            self.state = jax.block_until_ready(
                (jnp.eye(width, dtype=dtype), jnp.ones((width, width), dtype))
            )
        self.run()

    def dispatch(self) -> None:
        """Starts a step."""
        self.state = self._step(self.state)

    def run(self) -> float:
        """Runs a step to its end; returns the seconds."""
        start = time.perf_counter()
        self.dispatch()
        jax.block_until_ready(self.state)
        return time.perf_counter() - start


def ask_overlap(asked: Asked) -> None:
    """Whether a pull runs beside steps, and what it costs them.

    `overlap_ratio`: of the shorter one's time, the part that was hidden (1: all of it). As many
    steps run as take about as long as the pull. `.../later`: the steps begin a while after the
    pull, of which only the rest counts. The runtime starts a transfer on a thread of its own,
    behind what the device has been given by then (XLA's sources): a step that is dispatched at once
    may come before it, and if both figures differ it did.
    """
    busy, mib = Busy(asked), asked.scale.busy_mib
    for n in range(2):
        _pull_secs(asked, asked.fresh(mib, n))
    pull = statistics.median(
        _pull_secs(asked, asked.fresh(mib, n)) for n in range(asked.scale.repeats)
    )
    alone = statistics.median(busy.run() for _ in range(asked.scale.repeats))
    steps, later_secs = max(1, min(200, round(pull / alone))), min(_LATER_SECS, pull / 2)
    asked.note(
        f"overlap: {steps} steps of {1e3 * alone:.2f} ms beside a pull of {mib:g} MiB, which takes "
        f"{1e3 * pull:.2f} ms; later: {1e3 * later_secs:.3g} ms after it began, which do not count."
    )
    for n, (later, secs) in itertools.product(
        range(asked.scale.repeats), (("", 0.0), ("/later", later_secs))
    ):
        if asked.is_over:
            return
        undisturbed = _steps_secs(busy, steps)
        x = asked.fresh(mib, n)
        start = time.perf_counter() + secs
        moved = jax.device_put(x, asked.pinned)  # before the steps, as a window does
        time.sleep(secs)
        with_pull = _steps_secs(busy, steps)
        jax.block_until_ready(moved)
        both = time.perf_counter() - start
        rest = pull - secs  # it went on while the steps were not there yet
        hidden = (undisturbed + rest - both) / min(undisturbed, rest)
        asked.add(f"overlap_ratio{later}", hidden)
        asked.add(f"step_inflation_ratio/pull_beside{later}", with_pull / undisturbed)
        del moved, x


def _pull_secs(asked: Asked, x: jax.Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(jax.device_put(x, asked.pinned))
    return time.perf_counter() - start


def _steps_secs(busy: Busy, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        busy.dispatch()
    jax.block_until_ready(busy.state)
    return time.perf_counter() - start


def ask_pinning(asked: Asked) -> None:
    """Whether steps go on while another thread has pinned memory made, as could be done beforehand.

    The first save of a process waits for it (`docs/accelerators.md`). To be asked before anything
    has gone through that memory. `pinning_gb_per_sec`: of transfers into blocks that are all kept,
    so that the pool has to grow. `step_inflation_ratio/pinning_beside`: the steps that ran
    meanwhile; `.../pinning_beside/longest`: the longest one; both over the median without.
    """
    busy, kept = Busy(asked), []
    sources = [asked.fresh(asked.scale.busy_mib, n) for n in range(_PINNED_BLOCKS)]
    alone = statistics.median(busy.run() for _ in range(asked.scale.repeats))

    def pin() -> None:
        for source in sources:
            kept.append(jax.block_until_ready(jax.device_put(source, asked.pinned)))

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(1, "bench-pin") as pool:
        pinned = pool.submit(pin)
        beside = [busy.run()]
        while not pinned.done():
            beside.append(busy.run())
        pinned.result()
    secs = time.perf_counter() - start
    asked.add("pinning_gb_per_sec", sum(x.nbytes for x in kept) / secs / 1e9)
    asked.add("step_inflation_ratio/pinning_beside", statistics.mean(beside) / alone)
    asked.add("step_inflation_ratio/pinning_beside/longest", max(beside) / alone)
    asked.note(
        f"pinning: {len(beside)} steps of {1e3 * alone:.2f} ms beside {_PINNED_BLOCKS} blocks of "
        f"{asked.scale.busy_mib:g} MiB."
    )


def ask_donated(asked: Asked) -> None:
    """The negative test: a step that donates a buffer which is being pulled, or another one.

    On a GPU the first must wait for the whole transfer, or staging would be needless.
    """
    touch = jax.jit(lambda x: x + 1, donate_argnums=0)
    mib = asked.scale.busy_mib
    jax.block_until_ready(touch(asked.fresh(mib)))
    for n in range(asked.scale.repeats):
        if asked.is_over:
            return
        pulled, other = asked.fresh(mib, n), asked.fresh(mib, n + 1)
        secs = {}
        for name, donated in (("donated", pulled), ("other", other)):
            source = jax.block_until_ready(pulled) if name == "donated" else asked.fresh(mib, n + 2)
            moved = jax.device_put(source, asked.pinned)
            start = time.perf_counter()
            jax.block_until_ready(touch(donated))
            secs[name] = time.perf_counter() - start
            jax.block_until_ready(moved)
        asked.add("donated_step_secs/pulled_buffer", secs["donated"])
        asked.add("donated_step_secs/other_buffer", secs["other"])
