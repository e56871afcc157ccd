"""The ways to checkpoint that `bench train` compares, behind one face.

Each is set up as somebody who knows it well would: the same save policy, the same retention. What
differs is how the state leaves the device, and the layout on disk where a library's default does.
"""

import concurrent.futures
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

import gockpt_jax as gockpt
from bench.record import OptionError
from bench.train.link import Link
from bench.train.model import Job
from bench.train.orbax import InBackground, array_registry
from gockpt_jax.transfer.meter import LINK

DEFAULT = ("ideal", "gockpt", "orbax_async", "gockpt_k4", "device_copy", "orbax_async_plain",
           "orbax_async_background", "orbax_sync")  # fmt: skip
"""Modes in the order of their worth, should the time not suffice for all.

Where a device copy fits, `gockpt` is one: `gockpt_k4` is the window.
"""
_STOCK = re.compile(r"(?P<way>orbax_sync|orbax_async|orbax_async_background|device_copy)(_plain)?")
_GOCKPT = re.compile(r"gockpt(?:_k(?P<steps>\d+)|_b(?P<percent>\d+))?")
_PART_OF_HOST = 0.75  # for gockpt's chunks, where the host's memory was given


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all modes share.

    Attributes:
      job: What is trained.
      interval: Steps between saves.
      directory: Of all modes' checkpoints.
      link: A slower link between device and host; `None`: the real one.
      state_bytes: Of the state.
      device_budget_bytes: For gockpt; `None`: its own default.
      host_budget_bytes: Likewise.
      step_secs: Of an undisturbed step, which a longer run would have measured by itself.
    """

    job: Job
    interval: int
    directory: Path
    link: Link | None
    state_bytes: int
    device_budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    step_secs: float | None = None


def host_budget_bytes(host_gib: float | None) -> int | None:
    """Of host memory that was given, what gockpt may have; `None`: its own default."""
    return int(_PART_OF_HOST * host_gib * 2**30) if host_gib else None


def refuse_unknown(name: str) -> None:
    """Raises `OptionError` if there is no such mode."""
    if not (name == "ideal" or _STOCK.fullmatch(name) or _GOCKPT.fullmatch(name)):
        raise OptionError(
            f"there is no mode {name!r}; give some of {', '.join(DEFAULT)}, stock's with _plain, "
            "gockpt_k<K>, or gockpt_b<percent of the state that may be staged and retained on the "
            "device>."
        )


def make_mode(name: str, setting: Setting) -> "Mode":
    """Makes a mode.

    Raises:
      OptionError: if there is no such mode.
    """
    refuse_unknown(name)
    if name == "ideal":
        return Mode(setting)
    if found := _STOCK.fullmatch(name):
        stock = DeviceCopy if found["way"] == "device_copy" else Stock
        return stock(setting, name)
    found = _GOCKPT.fullmatch(name)
    assert found is not None, "it would have been refused"
    budget_bytes = setting.device_budget_bytes
    if found["percent"]:
        budget_bytes = setting.state_bytes * int(found["percent"]) // 100
    return GoCkpt(setting, name, int(found["steps"]) if found["steps"] else None, budget_bytes)


class Mode:
    """A training loop's way to checkpoint; this one, `ideal`, makes none.

    Attributes:
      step: One update: `(state, batch) -> (state, loss)`.
    """

    def __init__(self, setting: Setting):
        self.step = setting.job.donating

    def save(self, label: int, state: Any) -> bool:
        """Called after every update; True if a save was accepted."""
        return False

    def is_saving(self) -> bool:
        """Whether an accepted save is not visible yet."""
        return False

    def finish(self) -> None:
        """Waits until the last save is visible."""

    def reports(self) -> list[dict[str, Any]]:
        """What the library itself says of its saves."""
        return []

    def settle(self) -> None:
        """Waits for what a longer run would have had since its beginning."""

    def clean(self) -> None:
        """Deletes its checkpoints, between phases: all modes share one disk."""

    def close(self) -> None:
        """Ends it."""


class Managed(Mode):
    """A checkpoint manager, stock's or ours: called after every step, it saves if its policy says.

    Args:
      setting: What all modes share.
      manager: The manager.
      wrapped: What makes the state an argument of `save`.
    """

    def __init__(
        self, setting: Setting, manager: ocp.CheckpointManager, wrapped: Callable[[Any], Any]
    ):
        super().__init__(setting)
        self._manager = manager
        self._wrapped = wrapped

    def save(self, label: int, state: Any) -> bool:
        """Saves if the policy says so."""
        return bool(self._manager.save(label, args=self._wrapped(state)))

    def is_saving(self) -> bool:
        """As the manager says."""
        return bool(self._manager.is_saving_in_progress())

    def finish(self) -> None:
        """Waits for the manager."""
        self._manager.wait_until_finished()

    def clean(self) -> None:
        """Deletes what the manager keeps."""
        for label in self._manager.all_steps():
            self._manager.delete(label)

    def close(self) -> None:
        """Closes the manager."""
        self._manager.close()


class Stock(Managed):
    """`ocp.CheckpointManager`; asynchronous unless it is `orbax_sync`, its layout unless `_plain`.

    `orbax_async_background` moves everything in the background: the one setting of Orbax 0.12 that
    does (a callback of `ArrayHandler` and a limit, here the whole state, so that the old state is
    free as soon as may be). The state that it reads must stay alive, so its step does not donate.
    """

    def __init__(self, setting: Setting, name: str):
        limits: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        if name.endswith("_plain"):  # its fastest on a local disk
            limits |= {"use_ocdbt": False, "use_compression": False}
        in_background = name.startswith("orbax_async_background")
        if in_background:
            limits["save_device_host_concurrent_gb"] = -(-setting.state_bytes // 10**9) + 1
            arrays["callback"] = InBackground()
        handler = ocp.PyTreeCheckpointHandler(
            type_handler_registry=array_registry(setting.link, **arrays), **limits
        )
        manager = ocp.CheckpointManager(
            setting.directory / name,
            item_handlers={"state": handler},
            options=_options(setting, asynchronous=not name.startswith("orbax_sync")),
        )
        super().__init__(
            setting, manager, lambda state: ocp.args.Composite(state=ocp.args.PyTreeSave(state))
        )
        if in_background:
            self.step = setting.job.keeping


class DeviceCopy(Stock):
    """What an expert writes by hand: a copy of the state on the device, saved by another thread."""

    def __init__(self, setting: Setting, name: str):
        super().__init__(setting, name)
        self._interval = setting.interval
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._saving: concurrent.futures.Future[None] | None = None

    def save(self, label: int, state: Any) -> bool:
        """Copies, and hands the copy to the thread; waits for the save before this one."""
        if label % self._interval:
            return False
        if self._saving is not None:
            self._saving.result()
        copy = [self._copy(state)]
        self._saving = self._thread.submit(lambda: self._save_copy(label, copy))
        return True

    def _save_copy(self, label: int, copy: list[Any]) -> None:
        super().save(label, copy.pop())  # the last reference: the device memory is free afterwards
        super().finish()

    def is_saving(self) -> bool:
        """Whether the thread is at work."""
        return self._saving is not None and not self._saving.done()

    def finish(self) -> None:
        """Waits for the thread."""
        if self._saving is not None:
            self._saving.result()

    def close(self) -> None:
        """Ends the thread and closes the manager."""
        self._thread.shutdown()
        super().close()


class GoCkpt(Managed):
    """`GoCkptManager`, with its defaults, with a fixed K, or with a budget on the device."""

    def __init__(self, setting: Setting, name: str, steps: int | None, budget_bytes: int | None):
        window = gockpt.WindowOptions(
            steps=steps,
            device_budget_bytes=budget_bytes,
            host_budget_bytes=setting.host_budget_bytes,
            step_secs=setting.step_secs,
            link_bytes_per_sec=setting.link.bytes_per_sec if setting.link else None,
        )
        manager = gockpt.GoCkptManager(
            setting.directory / name, options=_options(setting), window=window
        )
        super().__init__(setting, manager, gockpt.GoCkptSave)
        self.step = manager.wrap(setting.job.donating)

    def settle(self) -> None:
        """Waits for the armed step, if it is being compiled."""
        program = self.step.program
        if program is not None and program.is_armed:
            program.wait_until_ready()

    def reports(self) -> list[dict[str, Any]]:
        """Its save reports, and the rate at which bytes come, as the library has learned it."""
        rate = {"link_bytes_per_sec": LINK.bytes_per_sec}
        return [dataclasses.asdict(report) | rate for report in self._manager.reports]


def _options(setting: Setting, *, asynchronous: bool = True) -> ocp.CheckpointManagerOptions:
    return ocp.CheckpointManagerOptions(
        save_decision_policy=managers.FixedIntervalPolicy(setting.interval),
        max_to_keep=1,
        enable_async_checkpointing=asynchronous,
    )
