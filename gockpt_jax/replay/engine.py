"""Replay: updates applied to shards on the CPU backend, where the shards lie.

A shard is flat here: a recipe is elementwise, so its shape does not matter. It is cut into pieces
of a few sizes, for which there are programs. A piece's updates are applied in one pass: read from
the shard, computed into a buffer that stays in cache, copied back. Several pieces are in flight: a
thread starts two, and copies the one back while the other runs (docs/decisions/0009).
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from gockpt_jax import _compat
from gockpt_jax.compiling import unwatched
from gockpt_jax.errors import ReplayError
from gockpt_jax.replay.memory import Scratch
from gockpt_jax.replay.programs import (
    FUSED_UPDATES,
    Compiled,
    ReplayProgram,
    ReplaySpec,
    cut_up,
    fused,
)
from gockpt_jax.replay.shards import ShardReplay

_ZERO = np.zeros((), np.int32)
_DONE = object()


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a shard and the programs that bring it up to date.

    Attributes:
      shard: Where it belongs.
      part: Its elements.
      size: Elements that the programs take; more than the part has, if it must be padded.
      programs: In order, with the number of updates that each applies.
    """

    shard: ShardReplay
    part: slice
    size: int
    programs: tuple[tuple[int, Compiled], ...]


class Replayer:
    """Applies updates to shards.

    Args:
      platform: Where training runs. For an accelerator's run, products are fenced off from the
        additions they feed, because accelerators do not contract them and the CPU backend would.
        A run on the CPU backend contracts as its own compiler does, and so does its replay.
      threads: How many pieces run side by side; `None`: the default. One where training itself
        runs on the CPU backend.

    Attributes:
      shares_backend: Whether training runs on the CPU backend, as replay does.
      threads: How many pieces run side by side.
      device: Where replay runs.
    """

    def __init__(self, platform: str, threads: int | None = None):
        self.shares_backend = platform == "cpu"
        # Where training runs on the CPU backend, replay shares its devices' queues. A queue that is
        # full of replays behind a step which waits for another device's part of a collective can
        # keep the threads from which that part would run: then nothing moves again. One at a time.
        self.threads = 1 if self.shares_backend else threads or default_threads()
        self.device = replay_device()

    @classmethod
    def of(cls, leaves: Sequence[jax.Array], threads: int | None) -> "Replayer":
        """For a run whose state has these leaves, donated or not.

        Raises:
          ReplayError: if there is no CPU backend.
        """
        # Not `devices()`: another wrapped step may have run last, and these are donated.
        device: Any = next(iter(leaves[0].sharding.device_set))
        return cls(device.platform, threads)

    def apply(self, shards: Sequence[ShardReplay]) -> None:
        """Applies updates to shards, in place; returns when all is done.

        Args:
          shards: No two share memory that is written.

        Raises:
          ReplayError: if the arrays of a shard do not fit together.
        """
        pieces = collections.deque(piece for shard in shards for piece in self._pieces(shard))
        dtypes = {d for shard in shards for d in shard.spec.dtypes}
        errors: list[BaseException] = []

        def work(in_flight: int) -> None:
            try:
                with unwatched(), _compat.wide_numbers(dtypes):
                    self._replay_all(pieces, in_flight, errors)
            except BaseException as error:
                errors.append(error)

        _side_by_side(work, _shares(min(self.threads, len(pieces))))
        if errors:
            raise errors[0]

    def scratch_bytes(self, shards: Sequence[ShardReplay]) -> int:
        """Bytes that `apply` needs beside the shards while it runs."""
        wanted = {
            (size, tuple(shard.states[i].itemsize for i in shard.recipe.changed))
            for shard in shards
            for _, size in cut_up(shard.size)
        }
        return self.threads * sum(size * sum(itemsizes) for size, itemsizes in wanted)

    def compile_ahead(self, specs: Sequence[tuple[ReplaySpec, int]], max_updates: int) -> None:
        """Has the programs compiled for shards to come, on a thread of their own.

        Args:
          specs: Pairs of what a shard's programs are made from, and the size of the shard.
          max_updates: The most updates that will be pending at once.
        """
        for updates in FUSED_UPDATES:
            for spec, elements in specs if updates <= max_updates else ():
                if updates not in spec.fused_updates:
                    continue
                for size in dict.fromkeys(size for _, size in cut_up(elements)):
                    self._program(spec, updates, size).compile_ahead()

    def _program(self, spec: ReplaySpec, updates: int, size: int) -> ReplayProgram:
        return ReplayProgram(spec, updates, size, not self.shares_backend, self.device)

    def _pieces(self, shard: ShardReplay) -> Iterator[_Piece]:
        arrays = [*shard.states, *(x for update in shard.updates for x in update.retained)]
        if len(sizes := {x.size for x in arrays}) > 1:
            raise ReplayError(
                f"replay got chunks of different sizes {sorted(sizes)}; please report"
            )
        spec = shard.spec
        counts = list(fused(len(shard.updates), spec.fused_updates))
        programs: dict[int, tuple[tuple[int, Compiled], ...]] = {}
        for part, size in cut_up(shard.size):
            if size not in programs:
                programs[size] = tuple((n, self._program(spec, n, size).compiled()) for n in counts)
            yield _Piece(shard, part, size, programs[size])

    def _replay_all(
        self, pieces: collections.deque[_Piece], in_flight: int, errors: list[BaseException]
    ) -> None:
        """Replays pieces until there are none left, or an error.

        Args:
          pieces: Shared with other threads.
          in_flight: How many run at once. While one runs, another is copied back.
          errors: Of all threads.
        """
        scratch, running = Scratch(), collections.deque[Generator[None]]()
        with contextlib.ExitStack() as ended:
            while not errors:
                while len(running) < in_flight and (piece := _next(pieces)) is not None:
                    started = self._replay(piece, scratch)
                    ended.callback(started.close)
                    next(started)
                    running.append(started)
                if not running:
                    return
                oldest = running.popleft()
                if next(oldest, _DONE) is not _DONE:
                    running.append(oldest)

    def _replay(self, piece: _Piece, scratch: Scratch) -> Generator[None]:
        """Applies all updates to a piece while it is in cache; yields while a program runs."""
        shard, changed = piece.shard, piece.shard.recipe.changed
        states = [_padded(x[piece.part], piece.size) for x in shard.states]
        free = scratch.free[piece.size, *(states[i].dtype for i in changed)]
        buffers = free.pop() if free else self._new_buffers([states[i] for i in changed])
        updates = iter(shard.updates)
        for count, program in piece.programs:
            arguments = [
                ([_padded(x[piece.part], piece.size) for x in u.retained], list(u.scalars))
                for u in itertools.islice(updates, count)
            ]
            buffers = program(states, arguments, buffers, _ZERO)
            try:
                yield
            finally:  # also where it is closed: then nothing may still read the shard
                jax.block_until_ready(buffers)
            for i, result in zip(changed, buffers, strict=True):
                np.copyto(states[i], scratch.view(result), casting="no")
        free.append(buffers)
        for i in changed:
            part = shard.states[i][piece.part]
            if part.size < piece.size:
                np.copyto(part, states[i][: part.size])

    def _new_buffers(self, like: Sequence[np.ndarray]) -> list[jax.Array]:
        # Copied: memory of NumPy's own could not be handed on.
        return [
            jax.device_put(np.zeros(x.size, x.dtype), self.device, may_alias=False) for x in like
        ]


