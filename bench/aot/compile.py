"""One real compilation of `bench aot`, in a process of its own: figures of one case as JSON."""

import dataclasses
import functools
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from bench.aot.hlo import Program, read_program
from gockpt_jax import _compat
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.program import StepProgram
from gockpt_jax.transfer.block import Block, block_of
from gockpt_jax.transfer.chunks import Chunk, Source
from gockpt_jax.window.departure import make_departure
from gockpt_jax.window.plan import Plan, StateBytes, fill_blocks, measure_bytes, peak_device_bytes

GIB = 2**30
MAX_STEPS = 8
_OF_STEPS = re.compile(r"unarmed/|armed/|armed_extra_gib|retained_compiled_gib|compile_secs/")
"""Names of figures that do not depend on plans."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compiled.

    Attributes:
      topology: As `jax.experimental.topologies` names it, `v5e:4x4`.
      tensor: Chips over which matrices are split; the rest of them are FSDP.
      layers: Of the network.
      width: Of the network; heads are 128 wide.
      seq_len: Tokens per sequence; each `data` shard has one.
    """

    topology: str
    tensor: int
    layers: int
    width: int
    seq_len: int = 2048


def measure(
    case: Case, devices: Sequence[Any], known: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Compiles one case for the devices of its topology; `known` as in `measure_step`."""
    from bench.aot.model import GPTConfig, abstract_call, make_mesh

    mesh = make_mesh(devices, case.tensor)
    config = GPTConfig(layers=case.layers, heads=case.width // 128, width=case.width)
    with jax.set_mesh(mesh):
        step, (state, batch) = abstract_call(config, mesh, seq_len=case.seq_len)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        return {
            "parameters_billions": parameters / 1e9,
            "chips": float(mesh.size),
            **measure_step(step, (state, batch), known=known),
        }


def measure_step(
    step: Any, args: tuple[Any, ...], max_steps: int = MAX_STEPS,
    known: Mapping[str, float] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Compiles a step unarmed and armed, the staging programs and a device copy of it all.

    Args:
      step: Jitted, donating its first argument, the state, with shardings for all.
      args: Shapes with shardings.
      max_steps: The largest K.
      known: Figures of an earlier run of the same steps, which takes minutes to repeat; only
        staging is compiled then, which depends on the plans.
    """
    form = CallForm(step, 0, _compat.jit_settings(step) or _compat.JitSettings())
    program = StepProgram(step, form, args, {}, even_for_nothing=False)
    leaves = jax.tree.leaves(args[0])
    size = measure_bytes(program, leaves)
    if known is None:
        of_steps = _compiled_steps(step, args, program)
    else:
        of_steps = {name: known[name] for name in known if _OF_STEPS.match(name)}
    extra_bytes = int(of_steps["armed_extra_gib"] * GIB)
    return {
        "state_gib": sum(size.leaves) / GIB,
        "retained_gib": size.retained / GIB,
        **of_steps,
        **_window_figures(program, size, leaves, extra_bytes, max_steps),
    }


def _compiled_steps(step: Any, args: tuple[Any, ...], program: StepProgram) -> dict[str, float]:
    """The user's step, and the armed one: named as `_OF_STEPS` says."""
    start = time.perf_counter()
    unarmed = read_program(step.lower(*args).compile())
    unarmed_secs = time.perf_counter() - start
    start = time.perf_counter()
    program.arm(None)
    armed = read_program(program.executable())
    armed_secs = time.perf_counter() - start
    return {
        "retained_compiled_gib": (armed.output_bytes - unarmed.output_bytes) / GIB,
        **_step_figures("unarmed", unarmed),
        **_step_figures("armed", armed),
        "armed_extra_gib": (armed.total_bytes - unarmed.total_bytes) / GIB,
        "compile_secs/unarmed": unarmed_secs,
        "compile_secs/armed": armed_secs,
    }


def _step_figures(name: str, program: Program) -> dict[str, float]:
    return {
        f"{name}/total_gib": program.total_bytes / GIB,
        f"{name}/temp_gib": program.temp_bytes / GIB,
        f"{name}/copies": float(program.copies),
        f"{name}/collectives": float(program.collectives),
    }


def _window_figures(
    program: StepProgram, size: StateBytes, leaves: Sequence[Any], armed_extra_bytes: int,
    max_steps: int,
) -> dict[str, float]:  # fmt: skip
    """What a window costs by K: the planner's figure, and that of the compiled programs.

    Compiled: the planner's, but with what the largest block's copy programs take for its bytes, and
    what arming adds to the step for what a step retains; or what copies of the late leaves take, if
    that is more. Other blocks are not compiled: that would take longer than the steps.
    """
    whole = block_of([Chunk.whole(Source.of(leaf)) for leaf in leaves])
    blocks = [whole]
    figures = {"device_copy_gib": _new_bytes(whole) / GIB}
    for steps in range(2, max_steps + 1):
        plan = fill_blocks(size.units, steps, "bench")
        largest, late = _staged(program, size, plan, leaves)
        weights = [sum(size.units[u].state_bytes for u in block) for block in plan.blocks]
        without_late = dataclasses.replace(size, leaves=(sum(weights),))
        more = _new_bytes(largest) - max(weights) + armed_extra_bytes - size.retained
        compiled = max(_new_bytes(late), peak_device_bytes(plan, without_late) + more)
        figures[f"k{steps}/planned_gib"] = peak_device_bytes(plan, size) / GIB
        figures[f"k{steps}/compiled_gib"] = compiled / GIB
        blocks += [largest, late]
    moved = [(_new_bytes(block), sum(c.num_bytes for c in block.chunks)) for block in blocks]
    programs = [p for block in dict.fromkeys(blocks) for p in _copies(block)]
    figures["staging/most_new_over_copied"] = max(new / old for new, old in moved)
    figures["staging/maxima"] = float(sum(p.maxima for p in programs))
    figures["staging/computing_instructions"] = float(sum(p.computing for p in programs))
    figures["staging/collectives"] = float(sum(p.collectives for p in programs))
    return figures


def _staged(
    program: StepProgram, size: StateBytes, plan: Plan, leaves: Sequence[Any]
) -> tuple[Block, Block]:
    """The early block that takes most, and the late leaves."""
    largest = max(plan.blocks, key=lambda block: sum(size.units[u].state_bytes for u in block))
    departure = make_departure(program, {u: size.units[u] for u in largest}, leaves)
    groups = {size.units[u].group for block in plan.blocks for u in block}
    gone = {j for g in groups for j in program.groups[g].leaves}
    late = [Chunk.whole(Source.of(leaf)) for j, leaf in enumerate(leaves) if j not in gone]
    return departure.state, block_of(late)


@functools.cache
def _copies(block: Block) -> list[Program]:
    """The very programs that staging runs: they compile for shapes as for arrays."""
    return [read_program(compiled) for compiled in block.programs()]


def _new_bytes(block: Block) -> int:
    return sum(copy.output_bytes + copy.temp_bytes for copy in _copies(block))


def main() -> None:
    """Compiles the case given as JSON, with what is known of it, and writes its figures."""
    asked, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    case = Case(**asked["case"])
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(case.topology, "tpu").devices
    out.write_text(json.dumps(measure(case, devices, asked["known"])), encoding="utf-8")


if __name__ == "__main__":
    main()
