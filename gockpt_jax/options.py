"""What a user may set, checked where it is made."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

from gockpt_jax.checks import as_count, is_flag, told

Arm = Literal["window", "always"]
OnFailure = Literal["raise", "demote"]
OnBusy = Literal["wait", "skip", "newest"]
OnSaveError = Literal["raise", "warn"]

MOST_STEPS = 100
"""Of a window. What it costs grows with K(K-1)/2, and so does the time to plan it."""

Rule = Callable[[str, Any], Any]
"""Takes an option's name and what the user gave; returns what is meant, or raises ValueError."""


def _count(advice: str, *, least: int = 1, most: int | None = None) -> Rule:
    return lambda name, value: as_count(name, value, advice, least=least, most=most)


def _number(advice: str, *, most: float | None = None, or_zero: bool = False) -> Rule:
    """Above 0 (or 0 itself), and one that Python can reckon with."""
    least = "at least 0" if or_zero else "above 0"
    expected = f"a number {least}" if most is None else f"{least} and at most {most:g}"

    def rule(name: str, value: Any) -> float:
        try:
            number = math.nan if is_flag(value) or isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        is_meant = 0 < number < math.inf or (or_zero and number == 0)
        if not (is_meant and (most is None or number <= most)):
            raise ValueError(f"`{name}` must be {expected}, got {told(value)}. {advice}")
        return number

    return rule


def _one_of(kind: Any) -> Rule:
    def rule(name: str, value: Any) -> Any:
        if not (isinstance(value, str) and value in get_args(kind)):
            raise ValueError(f"`{name}` must be one of {get_args(kind)}, got {told(value)}.")
        return value

    return rule


def _flag(name: str, value: Any) -> bool:
    if not is_flag(value):
        raise ValueError(f"`{name}` must be True or False, got {told(value)}.")
    return bool(value)


def _audit(name: str, value: Any) -> "Audit":
    if not isinstance(value, Audit):
        raise ValueError(f"`{name}` must be an `Audit` or None, got {told(value)}.")
    return value


def _or_none(rule: Rule) -> Rule:
    return lambda name, value: None if value is None else rule(name, value)


