"""Tables of what ran on an accelerator: its link, its training beside checkpoints, its replay."""

import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.figures import train
from bench.train.figures import AROUND

Record = Mapping[str, Any]

_WAYS = {
    "library": "this library: a staged copy into pinned memory, seen as an array",
    "pinned_put": "`device_put` into pinned memory",
    "host_output": "a program whose result lies in pinned memory",
    "copy_to_host_async": "`copy_to_host_async`, `np.asarray`",
    "asarray": "`np.asarray`",
    "put_on_cpu": "`device_put` to the CPU backend",
}
_SIZES = ("0.0625", "1", "16", "64", "256", "1024")  # MiB
_MODES = {
    "ideal": "no checkpoints: chance alone",
    "orbax_async": "stock Orbax, asynchronous",
    "orbax_async_background": "stock Orbax, transfers in the background, without donation",
    "device_copy": "a device copy by hand, saved by a thread",
    "gockpt": "gockpt_jax, as it plans",
    "gockpt_k1": "gockpt_jax, a device copy: its plan where there is room for one",
    "gockpt_k4": "gockpt_jax, a window of 4 steps",
}
_GRAPHS = "+graphs"  # behind a mode's name: until decision 35 windows had none
_PREDICTED = re.compile(r"(\w+/gockpt_b(\d+))/predicted_stall_ms")
_AROUND = [mode for mode in _MODES if mode != "gockpt"]  # there, with a fixed K only


def is_on_accelerator(record: Record) -> bool:
    """Whether a record was made where there is more than a CPU."""
    return any(device != "cpu" for device in record["hardware"].get("devices", ()))


def is_link(record: Record) -> bool:
    """Whether a record holds the answers of an accelerator's link, up to the largest size."""
    is_whole = f"pull_gbps/library/{_SIZES[-1]}MiB/warm" in record["samples"]
    return record["name"] == "gpu transfer" and is_on_accelerator(record) and is_whole


def is_training(record: Record) -> bool:
    """Whether a record holds training on an accelerator, stock beside ours."""
    if record["name"] != "train" or not is_on_accelerator(record) or not train.has_stall(record):
        return False
    around = train.of_figure(record, "around_save_secs")
    intervals = {i for by_interval in around.values() for i in by_interval}
    return {"gockpt", "orbax_async"} <= around.keys() and len(intervals) == 1


def is_around(record: Record) -> bool:
    """Whether a record holds what single saves of one size cost on an accelerator, by most ways."""
    if record["name"] != "around" or not is_on_accelerator(record):
        return False
    sizes = {name.partition("/")[0] for name in record["samples"]}
    names = {name.partition("/")[2] for name in record["samples"]}
    return len(sizes) == 1 and {f"{mode}/around_save_ms" for mode in _AROUND} <= names


def has_predictions(record: Record) -> bool:
    """Whether the planner expected something of an accelerator's saves with little memory."""
    predicted = any(map(_PREDICTED.fullmatch, record["samples"]))
    return record["name"] == "around" and is_on_accelerator(record) and predicted


def is_replay(record: Record) -> bool:
    """Whether a record holds replay of an accelerator's updates, of all optimizers."""
    if record["name"] != "gpu exact" or not is_on_accelerator(record):
        return False
    all_tried = f"tried: optimizers, of {record['figures'].get('exact/tried', 0):.0f};"
    return any(note.startswith(all_tried) for note in record["notes"])


def link_table(record: Record) -> list[str]:
    """GB/s of each way to the host by size, warm, below the link's own."""
    figures = record["figures"]
    lines = [
        "| way to the host | " + " | ".join(_size(mib) for mib in _SIZES) + " |",
        "|---|" + "---:|" * len(_SIZES),
    ]
    rows = {"the driver's own copy, without JAX": "raw_link_gbps/{}MiB"} | {
        said: f"pull_gbps/{way}/{{}}MiB/warm" for way, said in _WAYS.items()
    }
    for said, name in rows.items():
        cells = [_gbps(figures.get(name.format(mib))) for mib in _SIZES]
        lines.append(f"| {said} | {' | '.join(cells)} |")
    return [*lines, "", f"GB/s, medians, on {_where(record)}."]


