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

from bench.accelerators import devices_of
from bench.aot.hlo import Program, read_program
from gockpt_jax import _compat
from gockpt_jax.storage.writing.array_layout import ReplicaLayout
from gockpt_jax.training.call import CallForm
from gockpt_jax.training.program import StepProgram
from gockpt_jax.transfer.block import Block
from gockpt_jax.transfer.replicas import Replicas
from gockpt_jax.window.departure import make_departure, nothing_left
from gockpt_jax.window.facts import SavedBytes
from gockpt_jax.window.late import late_blocks, late_chunks
from gockpt_jax.window.plan import Plan, StateBytes, fill_blocks, measure_bytes, peak_device_bytes

GIB = 2**30
MAX_STEPS = 8
_OF_STEPS = re.compile(r"unarmed/|armed/|armed_extra_gib|retained_compiled_gib|compile_secs/")
"""Names of figures that do not depend on plans."""
_FIRST_ALONE = Replicas(ReplicaLayout(use_replica_parallel=False).write_shape)
"""Replicas do not share what leaves."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compiled.

    Attributes:
      topology: As `bench.accelerators` names it, `v5e:4x4`.
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
    program = StepProgram(step.trace(*args), form, args, {}, even_for_nothing=False)
    leaves = jax.tree.leaves(args[0])
    size = measure_bytes(program.cut, leaves, _FIRST_ALONE)
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
    program.arm()
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
    that is more. Other blocks are not compiled: that would take longer than the steps. A snapshot
    is compiled twice: of the whole state at once, and as a run sends it whose device budget is the
    smallest of all these windows.
    """
    whole = _late(leaves, None)
    copied, budgets = [whole], []
    figures = {"device_copy_gib": _most_bytes(whole, None) / GIB}
    for steps in range(2, max_steps + 1):
        plan = fill_blocks(size.units, steps, "bench")
        budgets.append(peak_device_bytes(plan, size))
        largest = _largest(program, size, plan, leaves)
        late = _late(_not_early(program, size, plan, leaves), budgets[-1])
        weights = [sum(size.units[u].state_bytes for u in block) for block in plan.blocks]
        without_late = dataclasses.replace(size, taken=SavedBytes(sum(weights)))
        more = _new_bytes(largest) - max(weights) + armed_extra_bytes - size.retained
        beside = peak_device_bytes(plan, without_late) + more
        figures[f"k{steps}/planned_gib"] = budgets[-1] / GIB
        figures[f"k{steps}/compiled_gib"] = max(_most_bytes(late, budgets[-1]), beside) / GIB
        copied += [[largest], late]
    parts = _late(leaves, min(budgets))
    figures["snapshot/parts"] = float(len(parts))
    figures["snapshot/planned_gib"] = min(budgets) / GIB
    figures["snapshot/compiled_gib"] = _most_bytes(parts, min(budgets)) / GIB
    return figures | _staging_figures([*copied, parts])


def _staging_figures(copied: Sequence[Sequence[Block]]) -> dict[str, float]:
    """Of all copy programs; the ratio is of blocks that are staged for the same purpose."""
    blocks = dict.fromkeys(block for together in copied for block in together)
    programs = [p for block in blocks for p in _copies(block)]
    ratios = [
        sum(map(_new_bytes, together)) / sum(c.num_bytes for b in together for c in b.chunks)
        for together in copied
        if together
    ]
    return {
        "staging/most_new_over_copied": max(ratios),
        "staging/joins": float(sum(p.joins for p in programs)),
        "staging/computing_instructions": float(sum(p.computing for p in programs)),
        "staging/collectives": float(sum(p.collectives for p in programs)),
    }


def _largest(program: StepProgram, size: StateBytes, plan: Plan, leaves: Sequence[Any]) -> Block:
    """The early block that takes most."""
    largest = max(plan.blocks, key=lambda block: sum(size.units[u].state_bytes for u in block))
    units = {u: size.units[u] for u in largest}
    nothing = nothing_left(program.cut, leaves)
    return make_departure(program.cut, units, leaves, nothing).block


def _not_early(
    program: StepProgram, size: StateBytes, plan: Plan, leaves: Sequence[Any]
) -> list[Any]:
    groups = {size.units[u].group for block in plan.blocks for u in block}
    gone = {j for g in groups for j in program.cut.groups[g].leaves}
    return [leaf for j, leaf in enumerate(leaves) if j not in gone]


def _late(leaves: Sequence[Any], budget_bytes: int | None) -> list[Block]:
    """The blocks in which a run with this device budget stages late leaves."""
    chunks = late_chunks(leaves, budget_bytes, _FIRST_ALONE)
    return [block for _, block in late_blocks(chunks, budget_bytes)]


def _most_bytes(blocks: Sequence[Block], budget_bytes: int | None) -> int:
    """What they take on the device at most: all of it, or the budget and one program's scratch."""
    new = [_new_bytes(block) for block in blocks]
    if budget_bytes is None or not blocks:
        return sum(new)
    scratch = max(n - block.staged_bytes for n, block in zip(new, blocks, strict=True))
    return min(sum(new), budget_bytes + scratch)


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
    devices = devices_of(case.topology)
    out.write_text(json.dumps(measure(case, devices, asked["known"])), encoding="utf-8")


if __name__ == "__main__":
    main()
