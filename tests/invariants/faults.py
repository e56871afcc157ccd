"""Ways in which a window could go wrong, planted into the library."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from gockpt_jax.replay.engine import Replayer
from gockpt_jax.replay.shards import ShardReplay, Update
from gockpt_jax.window.early import EarlyChunks

NOTHING = "nothing"
OF_CHUNKS = ("replay_off", "gradient_dropped", "gradient_twice", "chunks_swapped")
OF_SCALARS = ("scalar_stale",)


@dataclasses.dataclass
class Injected:
    """How often a fault has struck."""

    times: int = 0


Apply = Callable[[Replayer, Sequence[ShardReplay]], None]


def _replay_off(apply: Apply, injected: Injected) -> Apply:
    """Chunks stay at the version at which they left: a torn checkpoint."""

    def faulty(self: Replayer, shards: Sequence[ShardReplay]) -> None:
        injected.times += 1

    return faulty


def _once(change: Callable[[Sequence[Update]], Sequence[Update]]) -> Any:
    """A fault that strikes the updates of one shard: the first where it would make a difference.

    A gradient may be zero (an embedding row that no batch has met), and then nothing is lost with
    it; the scale of a moment may be such that twice is once.
    """

    def plant(apply: Apply, injected: Injected) -> Apply:
        def faulty(self: Replayer, shards: Sequence[ShardReplay]) -> None:
            for shard in shards:
                old = [x.copy() for x in shard.states]
                apply(self, [shard])
                if injected.times:
                    continue
                wrong = dataclasses.replace(
                    shard, states=tuple(old), updates=tuple(change(shard.updates))
                )
                if wrong.updates:
                    apply(self, [wrong])
                if not all(map(np.array_equal, wrong.states, shard.states)):
                    injected.times += 1
                    for x, y in zip(shard.states, wrong.states, strict=True):
                        x[:] = y

        return faulty

    return plant


def _nothing(apply: Apply, injected: Injected) -> Apply:
    def sound(self: Replayer, shards: Sequence[ShardReplay]) -> None:
        injected.times += 1
        apply(self, shards)

    return sound


_REPLAY = {
    NOTHING: _nothing,
    "replay_off": _replay_off,
    "gradient_dropped": _once(lambda updates: updates[1:]),
    "gradient_twice": _once(lambda updates: (*updates, updates[-1])),
}


def _swap_chunks(monkeypatch: pytest.MonkeyPatch, injected: Injected) -> None:
    """Two chunks of one size change places as they land: shards of a leaf, or two leaves."""
    put = EarlyChunks._put

    def faulty(self: EarlyChunks, *block: Any) -> None:
        put(self, *block)
        if injected.times:
            return
        places = [(leaf.flat, i) for leaf in self._leaves.values() for i in range(len(leaf.flat))]
        for n, (a, i) in enumerate(places):
            for b, j in places[:n]:
                x, y = a[i], b[j]
                if (x.size, x.dtype) == (y.size, y.dtype) and not np.array_equal(x, y):
                    a[i], b[j] = y, x
                    injected.times += 1
                    return

    monkeypatch.setattr(EarlyChunks, "_put", faulty)


def _stale_scalar(monkeypatch: pytest.MonkeyPatch, injected: Injected) -> None:
    """Each update is given the captured scalars of the one before it."""
    update = EarlyChunks._update
    last: list[Any] = []

    def faulty(self: EarlyChunks, cut: Any) -> None:
        last.append(cut.scalars)
        injected.times += len(last) > 1 and bool(cut.scalars)
        update(self, dataclasses.replace(cut, scalars=last[-2:][0]))

    monkeypatch.setattr(EarlyChunks, "_update", faulty)


def inject(fault: str, monkeypatch: pytest.MonkeyPatch) -> Injected:
    """Plants one fault into the library until the test ends."""
    injected = Injected()
    if fault == "chunks_swapped":
        _swap_chunks(monkeypatch, injected)
    elif fault == "scalar_stale":
        _stale_scalar(monkeypatch, injected)
    else:
        monkeypatch.setattr(Replayer, "apply", _REPLAY[fault](Replayer.apply, injected))
    return injected
