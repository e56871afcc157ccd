"""`bench compiled`, with the CPU's compiler in place of an accelerator's."""

from __future__ import annotations

import jax
import pytest

from bench.accelerators import Compiler
from bench.compiled import benchmark
from bench.compiled.benchmark import measure
from bench.compiled.expressions import Expressions, Program
from bench.compiled.hlo import parse
from bench.compiled.layouts import LAYOUTS


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=pytest.mark.thorough if x == "single" else ()) for x in LAYOUTS],
)
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


LOOP_IN_A_LOOP = """HloModule jit_step

%inner (p: (f32[4], s32[])) -> (f32[4], s32[]) {
  %p = (f32[4], s32[]) parameter(0)
  %w = f32[4]{0} get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=1
  ROOT %t = (f32[4]{0}, s32[]) tuple(%w, %n)
}

%outer (q: (f32[4], f32[4], f32[4], s32[])) -> (f32[4], f32[4], f32[4], s32[]) {
  %q = (f32[4], f32[4], f32[4], s32[]) parameter(0)
  %w = f32[4]{0} get-tuple-element(%q), index=0
  %x = f32[4]{0} get-tuple-element(%q), index=1
  %y = f32[4]{0} get-tuple-element(%q), index=2
  %n = s32[] get-tuple-element(%q), index=3
  %given = (f32[4]{0}, s32[]) tuple(%w, %n)
  %turns = (f32[4]{0}, s32[]) while(%given), condition=%again, body=%inner
  %kept = f32[4]{0} get-tuple-element(%turns), index=0
  ROOT %t = (f32[4]{0}, f32[4]{0}, f32[4]{0}, s32[]) tuple(%kept, %y, %x, %n)
}

%again (r: (f32[4], s32[])) -> pred[] {
  %r = (f32[4], s32[]) parameter(0)
  ROOT %no = pred[] constant(false)
}

ENTRY %main (w: f32[4], x: f32[4], y: f32[4], n: s32[]) -> (f32[4], f32[4], f32[4], s32[]) {
  %w = f32[4]{0} parameter(0)
  %x = f32[4]{0} parameter(1)
  %y = f32[4]{0} parameter(2)
  %n = s32[] parameter(3)
  %given = (f32[4]{0}, f32[4]{0}, f32[4]{0}, s32[]) tuple(%w, %x, %y, %n)
  ROOT %turns = (f32[4], f32[4], f32[4], s32[]) while(%given), condition=%again, body=%outer
}
"""


def test_what_loops_hand_on_is_what_went_in():
    """Through a loop within, too; what two of its parts exchange is neither."""
    program = Program(parse(LOOP_IN_A_LOOP), Expressions())
    w, x, y, n = (program.parameters[i] for i in range(4))
    assert (program.results[0], program.results[3]) == (w, n)
    assert not {x, y} & set(program.results)


def test_sums_in_memory_are_not_what_an_assembler_may_contract(tmp_path):
    atomic = (
        "\tatom.global.add.f32 %f3, [%rd1], %f2;\n\tred.relaxed.gpu.global.add.f32 [%rd1], %f2;\n"
    )
    loose = (
        "\tadd.f32 %f3, %f1, %f2;\n\t@%p1 mul.ftz.f32 %f3, %f1, %f2;\n\tadd.rn.f32 %f3, %f1, %f2;\n"
    )
    (tmp_path / "kernel.ir-with-opt.ll").write_text("")
    (tmp_path / "kernel.ptx").write_text(atomic)
    assert benchmark.contracted(tmp_path) == 0
    (tmp_path / "kernel.ptx").write_text(atomic + loose)
    assert benchmark.contracted(tmp_path) == 2
