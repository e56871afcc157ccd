"""The transfer's questions to an accelerator: each a function, each caught on its own.

How fast each way to the host is, cold and warm; whether a pull runs beside a busy step and what it
costs that step; what a pull of a donated buffer does (the negative test: the step must wait for
it); whether the way from pinned memory to the replay's backend copies anything.

    record = Record("gpu")
    answer(record, quick=True, limit_secs=120)

A question that fails leaves a note and the others go on. On the CPU backend all of them run at toy
size, which shows that they run and nothing else.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from bench.raw_link import raw_link_secs
from bench.record import Record
from gockpt_jax.transfer.block import block_of
from gockpt_jax.transfer.chunks import Chunk, Source

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is moved and how often.

    Attributes:
      sizes_mib: Of the arrays that are pulled.
      busy_mib: Of what is pulled beside a step.
      width: Of the busy step's matrices.
      depth: Products in one step.
      repeats: Timed runs of each.
    """

    sizes_mib: tuple[float, ...]
    busy_mib: float
    width: int
    depth: int
    repeats: int

    @classmethod
    def of(cls, platform: str, *, quick: bool) -> "Scale":
        """The scale for a platform; toy size on the CPU backend."""
        if platform == "cpu":
            return cls((0.25, 1), 1, 128, 4, 3)
        if quick:
            return cls((1, 16, 256), 256, 4096, 16, 5)
        return cls((0.0625, 1, 16, 64, 256, 1024), 1024, 8192, 16, 9)


class Deadline:
    """When to stop asking.

    Args:
      limit_secs: From now on; `None`: never.
    """

    def __init__(self, limit_secs: float | None):
        self._at = None if limit_secs is None else time.perf_counter() + limit_secs

    @property
    def is_over(self) -> bool:
        """Whether no further measurement should begin."""
        return self._at is not None and time.perf_counter() > self._at