def _check(options: Any, **rules: Rule) -> None:
    """Puts what is meant in the place of what was given."""
    for name, rule in rules.items():
        object.__setattr__(options, name, rule(name, getattr(options, name)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """How replayed chunks are compared with the device's own values at the sealed version.

    A failed audit always fails the save: nothing of it becomes visible, and `AuditError` is raised
    by the next call of the manager. The true leaf cannot be written any more, for the next step has
    donated it.

    Attributes:
      fraction: Part of the bytes that left early which one save compares, in boxes of at least
        4 KiB. They move on with every window, so all is looked at once in about `1 / fraction`
        windows. The default adds 1.6% to the bytes that leave early.
      max_ulps: Units in the last place by which a replayed element may differ. Replay repeats what
        IEEE 754 fixes, so the default is 0. The host flushes denormals to zero, which a GPU does
        not: elements that are no further apart than 64 of the least normal numbers (7.5e-37) are
        taken for equal; in fp64 only where that is nothing beside the leaf's largest value.
      max_relative_error: By how much elements of a chunk may differ all the same, over the largest
        value of the replayed shard. It is the bound for rounding: an element that the updates take
        past zero is many of its own units off, and far below the leaf's scale (of Adam's parameters
        on an H200 up to a million units, and 2e-7). What is no rounding (integers, NaN and numbers)
        it does not excuse, nor fp8, which is compared bit by bit.
      on_failure: `"demote"`: the leaf and those it is updated with are late from then on, so that
        later saves are right. `"raise"`: later windows try again, unless it was replayed up to
        rounding, which would fail again. Programs of several processes always try again.

    Raises:
      ValueError: if a value is out of its range; the message names it.

    Example:
      >>> WindowOptions(audit=Audit(fraction=1.0, on_failure="demote")).audit.max_ulps
      0
      >>> Audit(fraction=2.0)
      Traceback (most recent call last):
        ...
      ValueError: `fraction` must be above 0 and at most 1, got 2.0. Use `audit=None` for no audit.
    """

    fraction: float = 1 / 64
    max_ulps: int = 0
    max_relative_error: float = 0.0
    on_failure: OnFailure = "raise"

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        _check(
            self,
            fraction=_number("Use `audit=None` for no audit.", most=1),
            max_ulps=_count("Use 0 for equality.", least=0),
            max_relative_error=_number("Use 0 for equality.", most=1, or_zero=True),
            on_failure=_one_of(OnFailure),
        )

    @property
    def accepts_rounding(self) -> bool:
        """Whether replay may differ from the device at all."""
        return self.max_ulps > 0 or self.max_relative_error > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How a checkpoint's state leaves the device.

    Attributes:
      max_steps: The largest K the planner may choose, in training steps; `steps` may be more. The
        paper caps K at 7 (arXiv 2511.07035, section 4); gradient traffic grows with K(K-1)/2, so
        more never pays.
      steps: Fixes K, for tests and benchmarks: every predictable save is then a window of this many
        steps (fewer where the saves lie closer together), opening waits for the armed step to
        compile, and groups leave early even where that saves no bytes; but none while saves of one
        process take copies alone, after two of them. At most 100. `None`: the planner chooses.
      device_budget_bytes: Bytes per device that staged copies and retained gradients may take.
        `None`: what the device reports as free, or the whole state where it reports nothing.
      step_secs: Time of one training step, for the plan. `None`: learned while training, without
        waiting for a device.
      link_bytes_per_sec: Rate from one device to the host while all devices of the process send,
        for the plan. `None`: learned from the transfers of earlier saves. What several processes
        have learned differs: the shortest step and the slowest link count (docs/scale.md).
      host_budget_bytes: Bytes of this process's memory for chunks that have been pulled and not yet
        been written, and for what is retained for them. A window opens only if there is room for it
        beside what earlier saves still hold; else the next step tries again with a smaller K, and
        the report says so. Training never waits for room. A save that it cannot hold even alone is
        refused. What is taken beside these is counted, too, but a number that is given here does
        not bound it: `write_limit_bytes` while chunks are being written, the audit's sample, and a
        few MiB per replay thread may come on top. `None`: what one save needs in all (the state,
        two steps' retained values, `write_limit_bytes`, the sample) and a tenth, and with
        `on_busy="newest"` two states more; but not more than the host has left, files in memory
        counted, nor on GPUs than XLA may pin for transfers
        (`XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`, 64 GiB for each). It then puts windows off, and
        refuses no save.
      write_limit_bytes: Bytes of chunks that are being written at one time; a larger chunk goes
        alone. Chunks that are to be compressed count twice. Eight files, or four chunks of 64 MiB,
        keep the disk busy; without a limit, TensorStore's copies and compressed chunks would take
        the size of the state again. A save takes no more memory than this on top of the bytes of
        the state, and 64 MiB where nothing is compressed (`bench storage`, `extra_rss_ratio`): of
        what is on its way to files, no more is ever copied.
      replay_threads: Threads from which replay runs its programs while a window is open; each keeps
        one to two cores busy. `None`: a quarter of the host's cores, eight at most; more of them
        replay hardly faster and disturb the step. Where training itself runs on the CPU backend it
        is always one.
      arm: `"window"` runs the user's own executable outside windows. `"always"` runs the armed one
        for every step, so that one executable defines the run.
      exact: Forbid replay of arithmetic that the host cannot repeat bit for bit: divisions, roots,
        transcendentals (of Adam's parameters, not of its moments). It is done only where no exact
        window fits the device budget and the audit accepts rounding (`max_relative_error` or
        `max_ulps` above 0, or `audit=None`); the report then says so, and the audit how far it
        went.
      audit: What is compared with the device at every seal, and what a difference leads to; `None`:
        nothing.
      on_busy: What an accepted save does that finds the previous one still being written. `"wait"`,
        as stock Orbax does. `"skip"`: it is not made, `save` returns False, and a report says so;
        forced saves and those before a preemption wait all the same. `"newest"`: its state is taken
        at once and waits on the host, `save` returns True, and it is written when the previous one
        is; a newer save that finds it still waiting takes its place, and a report says so. Without
        room in the host budget it is skipped. Several processes do the same, a few calls of the
        wrapped step or of `save` after the previous one has ended. Only a `GoCkptManager` can do
        other than wait.
      on_save_error: What becomes of a save that failed, of which nothing is visible: `"raise"` at
        the next call of the manager or of the wrapped step, or `"warn"` (`SaveFailedWarning`) and
        go on training. What the caller did wrong is always raised.

    Raises:
      ValueError: if a value is out of its range; the message names it.

    Example:
      >>> WindowOptions(max_steps=4).max_steps
      4
      >>> WindowOptions(steps=0)
      Traceback (most recent call last):
        ...
      ValueError: `steps` must be an integer of at least 1 and at most 100, got 0. Use None ...
    """

    max_steps: int = 8
    steps: int | None = None
    device_budget_bytes: int | None = None
    step_secs: float | None = None
    link_bytes_per_sec: float | None = None
    host_budget_bytes: int | None = None
    write_limit_bytes: int = 256 * 2**20
    replay_threads: int | None = None
    arm: Arm = "window"
    exact: bool = False
    audit: Audit | None = Audit()
    on_busy: OnBusy = "wait"
    on_save_error: OnSaveError = "raise"

    @property
    def must_be_exact(self) -> bool:
        """Whether nothing may be replayed up to rounding."""
        return self.exact or (self.audit is not None and not self.audit.accepts_rounding)

    @property
    def most_steps(self) -> int:
        """The largest K that a window may have."""
        return self.steps or self.max_steps

    @property
    def of_the_job(self) -> dict[str, Any]:
        """What the processes of one job must be given alike; the rest each may have of its own."""
        names = "max_steps", "steps", "device_budget_bytes", "arm", "on_busy"
        return {
            **{name: getattr(self, name) for name in names},
            "must be exact": self.must_be_exact,
        }

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        default, measured = "Use None for the default.", "Use None to have it measured."
        _check(
            self,
            max_steps=_count("Use 1 for a device copy without a window.", most=MOST_STEPS),
            steps=_or_none(_count("Use None to let the planner choose.", most=MOST_STEPS)),
            device_budget_bytes=_or_none(_count(default)),
            step_secs=_or_none(_number(measured)),
            link_bytes_per_sec=_or_none(_number(measured)),
            host_budget_bytes=_or_none(_count(default)),
            write_limit_bytes=_count("The default is 256 MiB."),
            replay_threads=_or_none(_count(default)),
            arm=_one_of(Arm),
            exact=_flag,
            audit=_or_none(_audit),
            on_busy=_one_of(OnBusy),
            on_save_error=_one_of(OnSaveError),
        )
