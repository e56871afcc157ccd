"""The trade that `gockpt_jax plan` prints: what saves cost a model on a machine, for each K."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from gockpt_jax.training.cut import MIN_GAIN
from gockpt_jax.window.choice import best_per_steps, choose
from gockpt_jax.window.cost import Cost, Terms, Unit

_PARTS = 64
"""What may leave early is taken to be cut into as many equal units."""

OPTIMIZERS = {
    "adamw": (0, 2, 1),
    "lion": (1, 1, 1),
    "momentum": (1, 1, 1),
    "rmsprop": (0, 0, 1),
    "sgd": (0, 0, 0),
}
"""Parameters and moments, per parameter, that leave early; and whether there are others besides."""


@dataclasses.dataclass(frozen=True, slots=True)
class StateSize:
    """How large a state is, in bytes of all devices together.

    Attributes:
      early: What may leave early.
      late: What leaves at the save step.
      followers: What each later step of a window sends after all that left early.
      parameters: Their number.
    """

    early: float
    late: float
    followers: float
    parameters: float

    @property
    def nbytes(self) -> float:
        """Of all of it."""
        return self.early + self.late


def size_of_model(
    parameters: float, optimizer: str, *, param_bytes: int, moment_bytes: int, grad_bytes: int
) -> StateSize:
    """The size of a model's training state, from its parameters alone.

    Args:
      parameters: Their number.
      optimizer: A name in `OPTIMIZERS`.
      param_bytes: Bytes of a parameter in the state.
      moment_bytes: Bytes of an element of a moment.
      grad_bytes: Bytes of an element of what is retained.
    """
    early_params, early_moments, late_moments = OPTIMIZERS[optimizer]
    late_moments = 0 if early_moments else late_moments
    early = early_params * param_bytes + early_moments * moment_bytes
    late = (1 - early_params) * param_bytes + late_moments * moment_bytes
    if early <= MIN_GAIN * grad_bytes:
        early, late = 0, early + late
    followers = grad_bytes if early else 0
    return StateSize(early * parameters, late * parameters, followers * parameters, parameters)


def size_of_checkpoint(leaves: Iterable[Mapping[str, Any]], *, grad_bytes: int) -> StateSize:
    """The size of a saved state: Adam's moments, by their names in optax, leave early.

    A checkpoint does not tell which arithmetic made it: `manager.explain()` does, of a live step.

    Args:
      leaves: As `describe_item` describes them.
      grad_bytes: Bytes of an element of what is retained.
    """
    moments: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    late = parameters = 0.0
    for leaf in leaves:
        keys = leaf["name"].split(".")
        if {"mu", "nu"} & set(keys):
            of = tuple("*" if key in ("mu", "nu") else key for key in keys)
            moments.setdefault(of, []).append(leaf)
        else:
            late += leaf.get("bytes", 0)
    early = followers = 0.0
    for pair in moments.values():
        num_bytes = sum(leaf.get("bytes", 0) for leaf in pair)
        elements = math.prod(pair[0].get("shape", (0,)))
        follow = elements * grad_bytes
        parameters += elements
        if len(pair) == 2 and num_bytes > MIN_GAIN * follow:
            early, followers = early + num_bytes, followers + follow
        else:
            late += num_bytes
    return StateSize(early, late, followers, parameters)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a model trains on.

    Attributes:
      devices: Over which the whole state is spread evenly.
      link_bytes_per_sec: Of each, to its host, while all send.
      step_secs: Of a training step.
      budget_bytes: On each, for staged copies and retained values.
      devices_per_host: At most.
      write_bytes_per_sec: Of each host, to storage; `None`: not looked at.
      commit_secs: Barriers and the commit, once all is written.
      host_bytes: Memory of each host for saves; `None`: no limit.
      overhead: Part of the time that saves may cost.
      max_steps: The largest K.
    """

    devices: int
    link_bytes_per_sec: float
    step_secs: float
    budget_bytes: float
    devices_per_host: int = 8
    write_bytes_per_sec: float | None = None
    commit_secs: float = 0.0
    host_bytes: float | None = None
    overhead: float = 0.01
    max_steps: int = 8

    @property
    def on_host(self) -> int:
        """Devices of one host."""
        return min(self.devices, self.devices_per_host)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to save; bytes per device unless they say otherwise.

    Attributes:
      way: In words.
      steps: K.
      stall_secs: Per save.
      moved_bytes: Over the link.
      device_bytes: Most that is staged and retained.
      host_bytes: Most on one host.
      busy_secs: From the first transfer until all is on the host, or written if that takes longer,
        and committed.
      per_hour: Saves in an hour, each after the last is done, within the overhead.
      is_chosen: Whether it is what the planner takes.
      fits: Whether it keeps the budgets.
    """

    way: str
    steps: int
    stall_secs: float
    moved_bytes: float
    device_bytes: float
    host_bytes: float
    busy_secs: float
    per_hour: float
    is_chosen: bool = False
    fits: bool = True


def terms_of(state: StateSize, machine: Machine) -> Terms:
    """The cost model's view of one device."""
    parts = _PARTS if state.early else 0
    unit = Unit(
        state_bytes=math.ceil(state.early / machine.devices / _PARTS),
        retained_bytes=math.ceil(state.followers / machine.devices / _PARTS),
    )
    host = machine.host_bytes
    return Terms(
        units=(unit,) * parts,
        late_bytes=math.ceil(state.late / machine.devices),
        retained_bytes=unit.retained_bytes * parts,
        link_bytes_per_sec=machine.link_bytes_per_sec,
        step_secs=machine.step_secs,
        device_budget_bytes=int(machine.budget_bytes),
        host_budget_bytes=None if host is None else int(host / machine.on_host),
        max_steps=machine.max_steps,
    )


