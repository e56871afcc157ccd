"""Tables in documents that are made from result files."""

import re
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.figures import accelerator, train

_KS = range(2, 9)
_MISSING = ": not measured"


def _is_aot(record: Mapping[str, Any]) -> bool:
    return record["name"] == "aot"


def aot_table(record: Mapping[str, Any]) -> list[str]:
    """What a window costs in device memory, for each case that was compiled."""
    figures = record["figures"]
    cases = dict.fromkeys("/".join(name.split("/")[:3]) for name in figures)
    lines = [
        "| chips, parameters, split | state | step, unarmed | armed adds | device copy (K = 1) | "
        + " | ".join(f"K = {k}" for k in _KS) + " |",
        "|---|" + "---:|" * (4 + len(_KS)),
    ]  # fmt: skip
    for case in cases:
        names = ("state_gib", "unarmed/total_gib", "armed_extra_gib", "device_copy_gib")
        cells = [f"{figures[f'{case}/{name}']:.2f}" for name in names]
        for k in _KS:
            planned, compiled = (figures[f"{case}/k{k}/{w}_gib"] for w in ("planned", "compiled"))
            cells.append(f"{planned:.2f} / {compiled:.2f}")
        topology, parameters, way = case.split("/")
        how = way.replace("fsdp", "FSDP").replace("_x_tensor", " x tensor ")
        lines.append(f"| {topology}, {parameters}, {how} | " + " | ".join(cells) + " |")
    missing = [note.split(_MISSING)[0] for note in record["notes"] if _MISSING in note]
    if missing:
        lines += ["", f"Not measured: {', '.join(missing)}; the result file's notes say why."]
    return [*lines, "", *_aot_sums(figures, list(cases))]


def _aot_sums(figures: Mapping[str, float], cases: Sequence[str]) -> list[str]:
    """Sentences whose figures are counted here and not by hand."""

    def values(name: str) -> list[float]:
        return [figures[f"{case}/{name}"] for case in cases]

    def more(name: str) -> int:
        return sum(b > a for a, b in zip(values(f"unarmed/{name}"), values(f"armed/{name}"),
                                         strict=True))  # fmt: skip

    added = [a / r for a, r in zip(values("armed_extra_gib"), values("retained_gib"), strict=True)]
    off = [
        figures[f"{c}/k{k}/compiled_gib"] / figures[f"{c}/k{k}/planned_gib"] - 1
        for c in cases
        for k in range(2, 9)
    ]
    new = max(values("staging/most_new_over_copied"))
    computing = int(sum(values("staging/computing_instructions")))
    joins = int(sum(values("staging/joins")))
    collectives = int(sum(values("staging/collectives")))
    parts = [int(n) for n in values("snapshot/parts")]
    over = max(
        b / a for a, b in zip(values("snapshot/planned_gib"), values("snapshot/compiled_gib"),
                              strict=True)
    )  # fmt: skip
    return [
        f"- {len(cases)} cases. The armed step has more copies than the unarmed one in "
        f"{more('copies')} of them, more collectives in {more('collectives')}.",
        f"- Arming adds {min(added):.3f} to {max(added):.3f} times the retained gradients' bytes "
        "to the step's memory.",
        f"- What the compiled programs take is {min(off):+.1%} to {max(off):+.1%} off the "
        "planner's figure, over all cases and K = 2 to 8.",
        f"- The staging programs hold {collectives} collectives, {joins} maxima and sums of padded "
        f"integers (how this compiler joins small arrays), and {computing} other instructions that "
        "compute. They take "
        f"at most {new:.3f} times the bytes that they copy.",
        "- A save without a window, with a device budget of the smallest planned figure, is staged "
        f"in at most {max(parts)} parts, which hold at most {over:.3f} times that budget at once.",
    ]


_ACCELERATORS = {"h100": "H100 (XLA's GPU compiler)", "v5e": "TPU v5e (libtpu)"}
_LAYOUTS = {
    "single": "one",
    "fsdp": "four, all split",
    "zero1": "four, parameters replicated, the rest split",
}