def default_threads() -> int:
    """Threads that replay runs on unless it is told: a quarter of the cores, eight at most.

    Beside a training step on the same two cores, a second and a fourth thread replayed no faster
    than one, and the step paid for them (docs/decisions/0011). Eight read
    and write what a host's memory gives.
    """
    return min(8, max(1, (os.cpu_count() or 1) // 4))


def replay_device() -> jax.Device:
    """The CPU device that replays.

    Raises:
      ReplayError: if `JAX_PLATFORMS` leaves no CPU backend beside the accelerator.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        raise ReplayError(
            "replay needs JAX's CPU backend beside the accelerator, but `JAX_PLATFORMS` excludes "
            "it. Unset `JAX_PLATFORMS`, or add cpu to it (for example `JAX_PLATFORMS=cuda,cpu`)."
        ) from error


def _padded(part: np.ndarray, size: int) -> np.ndarray:
    if part.size == size:
        return part
    padded = np.zeros(size, part.dtype)
    padded[: part.size] = part
    return padded


def _next(pieces: collections.deque[_Piece]) -> _Piece | None:
    try:
        return pieces.popleft()
    except IndexError:
        return None


def _shares(in_flight: int) -> list[int]:
    """Splits a number of pieces in flight into two per thread: one runs, one is copied back."""
    return [2] * (in_flight // 2) + [1] * (in_flight % 2)


def _side_by_side(work: Callable[[int], None], shares: Sequence[int]) -> None:
    """Does shares of a work on this thread and on further ones; returns when all have ended."""
    helpers: list[threading.Thread] = []
    # None may be had any more, while the interpreter ends: then this thread does it all.
    with contextlib.suppress(RuntimeError):
        for share in shares[1:]:
            helper = threading.Thread(target=work, args=(share,), name="gockpt-replay")
            helper.start()
            helpers.append(helper)
    work(shares[0] if shares else 1)
    for helper in helpers:
        helper.join()