def training_table(record: Record) -> list[str]:
    """What a save costs training on an accelerator, each way beside the others."""
    samples = record["samples"]
    (interval,) = train.of_figure(record, "around_save_secs")["gockpt"]
    lines = [
        "| way to save | a save costs, ms (each round) | change of its interval, ms, with drift "
        "| throughput, of undisturbed | device memory, of undisturbed | visible after, s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for mode, said in _MODES.items():
        of = {
            name.rpartition("/")[2]: values
            for name, values in samples.items()
            if name.startswith(f"{mode}/{interval}/")
        }
        if "around_save_secs" not in of:
            continue
        around, wall = of["around_save_secs"], of["inflation_secs_per_save"]
        middle = {name: statistics.median(values) for name, values in of.items()}
        lines.append(
            f"| {said} (`{mode}`) | {_ms(around)} | {_ms(wall)} | "
            f"{middle['throughput_ratio']:.3f} | {max(of['device_memory_ratio']):.2f} | "
            f"{middle['visible_secs']:.1f} |"
        )
    return [*lines, "", *textwrap.wrap(_said_of_training(record, interval), 118)]


def _ms(secs: Sequence[float]) -> str:
    return ", ".join(f"{1000 * x:.0f}" for x in secs)


def around_table(record: Record) -> list[str]:
    """What one save costs the steps around it, by each way."""
    lines = [
        "| way to save | a save costs training, ms (least to most) "
        "| `save` holds the trainer, ms |",
        "|---|---:|---:|",
    ]
    samples = record["samples"]
    labels = _around_labels(samples)
    for mode, label in labels.items():
        cost, held = (samples[f"{label}/{name}_ms"] for name in ("around_save", "save_call"))
        name, middle = _MODES[mode], statistics.median(held)
        lines.append(f"| {name} (`{mode}`) | {_spread(cost)} | {middle:.0f} |")
    return [*lines, "", *textwrap.wrap(_said_of_around(record, labels), 118)]


def _around_labels(samples: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """Of each way, what its figures' names begin with."""
    (size,) = {name.partition("/")[0] for name in samples}
    labels = {mode: f"{size}/{mode}" for mode in _AROUND}
    return {
        mode: f"{label}{_GRAPHS}" if f"{label}{_GRAPHS}/around_save_ms" in samples else label
        for mode, label in labels.items()
    }


def _said_of_around(record: Record, labels: Mapping[str, str]) -> str:
    samples, notes = record["samples"], record["notes"]
    size = labels["ideal"].partition("/")[0]
    state = next(note for note in notes if note.startswith(f"{size}: "))
    between = {mode: statistics.median(samples[f"{labels[mode]}/step_ms"]) for mode in labels}
    step = between.pop("ideal")
    first = ", which ran first," if next(iter(samples)).startswith(f"{size}/ideal/") else ""
    said = (
        f"On {_where(record)}, Orbax {record['versions']['orbax-checkpoint']}: a GPT with "
        f"{state.partition(': ')[2].rstrip('.')}, steps of {step:.0f} ms; medians of "
        f"{len(samples[f'{size}/ideal/around_save_ms'])} saves. What a save costs: the time of the "
        "steps around it, less as many times the median of the steps between saves. `save` may "
        "hold the trainer's thread while the device is busy with steps that it has been given, "
        "which costs nothing. Each save found the one before it done, and of what slows all steps "
        "alike, such as writing, nothing is in it: those between saves took "
        f"{step:.1f} ms without checkpoints{first} and {min(between.values()):.1f} to "
        f"{max(between.values()):.1f} ms by the other ways."
    )
    if place := re.search(r"Checkpoints went to .*?\.(?= |$)", " ".join(notes)):
        said += f" {place[0]}"
    for mode, label in labels.items():
        if label.endswith(_GRAPHS):
            said += (
                f" `{mode}` is the record's `{mode}{_GRAPHS}`: windows have had CUDA graphs since "
                "decision 35."
            )
    return said


def _spread(values: Sequence[float]) -> str:
    # Adding 0 makes no number "-0".
    low, middle, high = (round(f(values)) + 0 for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"


def predicted_table(record: Record) -> list[str]:
    """What the planner expected of saves with little device memory, and what they cost."""
    samples = record["samples"]
    counts: set[int] = set()
    lines = [
        "| device budget, of the state | predicted stall, ms | a save cost training, ms |",
        "|---|---:|---:|",
    ]
    for name, predicted in samples.items():
        if found := _PREDICTED.fullmatch(name):
            costs = samples[f"{found[1]}/around_save_ms"]
            counts.add(len(costs))
            cost = _spread(costs)
            lines.append(
                f"| {int(found[2]) / 100:.2f} | {statistics.median(predicted):.0f} | {cost} |"
            )
    saves = " or ".join(map(str, sorted(counts)))
    return [*lines, "", f"On {_where(record)}; medians (least to most) of {saves} saves."]


def _said_of_training(record: Record, interval: int) -> str:
    samples, notes = record["samples"], " ".join(record["notes"])
    state = statistics.median(samples["state_gb"])
    step = statistics.median(samples[f"ideal/{interval}/step_median_secs"])
    again = samples[f"ideal/{interval}/throughput_ratio"]
    gpt = re.search(r"GPT \S+: ([\d.]+) M parameters", notes)
    place = re.search(r"Checkpoints went to .*?\.(?= |$)", notes)
    assert gpt is not None
    assert place is not None
    drift = 1000 * step * interval * (max(again) - min(again))
    return (
        f"On {_where(record)}, Orbax {record['versions']['orbax-checkpoint']}: a GPT of "
        f"{float(gpt[1]):.0f} M parameters, {state:.1f} GB of state, a save every {interval} steps "
        f"of {step:.2f} s, {len(again)} rounds in which the ways take turns. What a save costs: "
        f"the time of the {2 * AROUND + 1} steps around it, less as many times the median of the "
        "phase's other steps, some of which ran beside its writing. The change of an "
        "interval includes the machine's drift: training without checkpoints, divided by itself, "
        f"gave {min(again):.3f} to {max(again):.3f}, which is {drift:.0f} ms of an interval. "
        f"Device memory: the largest sample. {place[0]}"
    )


def replay_table(record: Record) -> list[str]:
    """How near replay is to an accelerator's own updates, per optimizer."""
    figures = record["figures"]
    lines = [
        "| optimizer | replayed exactly: moments and the like, ULPs | parameters, ULPs "
        "| rounding accepted: parameters, of the leaf's largest value "
        "| through a manager, audited whole, ULPs "
        "| of the state's elements, those that the armed step gives otherwise |",
        "|---|" + "---:|" * 5,
    ]
    columns = (
        "exact/{}/moments/max_ulps", "exact/{}/params/max_ulps", "rounded/{}/params/relative",
        "library/{}/audit_max_ulps", "perturbed/{}",
    )  # fmt: skip
    names = [name.partition("/")[2] for name in figures if name.startswith("perturbed/")]
    for name in sorted(names):
        cells = [_number(figures.get(column.format(name))) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    tried, failed = (figures[f"exact/{what}"] for what in ("tried", "failures"))
    return [
        *lines, "",
        f"On {_where(record)}. {tried:.0f} optimizers; {failed:.0f} measurements failed.",
    ]  # fmt: skip


def _where(record: Record) -> str:
    devices = ", ".join(record["hardware"]["devices"])
    return f"one {devices} ({record['hardware']['cores']} cores, jax {record['versions']['jax']})"


def _size(mib: str) -> str:
    return f"{float(mib) * 1024:.0f} KiB" if float(mib) < 1 else f"{mib} MiB"


def _gbps(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _number(value: float | None) -> str:
    return "-" if value is None else "0" if value == 0 else f"{value:.1e}"


TABLES: dict[str, tuple[Callable[[Record], bool], Callable[[Record], list[str]]]] = {
    "README.md#accelerator": (is_around, around_table),
    "bench/README.md#predicted": (has_predictions, predicted_table),
    "docs/accelerators.md#training": (is_training, training_table),
    "docs/accelerators.md#link": (is_link, link_table),
    "docs/accelerators.md#replay": (is_replay, replay_table),
}
"""As in `bench.figures.tables`."""
