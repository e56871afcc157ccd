"""`python -m bench.scale`: makes the tables of docs/scale.md anew.

Not a benchmark: nothing is measured. A table stands between two comments, of which the first says
the command that has made it.
"""

import dataclasses
import itertools
import math
import re
import shlex
import sys
from pathlib import Path

from click.testing import CliRunner

from gockpt_jax.cli.main import main
from gockpt_jax.window.choice import choose
from gockpt_jax.window.cost import Terms, Unit, play

DOCUMENT = Path(__file__).parents[1] / "docs" / "scale.md"
_TABLE = re.compile(
    r"(?P<head><!-- made by `(?P<command>[^`]*)` -->)(?:(?!<!--).)*(?P<end><!-- end -->)", re.DOTALL
)
_PAPER = "python -m bench.scale --paper"
_UNITS = 1000
_H100S_IDEAL = 10703  # tokens per second without checkpoints, in the paper


@dataclasses.dataclass(frozen=True)
class Paper:
    """A setting of the paper (arXiv 2511.07035), and what it reports; stalls per save.

    Attributes:
      name: Of the model and the machine.
      unit: In what stalls are given: seconds, or training steps.
      transfer: The whole state's transfer.
      step: A training step.
      gockpt: The paper's stall with gradients waited for; `None`: not given.
      gockpt_o: The paper's stall with gradients overlapped.
    """

    name: str
    unit: str
    transfer: float
    step: float
    gockpt: float | None
    gockpt_o: float


def _v100s(model: str, stall: tuple[float, float, float, float]) -> Paper:
    """Async waits for the transfer; Async-O hides one step of it: that tells both."""
    plain, overlapped, gockpt, gockpt_o = stall
    name = f"{model}, V100S"
    return Paper(name, "s", plain, plain - overlapped, gockpt, gockpt_o)


def _h100s(interval: int, overlapped: float, gockpt_o: float) -> Paper:
    """Only tokens per second are given: over an interval they tell stalls in steps."""

    def stall(tokens: float) -> float:
        return interval * (_H100S_IDEAL / tokens - 1)

    name = f"LLaMA3-8B, 4 x H100, every {interval} steps"
    return Paper(name, "steps", stall(overlapped) + 1, 1.0, None, stall(gockpt_o))


PAPER = (
    _v100s("LLaMA3.2-1B", (1.311, 0.962, 0.407, 0.131)),
    _v100s("Qwen3-0.6B", (0.632, 0.374, 0.112, 0.003)),
    _v100s("OPT-350M", (0.351, 0.191, 0.074, 0.004)),
    _h100s(100, 10213, 10421),
    _h100s(150, 10308, 10454),
    _h100s(200, 10357, 10543),
)
_GRADIENT_PART = 1 / 7  # bf16 gradients of 14 bytes of state per parameter


def paper_table() -> str:
    """What the cost model says of the paper's settings, beside the paper's own figures."""
    lines = [
        "| setting | K | GoCkpt: model | paper | GoCkpt-O: model | paper | our plan |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for setting in PAPER:
        steps = min(7, math.ceil(setting.transfer / setting.step))
        waits, overlaps, ours = predicted(setting, steps)
        reported = "-" if setting.gockpt is None else f"{setting.gockpt:.3f} {setting.unit}"
        lines.append(
            f"| {setting.name} | {steps} | {waits:.3f} {setting.unit} | {reported} "
            f"| {overlaps:.3f} {setting.unit} | {setting.gockpt_o:.3f} {setting.unit} "
            f"| {ours:.3f} {setting.unit} |"
        )
    return "\n".join(lines)


def predicted(setting: Paper, steps: int) -> tuple[float, float, float]:
    """Stalls of GoCkpt, of GoCkpt-O, and of the plan that we would make.

    The paper copies no block on the device: a part has to be gone when its step ends, which is a
    device budget of one part; gradients are there in any case, and take none of it.
    """
    unit = Unit(state_bytes=7_000, retained_bytes=round(7_000 * _GRADIENT_PART))
    size = unit.state_bytes * _UNITS
    terms = Terms(
        units=(unit,) * _UNITS, late_bytes=0, retained_bytes=0, step_secs=setting.step,
        link_bytes_per_sec=size / setting.transfer,
        device_budget_bytes=unit.state_bytes * math.ceil(_UNITS / steps),
    )  # fmt: skip
    ends = [round(_UNITS * i / steps) for i in range(steps)]
    parts = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))
    window = play(terms, parts)
    link_secs = window.moved_bytes / terms.link_bytes_per_sec
    waits = link_secs - min(setting.transfer, steps * setting.step)
    return waits, window.stall_secs, choose(terms).cost.stall_secs


def regenerate(document: str) -> str:
    """The document with every table made anew by the command that it names."""
    return _TABLE.sub(lambda m: f"{m['head']}\n\n{_table(m['command'])}\n\n{m['end']}", document)


def _table(command: str) -> str:
    if command == _PAPER:
        return paper_table()
    name, *arguments = shlex.split(command)
    assert name == "gockpt_jax", f"`{command}` is no command of ours"
    done = CliRunner().invoke(main, [*arguments, "--markdown"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output.strip()


if __name__ == "__main__":
    if "--paper" in sys.argv:
        print(paper_table())
    else:
        text = DOCUMENT.read_text(encoding="utf-8")
        DOCUMENT.write_text(regenerate(text), encoding="utf-8")
