"""One way to save, measured in this process: `python -m bench.memory.way WAY DIRECTORY`.

The state is a GPT's: hundreds of fp32 leaves of a few kilobytes to a hundred megabytes, with AdamW.
The loss is elementwise, so a step needs no memory besides the state, and what the process grows by
is what saving takes. On the CPU backend copies "on the device" are in the process too; the library
counts them apart, against the device budget.
"""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import gockpt_jax as gockpt
from bench.device import without_fma
from bench.record import peak_memory, resident_bytes, sampled
from bench.storage.contenders import give_back

_SAMPLE_SECS = 0.005
_WARM_SAVES, _SAVES = 2, 5
_SMALL, _LARGE = (2, 256, 8_000), (12, 768, 32_000)  # 0.04 and 1.3 GB of state


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to save.

    Attributes:
      window: Of `WindowOptions`; `None`: stock's manager.
      interval: Steps between saves; few, where a save shall find the one before still writing.
      host_budget_states: The host budget, in states; `None`: the default.
      wrapped: Whether the step is the manager's; else every save is a snapshot.
      layout: Of the checkpoint; empty: the default.
      plain_malloc: Whether memory comes as malloc gives it; else freed blocks go back at once.
    """

    window: Mapping[str, Any] | None
    interval: int = 8
    host_budget_states: float | None = None
    wrapped: bool = True
    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    plain_malloc: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Of its process. glibc keeps freed blocks below 32 MiB unless its threshold is fixed."""
        return {} if self.plain_malloc else {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}


WAYS = {
    **{f"gockpt_k{k}": Way({"steps": k}) for k in range(2, 7)},
    "snapshot": Way({}, wrapped=False),
    "newest": Way({"steps": 2, "on_busy": "newest"}, interval=3),
    "tight": Way({"steps": 2, "on_busy": "newest"}, interval=3, host_budget_states=1.5),
    "compressed": Way({"steps": 4}, layout={"use_ocdbt": True, "use_compression": True}),
    "orbax_async": Way(None),
    "gockpt_k4_malloc": Way({"steps": 4}, plain_malloc=True),
    "orbax_async_malloc": Way(None, plain_malloc=True),
}
"""`newest`: saves come while the one before is written, and wait; `tight`: there is no room to."""
QUICK = ("gockpt_k4", "newest", "orbax_async")

NOTES = [
    "Growth is over this process's own training without saves, after saves that warmed it up and "
    "after freed memory was given back; kept_bytes is by how much that is over the same before the "
    "first save (compiled programs are in it).",
    "extra_rss_bytes: the most by which the process grew (VmHWM). accounted_bytes: the most that "
    "the library counted on host and device together, sampled every 5 ms; "
    "extra_over_accounted_ratio: above 1 something is not counted.",
    "host_peak_extra_bytes: the most by which the process grew, less what the library counted on "
    "the device at that moment: on the CPU backend that is memory of the process, too. "
    "host_peak_budget_ratio: over host_budget_bytes. reported/...: as the library reports.",
    "Freed blocks go back to the system at once (`MALLOC_MMAP_THRESHOLD_`), so growth is memory in "
    "use. ..._malloc: as glibc is by default: it keeps what XLA's CPU backend and others free.",
    "A process for each way; a sample for each interval: from one save to the next, while the "
    "first is still being written.",
]


def measure(way: Way, directory: Path, size: tuple[int, int, int]) -> dict[str, Any]:
    """Trains with saves and without.

    Args:
      way: To save.
      directory: For the checkpoints.
      size: Layers, width and vocabulary.

    Returns:
      Samples by figure, and what became of the saves.
    """
    state, update = _model(*size)
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    loop = _Loop(state, update, way, directory, state_bytes)
    del state
    first_bytes = loop.resident_without_saves()
    loop.train(_WARM_SAVES)
    loop.finish()
    base_bytes = loop.resident_without_saves()
    seen = len(loop.reports())
    samples: dict[str, list[float]] = {"kept_bytes": [max(0, base_bytes - first_bytes)]}
    for _ in range(_SAVES):
        for name, value in _interval(loop, base_bytes, state_bytes).items():
            samples.setdefault(name, []).append(value)
    loop.finish()
    reports = loop.reports()[seen:]
    loop.close()
    for name in ("peak_host_bytes", "peak_device_bytes", "deferred_steps"):
        if reports:
            samples[f"reported/{name}"] = [float(report[name]) for report in reports]
    told = ("step", "kind", "window_steps", "reason")
    saves = [{name: report[name] for name in told} for report in reports]
    return {"state_bytes": state_bytes, "samples": samples, "saves": saves}