def trade(state: StateSize, machine: Machine) -> list[Row]:
    """Stock, a device copy, and the best plan of each K; the planner's choice is marked."""
    terms = terms_of(state, machine)
    chosen = choose(terms).cost
    nbytes, secs = terms.state_bytes, terms.blocking_secs
    fits = nbytes <= machine.budget_bytes
    copy = Cost(steps=1, blocks=(), stall_secs=0.0, drain_secs=secs, moved_bytes=nbytes,
                peak_bytes=nbytes, host_bytes=nbytes, fits=fits)  # fmt: skip
    stock = dataclasses.replace(copy, stall_secs=secs, drain_secs=0.0, peak_bytes=0)
    rows = [
        _row("stock Orbax async", stock, terms, machine, is_chosen=False),
        _row("device copy", copy, terms, machine, is_chosen=fits, fits=fits),
    ]
    for cost in best_per_steps(terms):
        if cost.steps > 1 or not fits:  # a snapshot that fits is the device copy
            way = "snapshot" if cost.steps == 1 else "window"
            is_chosen = cost.steps == chosen.steps
            rows.append(_row(way, cost, terms, machine, is_chosen=is_chosen))
    return rows


@dataclasses.dataclass(frozen=True, slots=True)
class Goodput:
    """What is left of the time of a job whose devices fail, at the best interval.

    Attributes:
      interval_secs: Between saves, by Young's rule, and no shorter than a step or a save.
      stalls: Part of the time lost to saves.
      lost_work: Part lost to work done since the last save.
      restarts: Part lost to starting again.
    """

    interval_secs: float
    stalls: float
    lost_work: float
    restarts: float

    @property
    def ettr(self) -> float:
        """Effective training time ratio, to first order."""
        return 1 / (1 + self.stalls + self.lost_work + self.restarts)


def goodput(
    row: Row, *, step_secs: float, between_failures_secs: float, restart_secs: float
) -> Goodput:
    """The goodput of a way of saving: `sqrt(2 C M)` (Young, 1974) is the best interval.

    A save protects from when it has been written, so as long as it is busy is lost besides.

    Args:
      row: The way.
      step_secs: Of a training step; no save comes sooner.
      between_failures_secs: M, of the whole job.
      restart_secs: From a failure until training goes on.
    """
    interval = math.sqrt(2 * row.stall_secs * between_failures_secs)
    interval = max(interval, row.busy_secs, step_secs)
    return Goodput(
        interval_secs=interval,
        stalls=row.stall_secs / interval,
        lost_work=(interval / 2 + row.busy_secs) / between_failures_secs,
        restarts=restart_secs / between_failures_secs,
    )


def _row(
    way: str, cost: Cost, terms: Terms, machine: Machine, *, is_chosen: bool, fits: bool = True
) -> Row:
    on_host = terms.state_bytes * machine.on_host
    write = 0.0 if machine.write_bytes_per_sec is None else on_host / machine.write_bytes_per_sec
    leaves = (cost.steps - 1) * terms.step_secs + cost.stall_secs + cost.drain_secs
    busy = max(terms.blocking_secs, write, leaves) + machine.commit_secs
    return Row(
        way=way,
        steps=cost.steps,
        stall_secs=cost.stall_secs,
        moved_bytes=cost.moved_bytes,
        device_bytes=cost.peak_bytes,
        host_bytes=cost.host_bytes * machine.on_host,
        busy_secs=busy,
        per_hour=3600 / max(busy, cost.stall_secs / machine.overhead),
        is_chosen=is_chosen,
        fits=fits,
    )
