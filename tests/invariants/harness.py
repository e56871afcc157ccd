"""One run of a program with windows beside one without, and all that the two show.

A run of some 20 updates and four saves serves three invariants, so it is made once per program and
number of devices (`outcome`), whichever test asks first and in whichever pytest-xdist worker.
"""

import contextlib
import dataclasses
import fcntl
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from bits import Bits, by_path, differing, to_host
from programs import PROGRAMS, Job
from programs.cases import IS_CAMPAIGN

import gockpt_jax as gockpt

from .watch import Buffers, PullWatch

# Version of each save -> K of its window, where `WindowOptions` asks for the largest of them: the
# distance between saves where that is less. The step is armed from its third call on, so the first
# K is 3. The last window opens after a stretch of unarmed steps. Each block of a window is a
# program to compile: `make invariants` has windows of eight.
SAVES: Mapping[int, int] = {4: 3, 6: 2, 7: 1} | ({20: 8} if IS_CAMPAIGN else {14: 4})
SHORT: Mapping[int, int] = {5: 4}
DEVICES = (1, 8)


def on_both(name: str) -> pytest.MarkDecorator:
    """One program on one device and on eight; a test that names it runs where it is compiled."""
    return pytest.mark.parametrize(("name", "devices"), [(name, d) for d in DEVICES])


@dataclasses.dataclass
class Save:
    """One checkpoint: what its report says, and which leaves are not those given to `save`."""

    version: int
    kind: str
    steps: int
    reason: str
    early_bytes: int
    late_leaves: list[str]
    torn: list[str]


@dataclasses.dataclass
class Outcome:
    """What a run with windows showed, beside a run of the user's own step.

    Attributes:
      saves: One per checkpoint.
      differing: Path of a leaf -> elements that differ from the plain run at the end, how many it
        has, and the largest difference over the leaf's largest value.
      own_calls: Versions at which the user's own executable was called.
      changed_arguments: Versions at which it was called with other objects than the loop's.
      plain_traces: Traces of the user's function in the plain run, which came first and began with
        an empty jit cache.
      traces: Those in the run with windows, which found all of that in the cache.
      can_be_armed: Whether anything may leave early.
      structures: Tree structures that the state has had after an update.
      pulls: Transfers to the host that were looked at.
      unsafe_pulls: Those of a buffer of the live state.
      unlike_buffers: Versions at which other leaves than in the plain run were donated, or
        reused the old state's memory.
      donated: Largest number of leaves that one armed step of a window donated.
    """

    saves: list[Save]
    differing: dict[str, tuple[int, int, float]]
    own_calls: list[int]
    changed_arguments: list[int]
    plain_traces: int
    traces: int
    can_be_armed: bool
    structures: int
    pulls: int
    unsafe_pulls: list[str]
    unlike_buffers: list[int]
    donated: int


def measure_difference(a: np.ndarray, b: np.ndarray) -> tuple[int, int, float]:
    """Elements that differ in any bit, all elements, largest difference over the largest value."""
    bits = f"u{a.itemsize}"
    count = int((a.reshape(-1).view(bits) != b.reshape(-1).view(bits)).sum())
    wide_a, wide_b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    worst = np.abs(wide_a - wide_b).max(initial=0.0) / (np.abs(wide_b).max(initial=0.0) or 1.0)
    return count, int(a.size), float(worst)


def what_to_save(name: str, state: Any) -> Any:
    """The state, but for arrays with no elements: neither stock Orbax nor we save those."""
    if name != "zero_size":
        return state
    return {path: leaf for path, leaf in by_path(state).items() if jnp.size(leaf)}


def restore_with_stock(directory: Any, version: int, like: Any, *, to_devices: bool = True) -> Bits:
    """What stock Orbax makes of a checkpoint, on the host.

    Args:
      directory: The manager's.
      version: The checkpoint's label.
      like: A tree of the same structure, shapes and dtypes.
      to_devices: Restore into the placements of `like`; else into numpy arrays, which is faster.
    """

    def target(leaf: Any) -> Any:
        if to_devices or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return np.empty(leaf.shape, leaf.dtype)

    path = Path(directory) / str(version) / "state"
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as stock:
        args = ocp.args.StandardRestore(jax.tree.map(target, like))
        return to_host(stock.restore(path, args=args))


class Spied:
    """A jitted step as the user's own object, which notes how it is called."""

    def __init__(self, jitted: Any):
        self._jitted = jitted
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((args, kwargs))
        return self._jitted(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)


@contextlib.contextmanager
def traces_of(step: Any) -> Iterator[list[str]]:
    """Collects the traces of a jitted step's function."""
    seen: list[str] = []

    def listen(event: str, _: float, **what: Any) -> None:
        if event.endswith("jaxpr_trace_duration") and what.get("fun_name") == step.__name__:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        if hasattr(jax.monitoring, "unregister_event_duration_listener"):
            jax.monitoring.unregister_event_duration_listener(listen)
        else:  # jax 0.7
            jax.monitoring.clear_event_listeners()


