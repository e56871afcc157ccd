"""One window of the example, as the profiler sees it: device, trainer, pulls, replay, write.

The spans are those that any profile of a run shows (`jax.profiler`), with the library's own names.
On a CPU training, replay and writing share the cores: the order is what it shows, not the speed.
"""

import argparse
import contextlib
import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import train_lm
from lm import data, sharding

from bench.device import without_fma
from bench.record import Record, resident_bytes, sampled
from bench.timeline.spans import LANES, ORIGIN, Span, busy_secs, read_spans
from bench.train.model import one_device_mesh

_SAVE_EVERY, _WINDOW = 10, 4
_SAVED = 2 * _SAVE_EVERY  # the third save: nothing compiles any more
_TRACED = range(_SAVED - _WINDOW - 1, _SAVED + 4)
_SAMPLE_SECS = 0.01


@dataclasses.dataclass
class TimelineRecord(Record):
    """A record with a window's spans and memory over time.

    Attributes:
      spans: Of all lanes.
      series: By name, `(seconds, value)` over time; the same clock.
    """

    spans: list[Span] = dataclasses.field(default_factory=list)
    series: dict[str, list[tuple[float, float]]] = dataclasses.field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The record, with times in tenths of a millisecond."""
        spans = [
            {
                "lane": s.lane,
                "name": s.name,
                "start_secs": round(s.start_secs, 4),
                "end_secs": round(s.end_secs, 4),
            }
            for s in self.spans
        ]
        series = {n: [(round(t, 3), v) for t, v in values] for n, values in self.series.items()}
        return {**super().as_json(), "spans": spans, "series": series}


def run(quick: bool) -> TimelineRecord:
    """Trains the example through three saves and profiles the last window.

    Args:
      quick: The smallest network.
    """
    without_fma()
    size, seq_len = ("pico", 64) if quick else ("small", 128)
    with tempfile.TemporaryDirectory() as directory:
        report, spans, series = _profile_window(Path(directory), size, seq_len)
    record = TimelineRecord("timeline", spans=spans, series=series)
    record.samples = {f"{lane}_busy_secs": [busy_secs(spans, lane)] for lane in LANES}
    for name in ("window_steps", "stall_secs", "drain_secs", "write_secs", "commit_secs"):
        record.samples[name] = [float(getattr(report, name))]
    for name in ("state_bytes", "early_bytes", "gradient_bytes", "peak_host_bytes"):
        record.samples[name] = [float(getattr(report, name))]
    record.notes = [
        f"The example's `{size}` network, {seq_len} bytes x 8 per step, fp32, K = {_WINDOW}; steps "
        f"{_TRACED.start} to {_TRACED.stop - 1}, save at {_SAVED}. One run, one window, "
        f"{'on this CPU itself' if _on_cpu() else 'on one device'}.",
        "spans: of `jax.profiler`; on the device, a program from its first operation to its last. "
        "`pulls` is the worker waiting for transfers to land.",
        f"series: resident_bytes of this process, sampled every {_SAMPLE_SECS * 1e3:.0f} ms; "
        "device_bytes where the device tells.",
    ]
    return record


def _profile_window(directory: Path, size: str, seq_len: int) -> tuple[Any, list[Span], Any]:
    args = argparse.Namespace(
        size=size, seq_len=seq_len, dtype="float32", steps=_TRACED.stop, batch_size=8, seed=0,
        directory=directory, save_every=_SAVE_EVERY, max_to_keep=2, window=_WINDOW,
    )  # fmt: skip
    corpus, trace = data.load_corpus(), directory / "trace"
    device, mesh = jax.local_devices()[0], one_device_mesh()
    with jax.set_mesh(mesh), train_lm.make_manager(args) as manager:
        init = functools.partial(train_lm.init_state, args, jax.random.key(args.seed))
        target = sharding.with_fsdp(jax.eval_shape(init), mesh)
        placements = jax.tree.map(lambda leaf: leaf.sharding, target)
        state, _ = train_lm.start_or_resume(manager, init, target)
        train_step = manager.wrap(train_lm.make_train_step(placements))

        def train(state: Any, steps: range) -> Any:
            before = None
            for step in steps:
                batch = data.batch(corpus, seed=0, step=step, size=8, length=seq_len)
                state, loss = train_step(state, jax.device_put(batch, device))
                manager.save(step, args=train_lm.gockpt.GoCkptSave(state))
                if before is not None:
                    before.block_until_ready()  # as a loop does that prints the last loss
                before = loss
            return jax.block_until_ready(state)

        state = train(state, range(_TRACED.start))
        manager.wait_until_finished()
        with _profiled(trace), _sampled_memory(device) as series:
            state = train(state, _TRACED)
            manager.wait_until_finished()
        report = manager.last_report
    if report.kind != "window" or report.step != _SAVED:
        raise RuntimeError(f"expected a window for step {_SAVED}, got {report}")
    return report, read_spans(trace), series


def _on_cpu() -> bool:
    return jax.local_devices()[0].platform == "cpu"


@contextlib.contextmanager
def _profiled(directory: Path) -> Iterator[None]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call would be slower for it
    options.host_tracer_level = 1
    with jax.profiler.trace(directory, profiler_options=options):
        yield


@contextlib.contextmanager
def _sampled_memory(device: Any) -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Samples memory, from the moment that `ORIGIN` marks."""
    readers: dict[str, Callable[[], float]] = {"resident_bytes": resident_bytes}
    if "bytes_in_use" in (device.memory_stats() or {}):
        readers["device_bytes"] = lambda: device.memory_stats()["bytes_in_use"]
    series: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    with jax.profiler.TraceAnnotation(ORIGIN):
        origin = time.perf_counter()

    def look() -> None:
        for name, read in readers.items():
            series[name].append((time.perf_counter() - origin, float(read())))

    with sampled(look, _SAMPLE_SECS):
        yield series
