"""What compilers of accelerators that are not here make of the cut: optax's optimizers, worked out.

For each optimizer and model of `bench cut` the armed step is compiled for an H100 and for a TPU,
and for four of them, which takes their compilers and no device. The optimised program is worked out
on the host, each operation rounded by itself; what lies outside elementwise code (matrix products,
reductions, sums over devices) is drawn at random. Of what the step returns the host replays the
early leaves; they must be the program's own.
"""

import argparse
import concurrent.futures
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from packaging.version import Version

from bench.accelerators import compiler_of, compiler_versions, devices_of
from bench.compiled.expressions import Expressions
from bench.compiled.layouts import LAYOUTS
from bench.compiled.step import CompiledStep, cut_state, differing_early, differing_results
from bench.cut.programs import OPTIMIZERS, QUICK, batch, make_step
from bench.cut.runs import Traced
from bench.record import ROOT, Record
from bench.tables import print_by_row

TARGETS = {"h100": "h100:4", "v5e": "v5e:2x2"}
"""Topologies of four devices, by name."""
MODELS = ("mlp", "transformer")
_COLUMNS = ("early", "late", "torn", "otherwise", "perturbed", "contracted", "flushing")
_NOTES = (
    "Compiled, not run; one compilation each, the state donated. Elementwise operations are worked "
    "out as IEEE 754 rounds them, all else is drawn at random, alike wherever it is the same "
    "expression.",
    "For the TPU gatherings are not fused with other work, or nobody could read what they give. "
    "single: on one device. fsdp: on four, all split over them. zero1: on four, the parameters "
    "replicated, the rest of the state split.",
    "early, late: leaves. torn: early leaves that replay on the host makes otherwise than the "
    "optimised program. otherwise: leaves whose expression is another in the armed step than in "
    "the user's own; perturbed: those of them that are other numbers.",
    "contracted (H100): multiply-adds in the kernels that no call of a mathematical function "
    "asked for, and products and sums whose rounding is left to the assembler. flushing: sums and "
    "products that take denormals for zero.",
)
# Not `atom.add` and `red.add`, by which a scatter adds up in memory.
_PTX_LOOSE = re.compile(r"(?<![.\w])(?:add|sub|mul)(?:\.ftz)?\.f(?:32|64)\b")
_PTX_FMA = re.compile(r"\bfma\.\w+[\w.]*f(?:32|64)\b")
_PTX_FLUSHING = re.compile(r"\b(?:add|sub|mul)\.(?:r[nzmp]\.)?ftz\.f32\b")
# From then on XLA dumps no kernels without; before, it may not know the flag and end the process.
_DUMPS_KERNELS_IF_ASKED = Version("0.11.2")
_IR_FMA = re.compile(r"\bcall\b[^\n]*@llvm\.(?:nvvm\.)?fma\.")


class CompiledRecord(Record):
    """Counts of compiled programs; as a table, a line for each of them."""

    def show(self) -> None:
        """Prints the notes, and last the table."""
        print_by_row(
            "bench compiled", "target/layout/model/optimizer", {name: name for name in _COLUMNS},
            self.samples, self.notes, cell=lambda _, count: f"{count:.10g}",
        )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    add, told = parser.add_argument, "comma-separated"
    add("--targets", default=",".join(TARGETS), help=f"{told}; those not installed are told")
    add("--layouts", default=",".join(LAYOUTS), help=told)
    add("--jobs", type=int, default=1, help="processes that compile at once")


def run(quick: bool, targets: str, layouts: str, jobs: int, **_: Any) -> CompiledRecord:
    """Compiles all optimizers on both models; if `quick`, a few on the MLP.

    Args:
      quick: Whether a few will do.
      targets: Names of targets, comma-separated.
      layouts: Names of layouts, likewise.
      jobs: Processes that compile at once.

    Raises:
      SystemExit: if there is no such target or layout, none is installed, or a process failed.
    """
    names, ways = _named("targets", targets, TARGETS), _named("layouts", layouts, LAYOUTS)
    record = CompiledRecord("compiled", notes=[*_NOTES, *compiler_versions()])
    compilers = {name: compiler_of(TARGETS[name]) for name in names}
    missing = [name for name, compiler in compilers.items() if not compiler.is_installed()]
    told = [f"{name}: `pip install {compilers[name].packages}`" for name in missing]
    if len(missing) == len(names):
        raise SystemExit(f"None of these compilers is installed: {'; '.join(told)}.")
    record.notes += [f"Not measured, its compiler is not installed: {name}." for name in missing]
    asked = itertools.product((name for name in names if name not in missing), ways)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda both: _in_a_process_of_its_own(*both, quick=quick), asked):
            record.samples |= {figure: [count] for figure, count in found.items()}
    return record