def _is_compiled(record: Mapping[str, Any]) -> bool:
    return record["name"] == "compiled" and "--quick" not in record["command"]


def compiled_table(record: Mapping[str, Any]) -> list[str]:
    """What accelerators' compilers make of the cut, over all optimizers and models."""
    columns = ("early", "torn", "otherwise", "perturbed", "contracted", "flushing")
    lines = [
        "| compiled for | devices | steps | leaves that leave early | of these, replayed "
        "otherwise | leaves that the armed step computes otherwise | of these, other numbers | "
        "multiply-adds of the compiler's own | operations that flush denormals |",
        "|---|---|" + "---:|" * (1 + len(columns)),
    ]
    figures = record["figures"]
    for target, layout in dict.fromkeys(tuple(name.split("/")[:2]) for name in figures):
        of = {name: x for name, x in figures.items() if name.startswith(f"{target}/{layout}/")}
        found = [[x for n, x in of.items() if n.endswith(f"/{c}")] for c in columns]
        cells = [f"{sum(xs):.0f}" if xs else "-" for xs in found]
        steps = sum(name.endswith("/early") for name in of)
        names = f"{_ACCELERATORS[target]} | {_LAYOUTS[layout]}"
        lines.append(f"| {names} | {steps} | {' | '.join(cells)} |")
    compilers = [n.rstrip(".") for n in record["notes"] if n.startswith(("libtpu ", "jax-cuda"))]
    return [*lines, "", f"With jax {record['versions']['jax']}, {', '.join(compilers)}."]


def prediction_table(record: Mapping[str, Any]) -> list[str]:
    """What the planner expected of saves, beside what they cost."""
    lines = [
        "| mode, every | K | predicted stall, s | measured inflation, s | least to most | "
        "of it in hooks, s |",
        "|---|" + "---:|" * 5,
    ]
    for p in train.predictions(record):
        low, high = min(p.inflation), max(p.inflation)
        lines.append(
            f"| {p.mode}, {p.interval} steps | {p.steps} | {p.predicted:.3f} | "
            f"{statistics.median(p.inflation):.3f} | {low:.3f} to {high:.3f} | "
            f"{statistics.median(p.hooks):.3f} |"
        )
    rounds = {len(p.inflation) for p in train.predictions(record)}
    steps = train.of_figure(record, "step_median_secs")["ideal"]
    secs = statistics.median(x for values in steps.values() for x in values)
    return [
        *lines,
        "",
        f"Medians of {min(rounds)} phases each, per save; an undisturbed step took {secs:.3f} s.",
    ]


def throughput_lines(record: Mapping[str, Any]) -> list[str]:
    """The README's figure, and in words what it shows at the shortest interval."""
    modes = train.of_figure(record, "throughput_ratio")
    interval = min(modes["gockpt"])
    at_it = [
        f"`{mode}` {statistics.median(values[interval]):.3f}"
        for mode, values in modes.items()
        if mode != "ideal" and interval in values
    ]
    devices = record["hardware"]["devices"]
    where = f"on {', '.join(devices)}"
    if devices == ["cpu"]:
        where = "on a CPU with a simulated device link, which shows the scheduling, not the speed"
    shown = (
        "![Training's throughput over that without checkpoints, by the steps between saves, for "
        "each way to checkpoint](docs/figures/throughput.svg)"
    )
    said = (
        f"Throughput, divided by that of the same training without checkpoints, {where}. With a "
        f"save every {interval} steps: {', '.join(at_it)} (medians; the modes are explained in "
        "[bench/README.md](bench/README.md#the-training-benchmark))."
    )
    if again := modes.get("ideal", {}).get(interval):
        low, high = train.middle_half(again)
        said += (
            f" Training without checkpoints, divided by itself, gave {low:.3f} to {high:.3f} (the "
            "middle half; the band in the plot): smaller differences are the machine's drift."
        )
    said += _what_comes_behind(record, interval)
    return [*textwrap.wrap(shown, 105), "", *textwrap.wrap(said, 105)]


