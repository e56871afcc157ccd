"""The lives of jobs, drawn from a seed: what is saved where and how, and what goes wrong."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

MAX_DEVICES = 8
LABELS = 22  # of a first job; its resumption makes `LABELS_AFTER` more
LABELS_AFTER = 9
ONE_AXIS = ("fsdp", "data_parallel", "zero_1", "tensor", "by_hand", "by_hand_whole", "each_its_own")

OF_THEIR_OWN = ("zero_1", "tensor", "each_its_own")  # have another optimizer, or shapes

PLACES = ("land", "finish", "write", "begin", "written", "finalize", "stage", "admit", "seal")
"""Where a process may fail, or be killed: stages that a save goes through (`life.STAGES`)."""
EVENTS = ("forced", "waited", "expected", "edited", "restored")


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong, in one process.

    Attributes:
      process: Its index.
      label: From which on; the first time that it comes to the place.
      place: One of `PLACES`, or `loop`: between two steps.
      deed: `raises`, `dies` (SIGKILL), `told` (SIGTERM, as before a preemption).
    """

    process: int
    label: int
    place: str
    deed: str

    @property
    def is_lethal(self) -> bool:
        """Whether the job ends of it, and not as it should."""
        return self.deed == "dies" or (self.place, self.deed) == ("loop", "raises")


@dataclasses.dataclass(frozen=True)
class JobLife:
    """What a job does.

    Attributes:
      processes: How many.
      devices: Of each.
      mesh: A name in `training.MESHES`.
      first: The label of its first update.
      last: Of its last.
      has_part: Whether a leaf is saved, too, of which the last of three processes or more has none.
      small_slices: Whether replicas share leaves as small as these.
      window: Of `WindowOptions`.
      manager: Of `CheckpointManagerOptions`.
      layout: Of `pytree_options`.
      events: What all do, by the label before whose save; `longer`: that label's batch is.
      slow: The process that is slow, in all that it does for saves; -1: none.
      fault: What goes wrong.
    """

    processes: int
    devices: int
    mesh: str
    first: int
    last: int
    has_part: bool
    small_slices: bool
    window: dict[str, Any]
    manager: dict[str, Any]
    layout: dict[str, Any]
    events: dict[int, str]
    slow: int
    fault: Fault | None

    @classmethod
    def of(cls, told: dict[str, Any]) -> JobLife:
        """What `dataclasses.asdict` made of one, after a way through JSON."""
        events = {int(label): event for label, event in told["events"].items()}
        fault = Fault(**told["fault"]) if told["fault"] else None
        return cls(**told | {"events": events, "fault": fault})


def drawn(seed: int) -> tuple[JobLife, JobLife]:
    """A job, and the one that goes on where its newest checkpoint is."""
    rng = random.Random(seed)
    first = _job(rng, rng.choice([2, 2, 2, 3, 4]), 0, LABELS)
    fault = _fault(rng, first)
    first = dataclasses.replace(first, fault=fault)
    second = _job(rng, rng.choice([1, 2, 2, 3]), LABELS, LABELS + LABELS_AFTER)
    if first.mesh in OF_THEIR_OWN:
        same: dict[str, Any] = {"mesh": first.mesh}
        if first.mesh == "each_its_own":
            same |= {"processes": first.processes, "devices": first.devices}
        second = dataclasses.replace(second, **same)
    elif second.mesh in OF_THEIR_OWN:
        second = dataclasses.replace(second, mesh="fsdp")
    return first, dataclasses.replace(second, has_part=first.has_part)


def _job(rng: random.Random, processes: int, first: int, last: int) -> JobLife:
    devices = rng.choice([n for n in (1, 2, 2, 4) if n * processes <= MAX_DEVICES])
    meshes = [*ONE_AXIS, *["fsdp_tensor"] * (2 if devices * processes % 2 == 0 else 0)]
    window = {
        "on_busy": rng.choice(["wait", "skip", "newest"]),
        "on_save_error": rng.choice(["raise", "raise", "warn"]),
        "arm": rng.choice(["window", "window", "always"]),
        "device_budget_bytes": rng.choice([None, None, 1 << 13, 1 << 15]),
        "host_budget_bytes": rng.choice([None, None, None, 3 << 16, 1 << 20]),
        **rng.choice([{"steps": rng.randint(2, 5)}, {"steps": 3}, {"max_steps": 5}]),
    }
    manager: dict[str, Any] = {"save_interval_steps": rng.choice([2, 3, 4, 5])}
    if rng.random() < 0.3:
        manager["max_to_keep"] = rng.choice([1, 2, 3])
    if rng.random() < 0.15:
        manager["enable_async_checkpointing"] = False
    layouts: list[dict[str, Any]] = [
        {}, {}, {"use_ocdbt": True}, {"use_ocdbt": True, "use_zarr3": True},
        {"chunk_byte_size": 1 << 10},
    ]  # fmt: skip
    layout = rng.choice(layouts) | rng.choice([{}, {"use_replica_parallel": False}])
    events = {
        label: rng.choice(EVENTS) for label in range(first + 1, last + 1) if rng.random() < 0.2
    }
    lengths = random.Random(f"{sorted(events)}")  # its own: seeds keep what else they are
    events |= {
        label: "longer" for label in range(first + 1, last + 1)
        if label not in events and lengths.random() < 0.1
    }  # fmt: skip
    return JobLife(
        processes, devices, rng.choice(meshes), first, last,
        has_part=rng.random() < 0.3, small_slices=rng.random() < 0.7,
        window=window, manager=manager, layout=layout, events=events,
        slow=rng.choice([-1, rng.randrange(processes)]), fault=None,
    )  # fmt: skip


def _fault(rng: random.Random, job: JobLife) -> Fault | None:
    deed = rng.choice(["none", "raises", "raises", "raises", "dies", "told"])
    if deed == "none":
        return None
    place = rng.choice([*PLACES, "loop"]) if deed != "told" else "loop"
    if place == "finalize" and deed == "raises" and "enable_async_checkpointing" in job.manager:
        place = "written"  # the others would hear of it at Orbax's timeout only (decision 13)
    process = 0 if place == "finalize" else rng.randrange(job.processes)
    return Fault(process, rng.randint(1, 3 * LABELS // 4), place, deed)
