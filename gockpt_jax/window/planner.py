"""The plan of each step's windows, made once per program, and what the budgets admit."""

import logging
import weakref
from collections.abc import Sequence

import jax

from gockpt_jax.errors import HostBudgetError
from gockpt_jax.options import WindowOptions
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.wrap import WrappedStep
from gockpt_jax.transfer.budget import ByteBudget, device_headroom_bytes
from gockpt_jax.transfer.sample import compile_samples_ahead
from gockpt_jax.transfer.staging import compile_ahead, owned_bytes
from gockpt_jax.window.plan import Plan, StateBytes, fill_blocks, measure_bytes, plan_window

_log = logging.getLogger("gockpt_jax")


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
        plan = plan_window(program.groups, size, self._options, self._device.limit_bytes)
        _log.debug("planned %s", plan)
        self._plans[program] = (plan, size)
        if plan.steps > 1:
            step.arm()
            blocks = _leaves_by_block(plan, program)
            compile_ahead([[leaves[j] for j in block] for block in blocks])
            if self._options.audit is not None:
                early = [leaves[j] for j in sorted(j for block in blocks[:-1] for j in block)]
                compile_samples_ahead(early, self._options.audit.fraction)

    def plan_for(self, program: StepProgram, steps: int) -> tuple[Plan, StateBytes]:
        """The program's plan, with K at most `steps`; and the bytes it was made for."""
        plan, size = self._plans[program]
        if steps < plan.steps:
            plan = fill_blocks(program.groups, size, steps, f"the save was {steps - 1} steps away")
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
        """Whether the host budget has room for a window's state and retained values now."""
        limit = self._options.host_budget_bytes
        if limit is None:
            return True
        local = {d for a in leaves for d in a.sharding.addressable_devices}
        retained_bytes = 2 * size.retained * len(local)
        needed = sum(owned_bytes(a) for a in leaves) + retained_bytes
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


def _leaves_by_block(plan: Plan, program: StepProgram) -> list[list[int]]:
    """The leaves that are staged together, the late ones last."""
    early = [[j for g in block for j in program.groups[g].leaves] for block in plan.blocks]
    gone = {j for block in early for j in block}
    return [*early, [j for j in range(len(program.leaf_specs)) if j not in gone]]
