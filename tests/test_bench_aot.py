"""What `bench aot` reads from compiled programs, on the programs of 8 simulated CPU devices."""

from __future__ import annotations

import doctest
import types

import jax
import pytest

from bench import aot, aot_hlo
from bench.aot_compile import GIB, Case, measure
from bench.aot_hlo import read_program

TPU_TEXT = """\
HloModule jit__copy, entry_computation_layout={(f32[8]{0:T(128)})->f32[8]{0:T(128)}}
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:T(128)} parameter(0), metadata={op_name="x[\\'copy(\\']"}
  %s = ((f32[8]{0:T(128)}), f32[4]{0:T(128)S(1)}, u32[]{:S(2)}) slice-start(%p), slice={[0:4]}
  %d = f32[4]{0:T(128)S(1)} slice-done(%s)
  %b = f32[8]{0:T(128)S(1)} custom-call(%d, %d), custom_call_target="ConcatBitcast"
  %cs = (f32[8]{0:T(128)}, f32[8]{0:T(128)}, u32[]{:S(2)}) copy-start(%b)
  %ag = (f32[1], f32[8]) all-gather-start(%p), dimensions={0}
  %f = f32[8]{0:T(128)} fusion(%p), kind=kLoop, calls=%c
  ROOT %cd = f32[8]{0:T(128)} copy-done(%cs)
}
"""


def test_moving_bytes_is_not_computing():
    memory = types.SimpleNamespace(
        argument_size_in_bytes=10, output_size_in_bytes=8, alias_size_in_bytes=5,
        temp_size_in_bytes=3,
    )  # fmt: skip
    compiled = types.SimpleNamespace(memory_analysis=lambda: memory, as_text=lambda: TPU_TEXT)
    program = read_program(compiled)
    assert (program.copies, program.collectives, program.computing) == (1, 1, 2)
    assert program.total_bytes == 10 + 8 - 5 + 3


def test_a_case_is_measured_on_any_devices():
    case = Case("cpu", tensor=2, layers=2, width=256, seq_len=32)
    found = measure(case, jax.devices()[:4], max_steps=3)
    assert found["chips"] == 4
    # Matrices and biases of two layers, embeddings and norms.
    layer = 12 * 256**2 + (256 + 4 * 256 + 256) + 4 * 256
    assert found["parameters_billions"] * 1e9 == 2 * layer + (256 + 32) * 256 + 2 * 256
    assert found["retained_compiled_gib"] == pytest.approx(found["retained_gib"], rel=0.01)
    assert found["device_copy_gib"] == pytest.approx(found["state_gib"], rel=0.01)
    assert found["staging/most_new_over_copied"] < 1.05
    assert found["staging/collectives"] == 0
    assert found["armed/collectives"] > 0
    extra = found["armed/total_gib"] - found["unarmed/total_gib"]
    assert found["armed_extra_gib"] == pytest.approx(extra, abs=64 / GIB)
    for k in (2, 3):
        planned, compiled = found[f"k{k}/planned_gib"], found[f"k{k}/compiled_gib"]
        off = found["armed_extra_gib"] - found["retained_gib"]
        assert compiled == pytest.approx(planned + off, rel=0.02)


def test_a_case_that_does_not_compile_is_not_measured(monkeypatch):
    monkeypatch.setattr(aot, "_CASES", (Case("v5e:none", 1, 1, 128),))
    monkeypatch.setattr(aot.importlib.metadata, "version", lambda name: "0")
    monkeypatch.setattr(aot, "_compile", lambda case: "RESOURCE_EXHAUSTED: no room")
    record = aot.run(quick=False)
    assert record.samples == {}
    assert record.notes[-1] == "v5e:none/0B/fsdp: not measured: RESOURCE_EXHAUSTED: no room"


def test_docstring_examples():
    assert doctest.testmod(aot_hlo).failed == 0