def run_plain(name: str, job: Job, saves: Mapping[int, int]) -> tuple[Any, list[Buffers]]:
    """The user's loop without us; it looks at its state where the other one does."""
    state, buffers = job.state, []
    for version in range(1, max(saves) + 1):
        before = Buffers.of(state)
        state = job.advance(job.step, state, version - 1)
        buffers.append(before.after(state))
        if version in saves:
            to_host(what_to_save(name, state))
    return state, buffers


def run_with_windows(
    name: str, job: Job, saves: Mapping[int, int], directory: Path
) -> tuple[Any, list[Buffers], Outcome]:
    """The same loop with a window before each save."""
    spied = Spied(job.step)
    state, buffers, wanted, structures = job.state, [], {}, set()
    own_calls: list[int] = []
    changed: list[int] = []
    options = ocp.CheckpointManagerOptions(max_to_keep=None)
    window = gockpt.WindowOptions(steps=max(saves.values()))
    with (
        gockpt.GoCkptManager(directory, options=options, window=window) as manager,
        PullWatch() as watch,
        traces_of(job.step) as traces,
    ):
        wrapped = manager.wrap(spied, **job.wrap_kwargs)
        targets = iter(saves)
        manager.expect_save(in_steps=next(targets))

        def call(*args: Any, **kwargs: Any) -> Any:
            calls = len(spied.calls)
            with watch.live(args, kwargs, wrapped):
                result = wrapped(*args, **kwargs)
            for seen_args, seen_kwargs in spied.calls[calls:]:
                own_calls.append(version - 1)
                if not _same_objects((args, kwargs), (seen_args, seen_kwargs)):
                    changed.append(version - 1)
            return result

        for version in range(1, max(saves) + 1):
            before = Buffers.of(state)
            state = job.advance(call, state, version - 1)
            buffers.append(before.after(state))
            structures.add(jax.tree.structure(state))
            if version not in saves:
                continue
            saved = what_to_save(name, state)
            wanted[version] = to_host(saved)
            with watch.live((state,), {}, wrapped):
                manager.save(version, args=gockpt.GoCkptSave(saved))
            if (target := next(targets, None)) is not None:
                manager.expect_save(in_steps=target - version)
        manager.wait_until_finished()
        reports = {report.step: report for report in manager.reports}
    assert all(report.error is None for report in reports.values()), reports
    like = what_to_save(name, state)
    last = max(saves)
    torn = {
        v: differing(restore_with_stock(directory, v, like, to_devices=v == last), wanted[v])
        for v in reports
    }
    outcome = Outcome(
        saves=[
            Save(v, r.kind, r.window_steps, r.reason, r.early_bytes, list(r.late_leaves), torn[v])
            for v, r in reports.items()
        ],
        differing={}, own_calls=own_calls, changed_arguments=changed,
        plain_traces=0, traces=len(traces),
        can_be_armed=bool(wrapped.program and wrapped.program.cut.groups),
        structures=len(structures),
        pulls=watch.count, unsafe_pulls=watch.unsafe, unlike_buffers=[], donated=0,
    )  # fmt: skip
    return state, buffers, outcome


def _same_objects(given: Any, seen: Any) -> bool:
    """Whether two calls have the very same arguments: containers are rebuilt by `*args`."""
    (args, kwargs), (seen_args, seen_kwargs) = given, seen
    return (
        len(args) == len(seen_args)
        and all(a is b for a, b in zip(args, seen_args, strict=True))
        and kwargs.keys() == seen_kwargs.keys()
        and all(kwargs[k] is seen_kwargs[k] for k in kwargs)
    )


def play(name: str, devices: int, directory: Path) -> Outcome:
    """Runs a program without windows, then with them, and compares."""
    program = PROGRAMS[name]
    job = program.build(devices)
    # Tests share programs' steps. One that ran long ago would run here without a trace, while what
    # `.trace` looks up, of which JAX keeps 2,048 for all that is jitted, may be gone: a trace would
    # be counted that the run with windows is not to blame for.
    job.step.clear_cache()
    with traces_of(job.step) as plain_traces:
        plain, plain_buffers = run_plain(name, job, SAVES)
    expected = to_host(plain)
    state, buffers, outcome = run_with_windows(name, program.build(devices), SAVES, directory)
    got = to_host(state)
    outcome.differing = {
        path: measure_difference(got[path], expected[path]) for path in differing(got, expected)
    }
    outcome.plain_traces = len(plain_traces)
    outcome.unlike_buffers = [
        version for version, pair in enumerate(zip(buffers, plain_buffers, strict=True))
        if pair[0] != pair[1]
    ]  # fmt: skip
    armed = [b for v, b in enumerate(buffers) if v not in outcome.own_calls]
    outcome.donated = max((len(b.donated) for b in armed), default=0)
    return outcome


def outcome(name: str, devices: int, shared: Path) -> Outcome:
    """The outcome of `play`, made once for all tests and all workers.

    `shared` is a folder that all pytest-xdist workers see.
    """
    path = shared / f"{name}-{devices}.json"
    with open(shared / f"{name}-{devices}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            directory = Path(tempfile.mkdtemp(dir=shared))
            found = play(name, devices, directory)
            shutil.rmtree(directory)
            path.write_text(json.dumps(dataclasses.asdict(found)))
    fields = json.loads(path.read_text())
    saves = [Save(**save) for save in fields.pop("saves")]
    return Outcome(saves=saves, **fields)