def _interval(loop: "_Loop", base_bytes: int, state_bytes: int) -> dict[str, float]:
    """Trains up to the next save, while the last one is written; what memory was seen."""
    with _sampled(loop.accounts) as peaks, peak_memory(base_bytes) as grown:
        loop.train(1)
        extra_bytes = grown()
    found: dict[str, float] = {
        "extra_rss_bytes": extra_bytes,
        "extra_rss_state_ratio": extra_bytes / state_bytes,
    }
    if loop.host_budget_bytes:
        host_bytes = max(0, peaks.host - base_bytes)
        found |= {
            "accounted_bytes": peaks.accounted,
            "extra_over_accounted_ratio": extra_bytes / peaks.accounted,
            "host_peak_extra_bytes": host_bytes,
            "host_budget_bytes": loop.host_budget_bytes,
            "host_peak_budget_ratio": host_bytes / loop.host_budget_bytes,
        }
    return found


class _Loop:
    """A training loop that saves one way, and can train on without saves.

    Attributes:
      accounts: What the library counts now: bytes on the host, and on the device.
    """

    def __init__(self, state: Any, update: Any, way: Way, directory: Path, state_bytes: int):
        self._state, self._update, self._interval = state, update, way.interval
        self._label = 0
        self.accounts: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._session: Any = None
        options = ocp.CheckpointManagerOptions(save_interval_steps=way.interval, max_to_keep=1)
        if way.window is None:
            self._manager = ocp.CheckpointManager(directory, options=options)
            self._args, self._step = ocp.args.StandardSave, update
            return
        given = way.host_budget_states
        window = gockpt.WindowOptions(
            **way.window, host_budget_bytes=int(given * state_bytes) if given else None
        )
        self._manager = gockpt.GoCkptManager(
            directory, options=options, window=window, pytree_options=way.layout
        )
        self._args = gockpt.GoCkptSave
        self._step = self._manager.wrap(update) if way.wrapped else update
        self._session = session = self._manager._gockpt_session
        self.accounts = lambda: (
            session.host.used_bytes,
            session.resources.device.used_bytes,
        )

    @property
    def host_budget_bytes(self) -> int:
        """Of the library, now; 0 without one."""
        return (self._session.host.limit_bytes or 0) if self._session else 0

    def train(self, saves: int) -> None:
        """Trains through some intervals; each ends with a save, so that no window is open then."""
        for _ in range(saves * self._interval):
            self._label += 1
            self._state = jax.block_until_ready(self._step(self._state))
            self._manager.save(self._label, args=self._args(self._state))

    def finish(self) -> None:
        """Waits until the last save is visible."""
        self._manager.wait_until_finished()

    def resident_without_saves(self) -> int:
        """The most that is resident during steps without saves, once what was freed is back."""
        give_back()
        most = 0
        for _ in range(5):
            self._state = jax.block_until_ready(self._update(self._state))
            most = max(most, resident_bytes())
        return most

    def reports(self) -> list[dict[str, Any]]:
        """Of all saves so far; stock has none."""
        return [dataclasses.asdict(r) for r in getattr(self._manager, "reports", ())]

    def close(self) -> None:
        """Closes the manager."""
        self._manager.close()


@dataclasses.dataclass
class _Peaks:
    """The most that was seen at one moment.

    Attributes:
      host: Resident, less what was counted on the device.
      accounted: Counted, on host and device together.
    """

    host: int = 0
    accounted: int = 1


@contextlib.contextmanager
def _sampled(accounts: Callable[[], tuple[int, int]]) -> Iterator[_Peaks]:
    """Samples memory and accounts."""
    peaks = _Peaks()

    def look() -> None:
        before, resident, after = accounts(), resident_bytes(), accounts()
        # The less of both: what was just being taken or given back is not taken off.
        peaks.host = max(peaks.host, resident - min(before[1], after[1]))
        peaks.accounted = max(peaks.accounted, sum(before))

    with sampled(look, _SAMPLE_SECS):
        yield peaks


def _model(layers: int, width: int, vocabulary: int) -> tuple[Any, Any]:
    """A GPT's leaves with AdamW, and a step that trains them to no end."""
    shapes = {"embedding": (vocabulary, width), "norm": (width,)}
    for n in range(layers):
        for name, shape in {
            "qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width),
            "down": (4 * width, width), "qkv_bias": (3 * width,), "up_bias": (4 * width,),
            "norm_scale": (width,), "norm_bias": (width,),
        }.items():  # fmt: skip
            shapes[f"layer{n:02}_{name}"] = shape
    tx = optax.adamw(1e-3)

    def loss(params: Any) -> Any:
        return sum(jnp.sum(jnp.sqrt(1.0 + x * x)) for x in params.values())

    def update(state: Any) -> Any:
        params, opt = state
        grads = jax.grad(loss)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    def first() -> Any:
        keys = jax.random.split(jax.random.key(0), len(shapes))
        params = {
            name: jax.random.normal(key, shape)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return params, tx.init(params)

    return jax.block_until_ready(jax.jit(first)()), jax.jit(update, donate_argnums=0)


def main() -> None:
    """Measures, and prints one JSON object."""
    name, directory, *quick = sys.argv[1:]
    without_fma()
    print(json.dumps(measure(WAYS[name], Path(directory), _SMALL if quick else _LARGE)))


if __name__ == "__main__":
    main()
