"""`bench compiled`, with the CPU's compiler in place of an accelerator's."""

from __future__ import annotations

import jax
import pytest

from bench.accelerators import Compiler
from bench.compiled import benchmark
from bench.compiled.benchmark import measure
from bench.compiled.layouts import LAYOUTS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_is_compiled_and_worked_out(layout):
    figures = measure("sgd, momentum", "mlp", layout, jax.devices()[:4])
    assert figures == {"early": 16, "late": 0, "torn": 0, "otherwise": 0, "perturbed": 0}


def test_targets_that_cannot_be_had_are_told(monkeypatch):
    with pytest.raises(SystemExit, match=r"`--targets` got \['h200'\]; there are h100, v5e"):
        benchmark.run(quick=True, targets="h100,h200", layouts="single", jobs=1)
    with pytest.raises(SystemExit, match=r"`--layouts` got \['dp'\]; there are single, fsdp"):
        benchmark.run(quick=True, targets="h100", layouts="fsdp,dp", jobs=1)
    monkeypatch.setattr(Compiler, "is_installed", lambda _: False)
    with pytest.raises(SystemExit, match="None of these compilers is installed: v5e: `pip install"):
        benchmark.run(quick=True, targets="v5e", layouts="single", jobs=1)
    monkeypatch.setattr(Compiler, "is_installed", lambda compiler: compiler.platform == "tpu")
    monkeypatch.setattr(
        benchmark,
        "_in_a_process_of_its_own",
        lambda target, layout, quick: {f"{target}/{layout}/mlp/adam/torn": float(quick)},
    )
    record = benchmark.run(quick=True, targets="h100,v5e", layouts="fsdp", jobs=1)
    assert record.samples == {"v5e/fsdp/mlp/adam/torn": [1.0]}
    assert record.notes[-1] == "Not measured, its compiler is not installed: h100."
