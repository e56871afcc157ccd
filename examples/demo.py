"""Kill a training run inside a checkpoint window, resume it, and compare with an unbroken run.

    make demo

Three processes train the same model on the same batches: one without interruption, one killed
between the opening of a window and its save step, and one that resumes from what the killed one
left. This process never imports gockpt_jax: it restores what they saved with stock Orbax. What is
in `runs/demo` is deleted first.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
from lm import compare, journal
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).resolve().parent
ROOT = EXAMPLES.parent / "runs" / "demo"

STEPS, SAVE_EVERY, WINDOW = 81, 20, 5  # Labels 0 to 80: the last step is a save of its own.
CRASH_AT, CRASHED_WINDOW = 38, 40  # The window of save 40 holds steps 36 to 40.
MODEL = ("--size=nano", "--dtype=float32", "--batch-size=8", "--seq-len=64")
CHILD_LIMIT_SECS = 600

# A difference up to this part of a leaf's largest value is rounding. Measured on this run: one
# parameter leaf changed in its last bit at step 20 makes 7e-6 by step 80, one leaf that is a single
# update ahead makes 2e-2. That holds in float32; bfloat16 blows a last bit up to 5e-2 in 60 steps,
# so no bound would tell rounding from error, and the demo computes in float32.
ROUNDING = 1e-4
WHY_ROUNDING = (
    "Inside a window the step runs as a second compilation of the same program, which returns the "
    "gradients too. A compiler may order or fuse arithmetic differently in the two, and so may the "
    "host that replays updates. Both differ in the last bits only; a checkpoint that mixed two "
    "versions would differ by whole updates."
)
ABOUT_TIMES = (
    "Training, replay and writing share this machine's cores: the times show no speed. The first "
    "window of a process waits until the armed step is compiled, because the demo fixes K; left to "
    "itself gockpt_jax saves a snapshot meanwhile."
)


class DemoError(RuntimeError):
    """Something that the demo promises did not happen."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory of `train_lm.py`."""

    name: str

    @property
    def directory(self) -> Path:
        """Where the run lives."""
        return ROOT / self.name

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.directory / "checkpoints"

    def report(self) -> dict[str, Any]:
        """Return what the last process of the run reported."""
        return json.loads((self.directory / "report.json").read_text(encoding="utf-8"))


def child_environment() -> dict[str, str]:
    """Return the children's environment: a GPU if there is one, else two simulated devices."""
    probe = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    backend = subprocess.run(probe, check=True, capture_output=True, text=True).stdout.strip()
    if backend == "cpu":
        # x86 CPUs fuse multiply and add wherever the compiler likes, accelerators do not. AVX has
        # no fused instruction, so that the CPU is the better stand-in for an accelerator.
        flags = "--xla_cpu_max_isa=AVX --xla_force_host_platform_device_count=2"
        return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    # Otherwise two processes may choose different kernels, and differ without any checkpoint; and
    # float32 products would be rounded to TF32, whose last bit is 8192 times as large.
    return os.environ | {
        "XLA_FLAGS": "--xla_gpu_deterministic_ops=true",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }


def train(run: Run, environment: dict[str, str], *extra: str, expect: int = 0) -> None:
    """Run `train_lm.py` in a process of its own; the terminal is shared."""
    command = [sys.executable, str(EXAMPLES / "train_lm.py"), *MODEL]
    command += [f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", f"--window={WINDOW}"]
    command += [f"--directory={run.directory}", *extra]
    result = subprocess.run(command, env=environment, timeout=CHILD_LIMIT_SECS, check=False)
    if result.returncode != expect:
        raise DemoError(f"{run.name}: expected exit status {expect}, got {result.returncode}")


def check_crash(run: Run) -> tuple[str, int]:
    """Check that the kill met an open window; return where, and the last whole checkpoint."""
    record = json.loads((run.directory / journal.CRASH).read_text(encoding="utf-8"))
    # A window that was opened without a label in sight (`expect_save`) does not name one.
    match = re.fullmatch(r"window \d+/\d+(?: -> step (\d+))?", record["window"])
    if not match or int(match[1] or CRASHED_WINDOW) != CRASHED_WINDOW:
        raise DemoError(
            f"expected to die in the window of save {CRASHED_WINDOW}, was at `{record['window']}`"
        )
    # The save before the window is committed in the background: on a fast machine the kill may
    # catch that one too. The one before it is safe, since a save waits for its predecessor.
    labels = compare.saved_labels(run.checkpoints)
    if not labels or labels[-1] >= CRASHED_WINDOW:
        raise DemoError(f"expected whole checkpoints below {CRASHED_WINDOW} only, got {labels}")
    told = f"killed after train step {record['step']}, in `{record['window']}`"
    if labels[-1] < CRASHED_WINDOW - SAVE_EVERY:
        told += f", while checkpoint {CRASHED_WINDOW - SAVE_EVERY} was still on its way to the disk"
    return told, labels[-1]


def check_resume(run: Run, last_whole: int) -> str:
    """Check that the second process went on where the first one's last checkpoint was."""
    resumed_from = run.report()["resumed_from"]
    if resumed_from != last_whole:
        raise DemoError(f"expected to resume from {last_whole}, got {resumed_from}")
    return f"resumed from checkpoint {resumed_from}"


def saves_table(runs: list[Run]) -> Table:
    """Show every save of the processes that lived to tell."""
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=ABOUT_TIMES, caption_justify="left"
    )
    for column in ("run", "save", "kind"):
        table.add_column(column, no_wrap=True)
    for column in ("K", "state\nMB", "gradients\nMB", "stall\nms", "drain\nms", "write\nms"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for run in runs:
        for save in run.report()["saves"]:
            table.add_row(
                run.name,
                str(save["step"]),
                save["kind"],
                str(save["window_steps"]),
                *(f"{save[name] / 1e6:.1f}" for name in ("state_bytes", "gradient_bytes")),
                *(f"{save[f'{part}_secs'] * 1e3:.1f}" for part in ("stall", "drain", "write")),
                save["reason"],
            )
    return table


def compare_losses(unbroken: Run, broken: Run) -> tuple[str, float]:
    """Compare every loss of the broken run, those computed twice included."""
    expected = dict(journal.read_losses(unbroken.directory))
    rows = journal.read_losses(broken.directory)
    if {step for step, _ in rows} != set(range(STEPS)) or len(expected) != STEPS:
        raise DemoError(f"expected losses of all {STEPS} steps in both runs")
    resumed = broken.report()["losses"]
    worst = max(abs(loss - expected[step]) / abs(expected[step]) for step, loss in rows)
    what = f"{len(rows)} losses ({len(resumed)} of them after the resume)"
    return (what + ": bit for bit", 0.0) if worst == 0 else (what + f": within {worst:.1e}", worst)


def leaves_table(label: int, leaves: list[compare.LeafDifference]) -> Table:
    """Show the leaves that differ, the worst first."""
    table = Table("leaf", "elements", "differing", "largest / leaf's maximum", box=SIMPLE_HEAD)
    table.title = f"Differences in checkpoint {label}"
    for leaf in sorted(leaves, key=lambda leaf: -leaf.relative):
        if leaf.differing:
            row = (str(leaf.elements), str(leaf.differing), f"{leaf.relative:.1e}")
            table.add_row(leaf.name, *row)
    return table


def compare_states(console: Console, unbroken: Run, broken: Run) -> float:
    """Compare parameters and optimizer state after the resume; return the largest difference."""
    labels = compare.saved_labels(broken.checkpoints)
    if labels != compare.saved_labels(unbroken.checkpoints) or labels[-1] != STEPS - 1:
        raise DemoError(f"expected the same checkpoints in both runs, the last {STEPS - 1}")
    worst = 0.0
    for label in labels:
        leaves = compare.compare_checkpoints(unbroken.checkpoints, broken.checkpoints, label)
        differing = [leaf for leaf in leaves if leaf.differing]
        worst = max([worst, *(leaf.relative for leaf in differing)])
        what = "bit for bit" if not differing else f"{len(differing)} leaves differ"
        console.print(f"  checkpoint {label}: {len(leaves)} leaves: {what}")
        if differing and label == labels[-1]:
            console.print(leaves_table(label, leaves))
    return worst


def demonstrate(console: Console) -> None:
    """Run the three processes and compare."""
    unbroken, broken = Run("unbroken"), Run("resumed")
    environment = child_environment()
    console.rule("1. an uninterrupted run")
    train(unbroken, environment, f"--report={unbroken.directory / 'report.json'}")
    console.rule("2. the same run, killed inside a window")
    train(broken, environment, f"--crash-at={CRASH_AT}", expect=-signal.SIGKILL)
    what, last_whole = check_crash(broken)
    console.print(what, style="bold")
    console.rule("3. resumed in a fresh process")
    train(broken, environment, f"--report={broken.directory / 'report.json'}")
    console.print(check_resume(broken, last_whole), style="bold")
    console.rule("4. what stock Orbax finds")
    console.print(saves_table([unbroken, broken]))
    line, worst_loss = compare_losses(unbroken, broken)
    console.print("killed and resumed, against uninterrupted:", style="bold")
    console.print(f"  {line}")
    worst = max(worst_loss, compare_states(console, unbroken, broken))
    if worst > ROUNDING:
        raise DemoError(f"differences up to {worst:.1e} are more than rounding ({ROUNDING:.0e})")
    console.print("identical, bit for bit" if worst == 0 else WHY_ROUNDING, style="bold green")


def main() -> int:
    """Run the demo; return its exit status."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    # Without a terminal, rich would fold everything to 80 columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    jax.config.update("jax_platforms", "cpu")  # The children need the accelerator, we do not.
    shutil.rmtree(ROOT, ignore_errors=True)
    start = time.perf_counter()
    try:
        demonstrate(console)
    except (DemoError, subprocess.SubprocessError) as error:
        console.print(f"demo failed: {error}", style="bold red")
        return 1
    if "gockpt_jax" in sys.modules:
        raise AssertionError("this process was to use stock Orbax only")
    console.print(f"{time.perf_counter() - start:.0f} s; everything is in {ROOT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