@dataclasses.dataclass
class Asked:
    """What every question is given.

    Attributes:
      record: Takes samples and notes.
      device: The device in question.
      scale: How much.
      deadline: When to stop.
    """

    record: Record
    device: jax.Device
    scale: Scale
    deadline: Deadline

    def add(self, figure: str, *samples: float) -> None:
        """Adds samples to a figure."""
        self.record.samples.setdefault(figure, []).extend(samples)

    def note(self, text: str) -> None:
        """Adds a note."""
        self.record.notes.append(text)

    def fresh(self, mib: float, seed: int = 0) -> jax.Array:
        """A float32 array on the device that is nobody else's, finished."""
        size = max(1, int(mib * _MIB) // 4)
        with jax.default_device(self.device):
            return jax.block_until_ready(jnp.arange(size, dtype=jnp.float32) + seed)

    @property
    def pinned(self) -> Any:
        """The sharding of the device's pinned host memory."""
        return SingleDeviceSharding(self.device, memory_kind="pinned_host")


def answer(
    record: Record, *, quick: bool, limit_secs: float | None = None, device: Any = None,
    questions: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Asks every question, in order of worth, until the time is over.

    Args:
      record: Takes samples and notes.
      quick: Fewer sizes and repeats.
      limit_secs: No measurement begins after this; the one that runs is finished.
      device: Which; the first local one if `None`.
      questions: Names of `QUESTIONS`; all if `None`.
    """
    device = device or jax.local_devices()[0]
    scale = Scale.of(device.platform, quick=quick)
    asked = Asked(record, device, scale, Deadline(limit_secs))
    for name in questions or QUESTIONS:
        if asked.deadline.is_over:
            asked.note(f"{name}: not asked, the time was over.")
            continue
        try:
            QUESTIONS[name](asked)
        except Exception as error:  # one answer less, not all of them
            asked.note(f"{name}: failed: {type(error).__name__}: {str(error)[:300]}")
    _conclude(asked)


# Ways to the host: each starts a transfer and returns what waits for its end.

Way = Callable[[Asked, jax.Array], Any]


def _pinned_put(asked: Asked, x: jax.Array) -> np.ndarray:
    return np.asarray(jax.block_until_ready(jax.device_put(x, asked.pinned)))


def _async_copy(asked: Asked, x: jax.Array) -> np.ndarray:
    x.copy_to_host_async()
    return np.asarray(x)


def _plain_asarray(asked: Asked, x: jax.Array) -> np.ndarray:
    return np.asarray(x)


def _put_on_cpu(asked: Asked, x: jax.Array) -> Any:
    return jax.block_until_ready(jax.device_put(x, jax.local_devices(backend="cpu")[0]))


def _host_output(asked: Asked, x: jax.Array) -> np.ndarray:
    return np.asarray(jax.block_until_ready(_mover(asked.pinned)(x)))


@functools.cache
def _mover(place: Any) -> Any:
    return jax.jit(jnp.copy, out_shardings=place)


def _library(asked: Asked, x: jax.Array) -> Any:
    """As the library does it: staged into a fresh buffer, pulled, seen as an array."""
    block = block_of([Chunk.whole(Source.of(x))])
    return block.start_pull(block.stage([x])).result()


WAYS: Mapping[str, Way] = {
    "library": _library,
    "pinned_put": _pinned_put,
    "copy_to_host_async": _async_copy,
    "asarray": _plain_asarray,
    "host_output": _host_output,
    "put_on_cpu": _put_on_cpu,
}


def ask_ways(asked: Asked) -> None:
    """GB/s of every way by size: the first of a size is cold, the others are warm."""
    asked.note(
        "pull_gbps/WAY/SIZE: from the call until the host has the bytes. cold: the first transfer "
        "of that size; the source is a new array each time, since JAX keeps the host's copy."
    )
    failed: set[str] = set()
    for mib in asked.scale.sizes_mib:
        for name, way in WAYS.items():
            if name in failed or asked.deadline.is_over:
                continue
            try:
                _ask_way(asked, name, way, mib)
            except Exception as error:
                failed.add(name)
                asked.note(f"{name} at {mib:g} MiB: {type(error).__name__}: {str(error)[:200]}")


def _ask_way(asked: Asked, name: str, way: Way, mib: float) -> None:
    compiled = asked.fresh(mib)
    if way is _library:
        block_of([Chunk.whole(Source.of(compiled))]).programs()
    if way is _host_output:
        jax.block_until_ready(_mover(asked.pinned)(compiled))
    del compiled
    for n in range(asked.scale.repeats + 1):
        if asked.deadline.is_over:
            return
        x = asked.fresh(mib, n)
        start = time.perf_counter()
        kept = way(asked, x)
        secs = time.perf_counter() - start
        state = "warm" if n else "cold"
        asked.add(f"pull_gbps/{name}/{mib:g}MiB/{state}", x.nbytes / secs / 1e9)
        del kept, x


def ask_raw_link(asked: Asked) -> None:
    """GB/s of the driver's own copy into pinned memory, without JAX."""
    if asked.device.platform == "cpu":
        asked.note("raw_link: there is no link on the CPU backend.")
        return
    for mib in asked.scale.sizes_mib:
        if asked.deadline.is_over:
            return
        x = asked.fresh(mib)
        secs = raw_link_secs(x.unsafe_buffer_pointer(), x.nbytes, asked.scale.repeats)
        asked.add(f"raw_link_gbps/{mib:g}MiB", *(x.nbytes / s / 1e9 for s in secs))


# A busy step.


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
    steps run as take about as long as the pull.
    """
    busy, mib = Busy(asked), asked.scale.busy_mib
    for n in range(2):
        _pull_secs(asked, asked.fresh(mib, n))
    pull = statistics.median(
        _pull_secs(asked, asked.fresh(mib, n)) for n in range(asked.scale.repeats)
    )
    alone = statistics.median(busy.run() for _ in range(asked.scale.repeats))
    steps = max(1, min(200, round(pull / alone)))
    asked.note(f"overlap: {steps} steps of {1e3 * alone:.2f} ms beside a pull of {mib:g} MiB.")
    for n in range(asked.scale.repeats):
        if asked.deadline.is_over:
            return
        undisturbed = _steps_secs(busy, steps)
        x = asked.fresh(mib, n)
        start = time.perf_counter()
        moved = jax.device_put(x, asked.pinned)  # before the steps, as a window does
        with_pull = _steps_secs(busy, steps)
        jax.block_until_ready(moved)
        both = time.perf_counter() - start
        hidden = (undisturbed + pull - both) / min(undisturbed, pull)
        asked.add("overlap_ratio", hidden)
        asked.add("step_inflation_ratio/pull_beside", with_pull / undisturbed)
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


def ask_donated(asked: Asked) -> None:
    """The negative test: a step that donates a buffer which is being pulled, or another one.

    On a GPU the first must wait for the whole transfer, or staging would be needless.
    """
    touch = jax.jit(lambda x: x + 1, donate_argnums=0)
    mib = asked.scale.busy_mib
    jax.block_until_ready(touch(asked.fresh(mib)))
    for n in range(asked.scale.repeats):
        if asked.deadline.is_over:
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


def ask_pointers(asked: Asked) -> None:
    """Whether pinned memory, its NumPy view and the CPU backend's array are one memory (1) or not.

    And whether a staged copy is another memory than its source (0).
    """
    x = asked.fresh(1)
    pinned = jax.block_until_ready(jax.device_put(x, asked.pinned))
    view = np.asarray(pinned)
    at = pinned.unsafe_buffer_pointer()
    asked.add("same_memory/pinned_to_numpy", float(view.ctypes.data == at))
    cpu = jax.local_devices(backend="cpu")[0]
    there = jax.block_until_ready(jax.device_put(view, cpu))
    asked.add("same_memory/numpy_to_cpu", float(there.unsafe_buffer_pointer() == view.ctypes.data))
    asked.note(f"pinned memory starts at a multiple of {at & -at} bytes.")
    copied = jax.block_until_ready(jax.jit(jnp.copy)(x))
    same = copied.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    asked.add("same_memory/staged_copy", float(same))


def ask_dispatch(asked: Asked) -> None:
    """What starting transfers costs the trainer's thread: 100 small ones, one of their size."""
    count = 100
    small = [asked.fresh(1 / 64, n) for n in range(count)]
    large = asked.fresh(count / 64)
    for n in range(asked.scale.repeats + 1):
        if asked.deadline.is_over:
            return
        for name, arrays in (("small", small), ("packed", [large])):
            start = time.perf_counter()
            moved = [jax.device_put(x, asked.pinned) for x in arrays]
            secs = time.perf_counter() - start
            jax.block_until_ready(moved)
            if n:
                asked.add(f"dispatch_us_per_put/{name}", 1e6 * secs / len(arrays))


QUESTIONS: Mapping[str, Callable[[Asked], None]] = {
    "pointers": ask_pointers,
    "raw_link": ask_raw_link,
    "ways": ask_ways,
    "overlap": ask_overlap,
    "donated": ask_donated,
    "dispatch": ask_dispatch,
}


def _conclude(asked: Asked) -> None:
    """`pull_link_ratio`: the library's warm pull of the largest size, over the raw link's."""
    figures = asked.record.figures
    mib = max(asked.scale.sizes_mib)
    raw = figures.get(f"raw_link_gbps/{mib:g}MiB")
    ours = asked.record.samples.get(f"pull_gbps/library/{mib:g}MiB/warm")
    if raw and ours:
        asked.add("pull_link_ratio", *(gbps / raw for gbps in ours))
    else:
        asked.note("pull_link_ratio: not measured, the link or the pull has no figure.")
