"""What `bench aot` reads from compiled programs, on the programs of 8 simulated CPU devices."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bench.accelerators import Compiler
from bench.aot import benchmark as aot
from bench.aot.compile import GIB, Case, measure_step
from bench.aot.hlo import read_program
from bench.aot.model import GPTConfig, abstract_call, make_mesh

TPU_TEXT = """\
HloModule jit__copy, entry_computation_layout={(f32[8]{0:T(128)})->f32[8]{0:T(128)}}
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:T(128)} parameter(0), metadata={op_name="x[\\'copy(\\']"}
  %s = ((f32[8]{0:T(128)}), f32[4]{0:T(128)S(1)}, u32[]{:S(2)}) slice-start(%p), slice={[0:4]}
  %d = f32[4]{0:T(128)S(1)} slice-done(%s)
  %b = f32[8]{0:T(128)S(1)} custom-call(%d, %d), custom_call_target="ConcatBitcast"
  %cs = (f32[8]{0:T(128)}, f32[8]{0:T(128)}, u32[]{:S(2)}) copy-start(%b)
  %ag = (f32[1], f32[8]) all-gather-start(%p), dimensions={0}
  %pad = f32[8]{0:T(128)} pad(%p, %zero), padding=0_4
  %f = f32[8]{0:T(128)} fusion(%p), kind=kLoop, calls=%c
  %i = s32[8]{0:T(128)} bitcast-convert(%f)
  %m = s32[8]{0:T(128)} maximum(%pad, %i), metadata={op_name="jit(_copy)/concatenate"}
  %j = u32[8]{0:T(128)} add(%m, %i), metadata={op_name="jit(_copy)/concatenate" id=6}
  %fm = f32[8]{0:T(128)} maximum(%pad, %i), metadata={op_name="jit(_copy)/concatenate"}
  %a = s32[8]{0:T(128)} add(%m, %i), metadata={op_name="jit(_copy)/add"}
  %new = f32[8]{0:T(128)S(1)} custom-call(), custom_call_target="AllocateBuffer"
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
    assert (program.copies, program.collectives) == (1, 1)
    assert (program.joins, program.computing) == (2, 3)
    assert program.total_bytes == 10 + 8 - 5 + 3


