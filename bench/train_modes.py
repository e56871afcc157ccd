"""The ways to checkpoint that `bench train` compares, behind one face.

Each is set up as somebody who knows it well would: the same save policy, the same retention. What
differs is how the state leaves the device, and the layout on disk where a library's default does.
"""

import concurrent.futures
import dataclasses
import re
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

import gockpt_jax as gockpt
from bench.train_link import Link
from bench.train_model import Job

DEFAULT = ("ideal", "gockpt", "orbax_async", "device_copy", "gockpt_k4", "orbax_async_background",
           "orbax_sync")  # fmt: skip
"""Modes in the order of their worth, should the time not suffice for all."""
_FIXED = re.compile(r"gockpt_k(\d+)")


class Mode(Protocol):
    """A training loop's way to checkpoint."""

    def step(self, state: Any, batch: Any) -> Any:
        """One update: the new state and the loss."""

    def save(self, label: int, state: Any) -> bool:
        """Called after every update; True if a save was accepted."""

    def is_saving(self) -> bool:
        """Whether an accepted save is not visible yet."""

    def finish(self) -> None:
        """Waits until the last save is visible."""

    def reports(self) -> list[dict[str, Any]]:
        """What the library itself says of its saves."""

    def clean(self) -> None:
        """Deletes its checkpoints, between phases: all modes share one disk."""

    def close(self) -> None:
        """Ends it."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all modes share.

    Attributes:
      job: What is trained.
      interval: Steps between saves.
      directory: Of all modes' checkpoints.
      link: A slower link between device and host; `None`: the real one.
      device_budget_bytes: For gockpt; `None`: its own default.
      state_bytes: Of the state.
    """

    job: Job
    interval: int
    directory: Path
    link: Link | None
    device_budget_bytes: int | None
    state_bytes: int


def make_mode(name: str, setting: Setting) -> Mode:
    """Makes a mode.

    Raises:
      ValueError: if there is no such mode.
    """
    fixed = _FIXED.fullmatch(name)
    if name == "ideal":
        return Ideal(setting)
    if name in ("orbax_sync", "orbax_async", "orbax_async_background"):
        return Stock(setting, name)
    if name == "device_copy":
        return DeviceCopy(setting)
    if name == "gockpt" or fixed:
        return GoCkpt(setting, name, int(fixed[1]) if fixed else None)
    raise ValueError(
        f"there is no mode {name!r}; give some of {', '.join(DEFAULT)} or gockpt_k<K>."
    )


class Ideal:
    """No checkpoint at all."""

    def __init__(self, setting: Setting):
        self.step = setting.job.donating

    def save(self, label: int, state: Any) -> bool:
        """Does nothing."""
        return False

    def is_saving(self) -> bool:
        """Never."""
        return False

    def finish(self) -> None:
        """Nothing is under way."""

    def reports(self) -> list[dict[str, Any]]:
        """None."""
        return []

    def clean(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Nothing is held."""


class Stock(Ideal):
    """`ocp.CheckpointManager`; asynchronous unless it is `orbax_sync`.

    `orbax_async_background` moves everything in the background: the one setting of Orbax 0.12 that
    does (a callback of `ArrayHandler` and a limit, here the whole state, so that the old state is
    free as soon as may be). The state that it reads must stay alive, so its step does not donate.
    """

    def __init__(self, setting: Setting, name: str):
        super().__init__(setting)
        limits: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        if name == "orbax_async_background":
            self.step = setting.job.keeping
            limits["save_device_host_concurrent_gb"] = -(-setting.state_bytes // 10**9) + 1
            arrays["callback"] = _Deprioritised()
        handler = ocp.PyTreeCheckpointHandler(
            type_handler_registry=_registry(setting.link, **arrays), **limits
        )
        self._manager = ocp.CheckpointManager(
            setting.directory / name,
            item_handlers={"state": handler},
            options=_options(setting, asynchronous=name != "orbax_sync"),
        )

    def save(self, label: int, state: Any) -> bool:
        """Saves if the policy says so."""
        item = ocp.args.PyTreeSave(state)
        return bool(self._manager.save(label, args=ocp.args.Composite(state=item)))

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


class DeviceCopy(Stock):
    """What an expert writes by hand: a copy of the state on the device, saved by another thread."""

    def __init__(self, setting: Setting):
        super().__init__(setting, "device_copy")
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


class GoCkpt(Ideal):
    """`GoCkptManager`, with its defaults or with a fixed K."""

    def __init__(self, setting: Setting, name: str, steps: int | None):
        window = gockpt.WindowOptions(steps=steps, device_budget_bytes=setting.device_budget_bytes)
        self._manager = gockpt.GoCkptManager(
            setting.directory / name, options=_options(setting), window=window
        )
        self.step = self._manager.wrap(setting.job.donating)

    def save(self, label: int, state: Any) -> bool:
        """Saves if the policy says so."""
        return bool(self._manager.save(label, args=gockpt.GoCkptSave(state)))

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

    def reports(self) -> list[dict[str, Any]]:
        """Its save reports."""
        return [dataclasses.asdict(report) for report in self._manager.reports]

    def close(self) -> None:
        """Closes the manager."""
        self._manager.close()


def _options(setting: Setting, *, asynchronous: bool = True) -> ocp.CheckpointManagerOptions:
    return ocp.CheckpointManagerOptions(
        save_decision_policy=managers.FixedIntervalPolicy(setting.interval),
        max_to_keep=1,
        enable_async_checkpointing=asynchronous,
    )


class _Deprioritised:
    """Tells Orbax to move every array in the background."""

    def key_priority(self, keypath: Any) -> Any:
        # Its documentation imports the enumeration from here as well: it has no public name.
        from orbax.checkpoint._src.serialization.types import TransferPriority

        return TransferPriority.ASYNCHRONOUS_DEPRIORITIZED

    def on_transfer_start(self, keypath: Any) -> None:
        """Nothing to do."""

    def on_transfer_end(self, keypath: Any) -> None:
        """Nothing to do."""

    def on_write_end(self, keypath: Any) -> None:
        """Nothing to do."""


class _SlowArrayHandler(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
    """Stock's, behind a slower link: `serialize` returns when the state is on the host."""

    def __init__(self, link: Link | None, **options: Any):
        super().__init__(**options)
        self._link = link

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        if self._link is not None:
            self._link.send(values).result()
        return await super().serialize(values, infos, args)


def _registry(link: Link | None, **options: Any) -> Any:
    """Orbax's own type handlers, but for arrays: the same handler, set up as it should be here."""
    types = ocp.type_handlers
    arrays = _SlowArrayHandler(link, **options) if link else types.ArrayHandler(**options)
    return types.create_type_handler_registry(
        (int, types.ScalarHandler()), (float, types.ScalarHandler()), (jax.Array, arrays)
    )