def _named(option: str, text: str, known: Iterable[str]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"`--{option}` got {unknown}; there are {', '.join(known)}.")
    return names


def _in_a_process_of_its_own(target: str, layout: str, *, quick: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        out, own = Path(directory, "figures.json"), dict(compiler_of(TARGETS[target]).environment)
        # The host must not contract: these figures are of what the accelerator's compiler does.
        dumped = f"--xla_dump_to={directory}/dump --xla_dump_hlo_module_re=.*armed.*"
        if Version(jaxlib.__version__) >= _DUMPS_KERNELS_IF_ASKED:
            dumped += " --xla_dump_emitter_re=.*"
        flags = (own.get("XLA_FLAGS", ""), "--xla_cpu_max_isa=AVX", dumped)
        environment = os.environ | own | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
        asked = json.dumps({"target": target, "layout": layout, "quick": quick})
        command = [sys.executable, "-m", "bench.compiled.benchmark", asked, directory]
        child = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        if child.returncode:
            raise SystemExit(f"the process that compiles {layout} for {target} failed")
        return json.loads(out.read_text(encoding="utf-8"))


def measure(optimizer: str, model: str, layout: str, devices: Sequence[Any]) -> dict[str, float]:
    """Figures of one optimizer on one model, by name."""
    traced = Traced(*make_step(optimizer, model))
    state, count = traced.first(), len(traced.leaves)
    cut = cut_state(traced.jaxpr, count)
    arguments = [*map(_drawn, jax.tree.leaves(state)), batch(0)]
    places = LAYOUTS[layout](devices, *(jax.tree.leaves(part) for part in state))
    compiled = functools.partial(
        CompiledStep.of, traced.jaxpr, arguments=arguments, places=places, count=count,
        expressions=Expressions(),
    )  # fmt: skip
    armed, user = compiled(cut), compiled(None, name="users")
    torn = differing_early(armed, cut, arguments)
    otherwise, perturbed = differing_results(armed, user, arguments, count)
    return {
        "early": len(torn), "late": len(cut.late), "torn": sum(n > 0 for n in torn.values()),
        "otherwise": otherwise, "perturbed": perturbed,
    }  # fmt: skip


def _drawn(leaf: Any) -> Any:
    """A leaf of a state in the middle of training: a first one is mostly zeros, which hide much."""
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    normal = np.random.default_rng(leaf.size).standard_normal(leaf.shape)
    return np.abs(normal).astype(leaf.dtype)  # second moments are positive


def contracted(dump: Path) -> int:
    """Counts multiply-adds of a compiler's own in dumped kernels, and what may become one.

    A mathematical function is made of multiply-adds, which are calls in LLVM's IR. What PTX rounds
    explicitly (`mul.rn`) the assembler never contracts.
    """
    count = 0
    for path in dump.glob("*.ptx"):
        code = path.read_text(errors="replace")
        ir = path.with_suffix(".ir-with-opt.ll").read_text(errors="replace")
        own = len(_PTX_FMA.findall(code)) - len(_IR_FMA.findall(ir))
        count += max(0, own) + len(_PTX_LOOSE.findall(code))
    return count


def flushing(dump: Path) -> int:
    """Counts sums and products in dumped kernels that take denormals for zero."""
    codes = [path.read_text(errors="replace") for path in dump.glob("*.ptx")]
    assert codes, "the compiler has dumped no kernels"
    return sum(len(_PTX_FLUSHING.findall(code)) for code in codes)


def _child(target: str, layout: str, directory: Path, *, quick: bool) -> None:
    figures: dict[str, float] = {}
    devices, dump = devices_of(TARGETS[target]), directory / "dump"
    models, optimizers = (MODELS[:1], QUICK) if quick else (MODELS, tuple(OPTIMIZERS))
    for model, optimizer in itertools.product(models, optimizers):
        found = measure(optimizer, model, layout, devices)
        if target == "h100":
            found["contracted"] = contracted(dump)
            found["flushing"] = flushing(dump)
            shutil.rmtree(dump)
        figures |= {f"{target}/{layout}/{model}/{optimizer}/{name}": n for name, n in found.items()}
        print(target, layout, model, optimizer, found, flush=True)
    (directory / "figures.json").write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    _child(**json.loads(sys.argv[1]), directory=Path(sys.argv[2]))
