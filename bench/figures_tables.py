"""Tables in documents that are made from result files."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_BEGIN, _END = "<!-- Made by `make figures`: begin -->", "<!-- end -->"
_KS = (2, 3, 4, 6, 8)
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
    collectives = int(sum(values("staging/collectives")))
    return [
        f"- {len(cases)} cases. The armed step has more copies than the unarmed one in "
        f"{more('copies')} of them, more collectives in {more('collectives')}.",
        f"- Arming adds {min(added):.3f} to {max(added):.3f} times the retained gradients' bytes "
        "to the step's memory.",
        f"- What the compiled programs take is {min(off):+.1%} to {max(off):+.1%} off the "
        "planner's figure, over all cases and K = 2 to 8.",
        f"- The staging programs hold {computing} instructions that compute and {collectives} "
        f"collectives, and take at most {new:.3f} times the bytes that they copy.",
    ]


TABLES: dict[
    str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any]], list[str]]]
] = {"accelerators.md": (_is_aot, aot_table)}


def insert(path: Path, lines: Sequence[str]) -> None:
    """Replaces what lies between the marks of a document.

    Raises:
      FileNotFoundError: if there is no such document.
      ValueError: if it has no marks.
    """
    text = path.read_text(encoding="utf-8")
    between = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
    if not between.search(text):
        raise ValueError(f"`{path.name}` has no place for its table: {_BEGIN} ... {_END}")
    made = "\n".join((_BEGIN, "", *lines, "", _END))
    path.write_text(between.sub(lambda _: made, text), encoding="utf-8")
