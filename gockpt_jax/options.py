"""What a user may set, checked where it is made."""

import dataclasses
import math
from typing import Any, Literal, get_args

Arm = Literal["window", "always"]
OnFailure = Literal["raise", "demote"]
OnBusy = Literal["wait", "skip", "newest"]
OnSaveError = Literal["raise", "warn"]


def _one_of(name: str, value: Any, kind: Any) -> None:
    if value not in get_args(kind):
        raise ValueError(f"`{name}` must be one of {get_args(kind)}, got {value!r}.")


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
        IEEE 754 fixes, so the default is 0. Denormals are flushed to zero on both sides.
      on_failure: `"demote"`: the leaf and those it is updated with are late from then on, so that
        later saves are right. `"raise"`: later windows try again. Programs of several processes
        always do the latter.

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
    on_failure: OnFailure = "raise"

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        is_number = isinstance(self.fraction, int | float) and not isinstance(self.fraction, bool)
        if not (is_number and 0 < self.fraction <= 1):
            raise ValueError(
                f"`fraction` must be above 0 and at most 1, got {self.fraction!r}. Use "
                "`audit=None` for no audit."
            )
        is_count = isinstance(self.max_ulps, int) and not isinstance(self.max_ulps, bool)
        if not (is_count and self.max_ulps >= 0):
            raise ValueError(
                f"`max_ulps` must be an integer of at least 0, got {self.max_ulps!r}. Use 0 for "
                "equality."
            )
        _one_of("on_failure", self.on_failure, OnFailure)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """How a checkpoint's state leaves the device.

    Attributes:
      max_steps: The largest K the planner may choose, in training steps. The paper caps K at 7
        (arXiv 2511.07035, section 4); gradient traffic grows with K(K-1)/2, so more never pays.
      steps: Fixes K, for tests and benchmarks: every predictable save is then a window of this many
        steps (fewer where the saves lie closer together), opening waits for the armed step to
        compile, and groups leave early even where that saves no bytes. `None`: the planner chooses.
      device_budget_bytes: Bytes per device that staged copies and retained gradients may take.
        `None`: what the device reports as free, or the whole state where it reports nothing.
      step_secs: Time of one training step, for the plan. `None`: learned while training, without
        waiting for a device.
      link_bytes_per_sec: Rate from one device to the host while all devices of the process send,
        for the plan. `None`: learned from the transfers of earlier saves. What several processes
        have learned differs: the shortest step and the slowest link count (docs/scale.md).
      host_budget_bytes: Bytes of this process's memory that saves may take: chunks that have been
        pulled and not yet been written, what is retained for them, and what the writer copies. A
        window opens only if there is room for it beside what earlier saves still hold; else the
        next step tries again with a smaller K, and the report says so. Training never waits for
        room. A save that it cannot hold even alone is refused. `None`: what one save needs (the
        state, two steps' retained values, `write_limit_bytes`) and a tenth, and with
        `on_busy="newest"` two states more; but not more than the host has left, files in memory
        counted. It then puts windows off, and refuses no save.
      write_limit_bytes: Bytes of chunks that are being written at one time; a larger chunk goes
        alone. Chunks that are to be compressed count twice. A save takes no more memory than this
        on top of the state's own bytes, and 64 MiB where chunks are plain files (`bench storage`,
        `extra_rss_ratio`): of what is on its way to files, no more is ever copied.
      replay_threads: Threads from which replay runs its programs while a window is open; each keeps
        one to two cores busy. `None`: a quarter of the host's cores, eight at most; more of them
        replay hardly faster and disturb the step. Where training itself runs on the CPU backend it
        is always one.
      arm: `"window"` runs the user's own executable outside windows. `"always"` runs the armed one
        for every step, so that one executable defines the run.
      exact: Forbid replay of arithmetic that the host cannot repeat bit for bit: divisions, roots,
        transcendentals (of Adam's parameters, not of its moments). It is done only where no exact
        window fits the device budget and the audit accepts rounding (`max_ulps` above 0, or
        `audit=None`); the report then says so, and the audit how far it went.
      audit: What is compared with the device at every seal, and what a difference leads to; `None`:
        nothing.
      on_busy: What an accepted save does that finds the previous one still being written. `"wait"`,
        as stock Orbax does. `"skip"`: it is not made, `save` returns False, and a report says so;
        forced saves and those before a preemption wait all the same. `"newest"`: its state is taken
        at once and waits on the host, `save` returns True, and it is written when the previous one
        is; a newer save that finds it still waiting takes its place, and a report says so. Without
        room in the host budget it is skipped. Several processes do the same, a few calls of the
        wrapped step or of `save` after the previous one has ended. Of `GoCkptManager` only.
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
      ValueError: `steps` must be at least 1, got 0. Use None to let the planner choose.
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

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        _positive("max_steps", self.max_steps, "Use 1 for a device copy without a window.")
        _positive("write_limit_bytes", self.write_limit_bytes, "The default is 256 MiB.")
        _positive_or_none("steps", self.steps, "Use None to let the planner choose.")
        _positive_or_none(
            "device_budget_bytes", self.device_budget_bytes, "Use None for the default."
        )
        _positive_number_or_none("step_secs", self.step_secs)
        _positive_number_or_none("link_bytes_per_sec", self.link_bytes_per_sec)
        _positive_or_none("host_budget_bytes", self.host_budget_bytes, "Use None for the default.")
        _positive_or_none("replay_threads", self.replay_threads, "Use None for the default.")
        _one_of("arm", self.arm, Arm)
        _one_of("on_busy", self.on_busy, OnBusy)
        _one_of("on_save_error", self.on_save_error, OnSaveError)
        if not isinstance(self.exact, bool):
            raise ValueError(f"`exact` must be True or False, got {self.exact!r}.")
        if not isinstance(self.audit, Audit | None):
            raise ValueError(f"`audit` must be an `Audit` or None, got {self.audit!r}.")


def _positive_or_none(name: str, value: int | None, remedy: str) -> None:
    if value is not None:
        _positive(name, value, remedy)


def _positive_number_or_none(name: str, value: float | None) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise ValueError(
            f"`{name}` must be a number above 0, got {value!r}. Use None to have it measured."
        )


def _positive(name: str, value: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{name}` must be an integer, got {value!r}. {remedy}")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}. {remedy}")
