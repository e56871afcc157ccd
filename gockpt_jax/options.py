"""What a user may set, checked where it is made."""

import dataclasses
from typing import Literal, get_args

Arm = Literal["window", "always"]


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
      host_budget_bytes: Bytes of host memory that pulled and replayed chunks may take in this
        process. `None`: no limit of ours (the state of this process is what a save needs).
      write_limit_bytes: Bytes handed to TensorStore and not yet written. It copies and compresses
        what it is handed, so this bounds the extra memory of a save.
      replay_threads: Threads from which replay runs its programs while a window is open; each keeps
        one to two cores busy. `None`: a quarter of the host's cores, eight at most; more of them
        replay hardly faster and disturb the step. Where training itself runs on the CPU backend it
        is always one.
      arm: `"window"` runs the user's own executable outside windows. `"always"` runs the armed one
        for every step, so that one executable defines the run.
      exact: Forbid replay of arithmetic that the host cannot repeat bit for bit. No plan lets such
        a leaf leave early at present, so both values give the same checkpoint.

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
    host_budget_bytes: int | None = None
    write_limit_bytes: int = 256 * 2**20
    replay_threads: int | None = None
    arm: Arm = "window"
    exact: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        _positive("max_steps", self.max_steps, "Use 1 for a device copy without a window.")
        _positive("write_limit_bytes", self.write_limit_bytes, "The default is 256 MiB.")
        _positive_or_none("steps", self.steps, "Use None to let the planner choose.")
        _positive_or_none(
            "device_budget_bytes", self.device_budget_bytes, "Use None for the default."
        )
        _positive_or_none("host_budget_bytes", self.host_budget_bytes, "Use None for no limit.")
        _positive_or_none("replay_threads", self.replay_threads, "Use None for the default.")
        if self.arm not in get_args(Arm):
            raise ValueError(f"`arm` must be one of {get_args(Arm)}, got {self.arm!r}.")
        if not isinstance(self.exact, bool):
            raise ValueError(f"`exact` must be True or False, got {self.exact!r}.")


def _positive_or_none(name: str, value: int | None, remedy: str) -> None:
    if value is not None:
        _positive(name, value, remedy)


def _positive(name: str, value: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{name}` must be an integer, got {value!r}. {remedy}")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value}. {remedy}")
