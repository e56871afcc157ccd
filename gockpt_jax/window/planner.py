"""The plan of each step's windows, made once per program, and what the budgets admit."""

import logging
import math
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gockpt_jax.errors import HostBudgetError, ReplayError
from gockpt_jax.options import WindowOptions
from gockpt_jax.replay.contraction import cpu_contracts
from gockpt_jax.replay.engine import Replayer
from gockpt_jax.replay.programs import ReplaySpec
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.wrap import WrappedStep
from gockpt_jax.transfer.budget import ByteBudget, device_headroom_bytes
from gockpt_jax.transfer.sample import compile_samples_ahead
from gockpt_jax.transfer.staging import compile_ahead, owned_bytes_at_most
from gockpt_jax.window.plan import Plan, StateBytes, fill_blocks, measure_bytes, plan_window

_log = logging.getLogger("gockpt_jax")

_CONTRACTS = (
    "on this CPU backend XLA contracts multiply-adds, each program in its own way, so replay would "
    "not be exact; set `XLA_FLAGS=--xla_cpu_max_isa=AVX` (x86) before JAX starts, or accept "
    "rounding with `audit=gockpt_jax.Audit(max_ulps=...)`"
)


class Planner:
    """Plans for programs, keeps the device budget's limit, and admits saves to the host.

    Args:
      options: The user's.
      device: The budget for staged copies and retained values.
      host: Accounts for bytes on the host.
    """

    def __init__(self, options: WindowOptions, device: ByteBudget, host: ByteBudget):
        self._options = options
        self._device = device
        self._host = host
        self._is_limited = False
        self._plans: weakref.WeakKeyDictionary[StepProgram, tuple[Plan, StateBytes]] = (
            weakref.WeakKeyDictionary()
        )

    def prepare(self, step: WrappedStep) -> None:
        """Plans for a new program, long before its first window: arming it takes long.

        Args:
          step: A step that has run.
        """
        program = step.program
        if program is None or program in self._plans:
            return
        self.limit_device(stepped=True)
        leaves = program.new_state_leaves(step.last_result)
        size = measure_bytes(program, leaves)
        if program.groups:
            plan = plan_window(size, self._options, self._device.limit_bytes)
        else:
            plan = Plan(1, (), _why_all_late(program, size))
        _log.debug("planned %s", plan)
        self._plans[program] = (plan, size)
        if plan.steps == 1:
            return
        try:
            replayer = self.replayer(leaves)
        except ReplayError as error:
            step.give_up(str(error))
            return
        if replayer.shares_backend and self._must_be_exact() and cpu_contracts():
            step.give_up(_CONTRACTS)
            return
        step.arm()
        blocks = _leaves_by_block(plan, size, program)
        compile_ahead([[leaves[j] for j in block] for block in blocks])
        replayer.compile_ahead(_replay_specs(program, leaves), plan.steps - 1)
        if self._options.audit is not None:
            early = [leaves[j] for j in sorted(j for block in blocks[:-1] for j in block)]
            compile_samples_ahead(early, self._options.audit.fraction)

    def _must_be_exact(self) -> bool:
        audit = self._options.audit
        return self._options.exact or (audit is not None and audit.max_ulps == 0)

    def replayer(self, leaves: Sequence[jax.Array]) -> Replayer:
        """Replays for a run whose state has these leaves.

        Raises:
          ReplayError: if there is no CPU backend.
        """
        # Not `devices()`: another wrapped step may have run last, and these are donated.
        device: Any = next(iter(leaves[0].sharding.device_set))
        return Replayer(device.platform, self._options.replay_threads)

    def plan_for(self, program: StepProgram, steps: int) -> tuple[Plan, StateBytes]:
        """The program's plan, with K at most `steps`; and the bytes it was made for."""
        plan, size = self._plans[program]
        if steps < plan.steps:
            plan = fill_blocks(size.units, steps, f"the save was {steps - 1} steps away")
        return plan, size

    def steps_of(self, program: StepProgram) -> int:
        """K of the program's plan; 1 before it has one. The same on all processes."""
        return self._plans[program][0].steps if program in self._plans else 1

    def limit_device(self, *, stepped: bool) -> None:
        """Sets the device budget: what the user said, else what the steps leave free.

        Measured once, after a step and before anything of ours: the allocator's peak has no way
        back, and would soon count our own copies.

        Args:
          stepped: Whether a step has run.
        """
        if not self._is_limited and self._options.device_budget_bytes is None:
            self._device.limit_bytes = device_headroom_bytes()
            self._is_limited = stepped

    def admits(self, leaves: Sequence[jax.Array], size: StateBytes) -> bool:
        """Whether the host budget has room for a window's state and retained values now.

        Args:
          leaves: Of the state, or of an earlier one, which may be donated.
          size: Its bytes.
        """
        limit = self._options.host_budget_bytes
        if limit is None:
            return True
        local = {d for a in leaves for d in a.sharding.addressable_devices}
        retained_bytes = 2 * size.retained * len(local)
        needed = sum(owned_bytes_at_most(a) for a in leaves) + retained_bytes
        return self._host.used_bytes + needed <= limit

    def refuse_oversized(self, state_bytes: int) -> None:
        """Refuses a save that the host budget cannot hold even alone.

        Raises:
          HostBudgetError: if it cannot.
        """
        limit = self._options.host_budget_bytes
        if limit is not None and state_bytes > limit:
            raise HostBudgetError(
                f"`host_budget_bytes={limit}` cannot hold what this process saves, {state_bytes} "
                f"bytes. Give at least {state_bytes * 11 // 10}, or None for no limit."
            )


def _why_all_late(program: StepProgram, size: StateBytes) -> str:
    largest = max(program.late, key=lambda j: size.leaves[j])
    path, why = program.positions.paths[largest], program.late[largest]
    return f"no leaf may leave early (`explain()` tells of each): {path}: {why}"


def _leaves_by_block(plan: Plan, size: StateBytes, program: StepProgram) -> list[list[int]]:
    """The leaves that are staged together, the late ones last."""
    early = [
        [j for u in block for j in program.groups[size.units[u].group].leaves]
        for block in plan.blocks
    ]
    gone = {j for block in early for j in block}
    return [*early, [j for j in range(len(program.leaf_specs)) if j not in gone]]


def _replay_specs(
    program: StepProgram, leaves: Sequence[jax.Array]
) -> list[tuple[ReplaySpec, int]]:
    """What the replay programs of all groups are made from, with the sizes of their shards."""
    specs = {
        (
            ReplaySpec(
                group.recipe,
                tuple(np.dtype(program.leaf_specs[j].dtype) for j in group.leaves),
                tuple(np.dtype(program.cut_arrays[i].dtype) for i in group.retained),
                tuple(np.dtype(program.cut_arrays[i].dtype) for i in group.scalars),
            ),
            _shard_size(leaves[group.leaves[0]]),
        ): None  # a set that keeps its order
        for group in program.groups
        if not group.recipe.is_identity
    }
    return list(specs)


def _shard_size(array: jax.Array) -> int:
    return math.prod(array.sharding.shard_shape(array.shape))