def _what_comes_behind(record: Mapping[str, Any], interval: int) -> str:
    """Of saves that end behind the last step of a phase, in which throughput has no share."""
    ended, late = (
        {
            mode: statistics.median(values[interval])
            for mode, values in train.of_figure(record, figure).items()
            if mode != "ideal" and interval in values
        }
        for figure in ("job_throughput_ratio", "drain_over_interval")
    )
    said = ""
    if ended:
        at_it = ", ".join(f"`{mode}` {value:.3f}" for mode, value in ended.items())
        said += (
            f" With the wait for the last save of a phase counted, too: {at_it}; phases are short, "
            "and a longer run lies between."
        )
    if over := {mode: value for mode, value in late.items() if value > 1}:
        at_it = ", ".join(f"{value:.2f} by `{mode}`" for mode, value in over.items())
        said += (
            f" So close together saves wait for each other: they were visible after {at_it} of the "
            "time between two."
        )
    return said


def _is_memory(record: Mapping[str, Any]) -> bool:
    """Whether a record holds what saves take of the host's memory; not of a small state."""
    return record["name"] == "memory" and "--quick" not in record["command"]


def memory_table(record: Mapping[str, Any]) -> list[str]:
    """What each way to save adds to its process, against budget and accounts."""
    figures, state = record["figures"], record["details"]["state_bytes"]
    lines = [
        "| way to save | process grows by, of the state | of what is counted | host part, GB "
        "| host budget, GB | of the budget | stays, of the state |",
        "|---|" + "---:|" * 6,
    ]
    for way in dict.fromkeys(name.partition("/")[0] for name in figures):
        of = {
            name.partition("/")[2]: x for name, x in figures.items() if name.startswith(way + "/")
        }
        cells = [f"{of['extra_rss_state_ratio']:.2f}"]
        for name, scale in (
            ("extra_over_accounted_ratio", 1.0), ("host_peak_extra_bytes", 1e9),
            ("host_budget_bytes", 1e9), ("host_peak_budget_ratio", 1.0),
        ):  # fmt: skip
            cells.append(f"{of[name] / scale:.2f}" if name in of else "-")
        lines.append(f"| `{way}` | {' | '.join(cells)} | {of['kept_bytes'] / state:.2f} |")
    size = f"A state of {state / 1e9:.2f} GB, medians over intervals"
    most = max(
        max(values)
        for name, values in record["samples"].items()
        if name.endswith("/host_peak_budget_ratio")
    )
    return [*lines, "", f"{size}. The host part took at most {most:.2f} of its budget in any."]


TABLES: dict[
    str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any]], list[str]]]
] = {
    "docs/accelerators.md": (_is_aot, aot_table),
    "docs/accelerators.md#compiled": (_is_compiled, compiled_table),
    "bench/README.md": (train.has_prediction, prediction_table),
    "bench/README.md#memory": (_is_memory, memory_table),
    "README.md": (train.has_throughput, throughput_lines),
    **accelerator.TABLES,
}
"""By page, from the repository's root, and mark in it: which records suit, and what one makes."""


def lines_of(table: Callable[[Mapping[str, Any]], list[str]], result: Any) -> list[str]:
    """A table, and the result that it is from."""
    return [*table(result.record), "", f"From `{result.path}`."]


def marks(name: str = "") -> tuple[str, str]:
    """The marks between which a table lies, in a page that has several by its name.

    Example:
      >>> marks("memory")
      ('<!-- Made by `make figures`, memory: begin -->', '<!-- end -->')
    """
    return f"<!-- Made by `make figures`{name and f', {name}'}: begin -->", "<!-- end -->"


def insert(path: Path, lines: Sequence[str], name: str = "") -> None:
    """Replaces what lies between the marks of a document.

    Raises:
      FileNotFoundError: if there is no such document.
      ValueError: if it has no marks.
    """
    text = path.read_text(encoding="utf-8")
    begin, end = marks(name)
    between = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not between.search(text):
        raise ValueError(f"`{path.name}` has no place for its table: {begin} ... {end}")
    made = "\n".join((begin, "", *lines, "", end))
    path.write_text(between.sub(lambda _: made, text), encoding="utf-8")