def test_a_step_is_measured_on_any_devices():
    mesh = make_mesh(jax.devices(), tensor=1)
    rows, tx = NamedSharding(mesh, PartitionSpec("data")), optax.adam(1e-3)

    def update(state, x):
        params, opt = state
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"] @ p["v"]) ** 2))(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    params = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in "vw"}
    state = (params, jax.eval_shape(tx.init, params))
    place = jax.tree.map(lambda a: rows if a.shape else NamedSharding(mesh, PartitionSpec()), state)
    state = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, place
    )
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32, sharding=rows)
    step = jax.jit(update, donate_argnums=0, in_shardings=(place, rows), out_shardings=place)
    found = measure_step(step, (state, x), max_steps=3)

    leaf_gib = 256 * 256 * 4 / 8 / GIB
    assert found["state_gib"] == pytest.approx(6 * leaf_gib, rel=1e-3)
    assert found["device_copy_gib"] == pytest.approx(found["state_gib"], rel=0.01)
    assert found["retained_gib"] == 2 * leaf_gib
    assert found["retained_compiled_gib"] == pytest.approx(2 * leaf_gib, rel=0.01)
    assert found["armed/collectives"] > 0
    assert found["staging/collectives"] == 0
    assert found["staging/most_new_over_copied"] < 1.05
    extra = found["armed/total_gib"] - found["unarmed/total_gib"]
    assert found["armed_extra_gib"] == pytest.approx(extra)
    known = found | {"armed_extra_gib": extra + leaf_gib, "unarmed/copies": 77.0}
    again = measure_step(step, (state, x), max_steps=3, known=known)
    assert again.keys() == found.keys()
    assert again["unarmed/copies"] == 77.0
    more = again["k3/compiled_gib"] - found["k3/compiled_gib"]
    assert more == pytest.approx(leaf_gib, rel=1e-3)
    # A snapshot in the budget of K = 3: each leaf, and the count, is more than a sixteenth.
    assert found["snapshot/parts"] == 7
    assert found["snapshot/planned_gib"] == found["k3/planned_gib"] < found["state_gib"]
    assert found["snapshot/compiled_gib"] == pytest.approx(found["k3/planned_gib"], rel=0.01)
    # The moments of both leaves; or of one, beside the gradient that follows the other's. And what
    # a step retains.
    for k, leaves, following in ((2, 4, 0), (3, 2, 1)):
        assert found[f"k{k}/planned_gib"] == (leaves + following + 2) * leaf_gib
        beside = (leaves + following) * leaf_gib + extra
        assert found[f"k{k}/compiled_gib"] == pytest.approx(beside, rel=0.01)


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_model_is_the_examples_and_every_large_leaf_is_split_over_all_chips(tensor):
    mesh = make_mesh(jax.devices(), tensor)
    config = GPTConfig(layers=20, heads=2, width=256)
    with jax.set_mesh(mesh):
        step, (state, batch) = abstract_call(config, mesh, seq_len=32)
        new, loss = jax.eval_shape(step, state, batch)
    assert loss.shape == ()
    assert jax.tree.structure(new) == jax.tree.structure(state)
    # Of 20 layers, matrices and biases; embeddings and norms.
    layer = 12 * 256**2 + (256 + 4 * 256 + 256) + 4 * 256
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert parameters == 20 * layer + (256 + 32) * 256 + 2 * 256
    large = [x for x in jax.tree.leaves(state.params["segment_0"]) if x.size > 20 * 4 * 256]
    parts = [x.size / math.prod(x.sharding.shard_shape(x.shape)) for x in large]
    assert parts == [8.0] * 4
    assert batch.shape == (8 // tensor, 33)


def test_a_case_that_does_not_compile_is_not_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(aot, "_CASES", (Case("v5e:none", 1, 1, 128),))
    monkeypatch.setattr(Compiler, "is_installed", lambda _: True)
    monkeypatch.setattr(aot, "_compile", lambda *_: "RESOURCE_EXHAUSTED: no room")
    options = {
        "cases": None, "steps_of": None, "case_minutes": 1.0, "case_gib": 1.0,
        "out": tmp_path / "aot.json",
    }  # fmt: skip
    record = aot.run(quick=False, **options)
    assert record.samples == {}
    assert record.notes[-1] == "v5e:none/0B/fsdp: not measured: RESOURCE_EXHAUSTED: no room"
    assert json.loads(options["out"].read_text())["notes"] == record.notes
    with pytest.raises(SystemExit, match="names none of v5e:none/0B/fsdp"):
        aot.run(quick=False, **options | {"cases": "v5p,v6e"})


def test_a_compiler_that_is_not_there_is_told(monkeypatch, tmp_path):
    cases = (Case("v5e:2x4", 1, 1, 128), Case("h100:2", 1, 1, 128))
    monkeypatch.setattr(aot, "_CASES", cases)
    monkeypatch.setattr(Compiler, "is_installed", lambda compiler: compiler.platform == "tpu")
    monkeypatch.setattr(aot, "_compile", lambda *_: {"state_gib": 1.0})
    options = {
        "cases": None, "steps_of": None, "case_minutes": 1.0, "case_gib": 1.0, "out": None,
    }  # fmt: skip
    record = aot.run(quick=False, **options)
    assert list(record.samples) == ["v5e:2x4/0B/fsdp/state_gib"]
    assert record.notes[-1].startswith(
        "h100:2/0B/fsdp: not measured: its compiler is not installed"
    )
    monkeypatch.setattr(Compiler, "is_installed", lambda _: False)
    with pytest.raises(SystemExit, match=r"pip install jax\[tpu\].*jax-cuda13-plugin"):
        aot.run(quick=False, **options)


def test_steps_of_an_earlier_record_are_taken_for_what_they_were(monkeypatch, tmp_path):
    case = Case("v5e:2x4", 1, 1, 128)
    name = f"{aot._name(case)}/armed/copies"
    notes = [f"{aot._name(case)}: not measured: no room", "v5p/6B/fsdp: not measured: no time"]
    earlier = {"commit": "c0ffee", "notes": notes, "figures": {name: 7.0}}
    (tmp_path / "earlier.json").write_text(json.dumps(earlier))
    record = aot.AotRecord("aot")
    found = aot._earlier(record, tmp_path / "earlier.json", [aot._name(case)])
    assert found == {aot._name(case): {"armed/copies": 7.0}}
    assert record.notes == ["The steps were compiled at commit c0ffee.", notes[1]]


@pytest.mark.parametrize(
    ("limit_secs", "limit_gib", "why"),
    [(0.0, 99.0, "not compiled within 0 s"), (60.0, 0.0, "more than 0 GiB of host memory")],
)
def test_a_compilation_is_ended_at_its_limits(limit_secs, limit_gib, why):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert why in aot._watch(child, limit_secs, limit_gib)
    assert child.returncode == -signal.SIGKILL
    child.stdin.close()
