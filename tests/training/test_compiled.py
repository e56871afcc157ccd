"""What accelerators' compilers make of a cut, without the accelerators: `bench.compiled`.

`make compiled` compiles for an H100 and a TPU, all pairs of `test_merging.py` and many random
programs; `make test` has a few compiled for the CPU, and worked out all the same.
"""

from __future__ import annotations

import os
import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from campaigns import seeds
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from programs.random_program import RandomProgram
from programs.random_updates import random_updates
from test_gains import MODELS, OPTIMIZERS, analysed
from test_merging import ERASED, FOLDED, PAIRS, arguments_of_pair, step_of_pair
from training_helpers import Analysis, analyse
from updates import UPDATES, gradient

from bench.accelerators import devices_of
from bench.compiled.benchmark import contracted, flushing
from bench.compiled.step import (
    CompiledStep,
    as_numpy,
    cut_state,
    differing_early,
    differing_results,
)
from gockpt_jax.training import exact, graph, walk
from gockpt_jax.training.step_cut import StepCut
from gockpt_jax.transfer import layout, packing, sample
from gockpt_jax.transfer.chunks import Chunk, Source

TOPOLOGIES = {"h100": "h100:8", "v5e": "v5e:2x4"}
ASKED = os.environ.get("GOCKPT_COMPILED", "")
PLACES = ASKED.split(",") if ASKED else ["cpu"]
FEW = [*random.Random(1).sample(PAIRS, 12), *(("dot", follows) for follows in FOLDED)]
SEEDS = seeds("PROGRAMS") or range(79, 82)


@pytest.fixture(scope="module", params=PLACES)
def devices(request: Any) -> Any:
    """Eight to compile for."""
    name = request.param
    if name == "cpu":
        return jax.devices()
    jax.config.update("jax_enable_compilation_cache", False)  # it loads programs to run them
    return devices_of(TOPOLOGIES[name])


def single(found: Analysis, device: Any) -> list[Any]:
    """Places for the arguments of an analysis: all on one device."""
    return [SingleDeviceSharding(device)] * len(jax.tree.leaves(found.args))


def compiled(found: Analysis, places: Any, cut: Any = None, **options: Any) -> CompiledStep:
    count, arguments = len(found.leaves), jax.tree.leaves(found.args)
    return CompiledStep.of(found.jaxpr, cut, arguments, places, count=count, **options)


def torn(found: Analysis, device: Any) -> dict[int, int]:
    cut = cut_of(found)
    step = compiled(found, single(found, device), cut)
    early = differing_early(step, cut, jax.tree.leaves(found.args))
    return {j: n for j, n in early.items() if n}


def cut_of(found: Analysis) -> StepCut:
    return cut_state(found.jaxpr, len(found.leaves), even_for_nothing=True)


@pytest.mark.parametrize("in_a_branch", [False, True] if ASKED else [False])
@pytest.mark.parametrize(("value", "follows"), PAIRS if ASKED else dict.fromkeys(FEW))
def test_a_compiler_goes_on_with_what_is_retained(
    value: str, follows: str, in_a_branch: bool, devices: Any
) -> None:
    if value == "exchanged with nobody" and devices[0].platform != "cpu":
        pytest.skip("its mesh is of the devices that are here")
    step = step_of_pair(value, follows, in_a_branch)
    found = analyse(step, *arguments_of_pair(), even_for_nothing=True)
    assert not torn(found, devices[0])


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_compiler_goes_on_with_what_a_random_program_retains(
    seed: int, count: int, devices: Any
) -> None:
    program = RandomProgram(seed, count)
    given = program.state.make(), program.state.batch(0)
    (arguments, tree), size = jax.tree.flatten(given), len(jax.tree.leaves(given[0]))
    program.state.move(devices)
    places = [program.state.places[i] for i in jax.tree.leaves(program.state.nested)]
    places += [program.state.batch_place] * (len(arguments) - size)
    there = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        for x, place in zip(arguments, places, strict=True)
    ]
    traced = jax.jit(program.update).trace(*jax.tree.unflatten(tree, there))
    cut = cut_state(traced.jaxpr, size, even_for_nothing=True)
    step = CompiledStep.of(traced.jaxpr, cut, arguments, places, count=size)
    assert not any(differing_early(step, cut, arguments, seed).values())


@pytest.mark.parametrize("seed", SEEDS if ASKED else [0])
def test_a_compiler_goes_on_with_what_random_updates_retain(seed: int, devices: Any) -> None:
    found = analyse(*random_updates(seed, 60 if ASKED else 15))
    assert not torn(found, devices[0])


@pytest.mark.parametrize("model", MODELS if ASKED else ["accumulated and scanned"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS if ASKED else ["clipped AdamW"])
def test_a_compiler_goes_on_with_what_a_model_retains(
    model: str, optimizer: str, devices: Any
) -> None:
    if model == "averaged by hand" and devices[0].platform != "cpu":
        pytest.skip("its mesh is of the devices that are here")
    assert not torn(analysed(model, optimizer), devices[0])


def test_working_a_program_out_gives_what_running_it_gives() -> None:
    """Of updates of nothing but what IEEE 754 fixes, and what moves elements."""
    fixed = {
        "add", "subtract", "multiply", "select", "compare", "and", "maximum", "minimum", "clamp",
        "negate", "abs", "sign", "convert", "constant", "broadcast", "bitcast", "slice",
    }  # fmt: skip
    compared = 0
    for name, update in UPDATES.items():
        if name == "masked":  # of so large a constant no program shows all elements
            continue
        found = analyse(update.step, update.state, gradient())
        arguments = jax.tree.leaves(found.args)
        step = compiled(found, single(found, jax.devices()[0]), cut_of(found))
        numbers, (new, _) = step.numbers(arguments), found.run()
        for j in (j for group in found.cut.groups for j in group.leaves):
            worked_out = step.result(numbers, j)
            if numbers.met <= fixed:
                np.testing.assert_array_equal(worked_out, as_numpy(new[j]))
                compared += 1
    assert compared > 20


def test_what_devices_exchange_is_worked_out_as_they_do() -> None:
    """Of a program that moves elements between eight devices, and computes little."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)

    def placed(shape: tuple[int, ...], *spec: Any) -> jax.Array:
        array = rng.standard_normal(shape).astype(np.float32)
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    def to(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))

    def step(state: dict[str, jax.Array], factor: jax.Array) -> Any:
        v, w = to(state["v"], "b") * factor, state["w"]
        turned = to(w, None, "a").T + jnp.roll(to(w.T, "b", "a"), 5, axis=0)
        return {"v": to(v, ("a", "b")), "w": to(turned, ("a", "b")).T}, factor

    state = {"v": placed((16,), "a"), "w": placed((16, 16), "a", "b")}
    found = analyse(step, state, placed(()), even_for_nothing=True)
    arguments = jax.tree.leaves(found.args)
    worked_out = compiled(found, [x.sharding for x in arguments], cut_of(found))
    numbers = worked_out.numbers(arguments)
    for j, x in enumerate(jax.tree.leaves(found.step(*found.args)[0])):
        np.testing.assert_array_equal(worked_out.result(numbers, j), np.asarray(x))
    assert {"all-gather", "all-to-all", "collective-permute", "partition-id"} <= numbers.met


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 12), reason="the compiler of jax 0.12 was not seen to fold these"
)
@pytest.mark.parametrize("value", ["sorted alone", "scattered alone", "all bits"])
def test_a_factor_that_is_merged_is_seen(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert value in ERASED
    for module in (graph, walk):
        monkeypatch.setattr(module, "may_be_cut", lambda _: True)
    monkeypatch.setattr(exact, "merges", lambda _: False)
    step = step_of_pair(value, "times two constants")
    found = analyse(step, *arguments_of_pair(), even_for_nothing=True)
    assert torn(found, jax.devices()[0])


def test_two_programs_are_compared_by_what_they_compute() -> None:
    found = analyse(step_of_pair("dot", "averaged"), *arguments_of_pair())
    other = analyse(lambda *args: _doubled(args), *arguments_of_pair())
    arguments, places = jax.tree.leaves(found.args), single(found, jax.devices()[0])
    one = compiled(found, places, cut_of(found))
    same = compiled(found, places, expressions=one.expressions)
    assert differing_results(one, same, arguments, 2) == (0, 0)
    doubled = compiled(other, places, expressions=one.expressions)
    assert differing_results(one, doubled, arguments, 2) == (1, 1)


def test_a_zero_of_the_other_sign_is_another_number_and_nan_is_nan() -> None:
    def filled(*numbers: float) -> Analysis:
        def step(state: dict[str, Any], *_: Any) -> dict[str, Any]:
            return {k: jnp.full_like(state[k], x) for k, x in zip("mn", numbers, strict=True)}

        return analyse(step, *arguments_of_pair())

    found, other = filled(0.0, np.nan), filled(-0.0, -np.nan)
    arguments, places = jax.tree.leaves(found.args), single(found, jax.devices()[0])
    one = compiled(found, places)
    two = compiled(other, places, expressions=one.expressions)
    assert differing_results(one, two, arguments, 2)[1] == 1


def _doubled(args: Any) -> Any:
    new = step_of_pair("dot", "averaged")(*args)
    return new | {"m": new["m"] * jnp.float32(2.0)}


def test_multiply_adds_of_the_compilers_own_are_counted(tmp_path: Any) -> None:
    (tmp_path / "a.ptx").write_text("fma.rn.f32 %r1;\n fma.rn.f32 %r2;\n mul.rn.f32 %r3;")
    (tmp_path / "a.ir-with-opt.ll").write_text("  %1 = call float @llvm.fma.f32(float %0)")
    assert contracted(tmp_path) == 1
    (tmp_path / "b.ptx").write_text("mul.f32 %r1;\n add.ftz.f32 %r2;\n add.rn.f32 %r3;")
    (tmp_path / "b.ir-with-opt.ll").write_text("")
    assert contracted(tmp_path) == 3
    assert flushing(tmp_path) == 1


def test_what_travels_together_is_moved_and_not_computed(devices, monkeypatch):
    """Samples, and large chunks that share buffers: on a GPU without scratch memory, too."""
    platform = devices[0].platform
    monkeypatch.setitem(layout._FEW_ON, platform, 4)
    place = SingleDeviceSharding(devices[0])
    shapes = [(4, 512, 2048), (4, 2048, 512), (4, 512), (1024,), (), (2048, 1100)]
    dtypes = [jnp.float32, jnp.bfloat16, jnp.float32, jnp.int32]
    specs = [jax.ShapeDtypeStruct(s, d, sharding=place) for d in dtypes for s in shapes]
    sampled = sample._compile([(x, sample.grid_of(x.shape, 4, 1 / 8).sizes) for x in specs])
    chunks = [Chunk.whole(Source(x.shape, x.dtype, place, place)) for x in specs]
    buffers = layout.lay_out(chunks)
    assert max(len(buffer.chunks) for buffer in buffers if buffer.size > 2**21) > 1
    taken = [chunks[n] for buffer in buffers for n in buffer.chunks]
    parts = [(chunk, n) for n, chunk in enumerate(taken)]
    packed = packing.compile_packing([chunk.source for chunk in taken], parts, buffers)
    for program in (sampled, packed):
        computed = re.findall(r" = b?f\d+\[.*\]\S* (?:maximum|add|convert)\(.*", program.as_text())
        assert not computed
        scratch_bytes = program.memory_analysis().temp_size_in_bytes
        assert scratch_bytes < 1024 or platform != "gpu"
