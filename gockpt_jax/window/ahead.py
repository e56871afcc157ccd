"""What windows run is compiled long before the first of them: the trainer does not wait for it."""

import weakref
from collections.abc import Sequence

import jax

from gockpt_jax.errors import ReplayError
from gockpt_jax.options import WindowOptions
from gockpt_jax.replay.contraction import cpu_contracts
from gockpt_jax.replay.engine import Replayer
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.traced import TracedStep
from gockpt_jax.transfer.sample import compile_samples_ahead
from gockpt_jax.window.departure import Departure
from gockpt_jax.window.known import Known
from gockpt_jax.window.late import compile_late_ahead
from gockpt_jax.window.planned import Planned
from gockpt_jax.window.resources import Resources
from gockpt_jax.window.units import replay_specs

_CONTRACTS = (
    "on this CPU backend XLA contracts multiply-adds, each program in its own way, so replay would "
    "not be exact; set `XLA_FLAGS=--xla_cpu_max_isa=AVX` (x86) before JAX starts, or accept "
    "rounding with `audit=gockpt_jax.Audit(max_relative_error=...)`"
)


class Ahead:
    """Makes programs ready for the windows that are planned for them.

    Args:
      options: The user's.
      known: What saves take.
      resources: What windows take.
    """

    def __init__(self, options: WindowOptions, known: Known, resources: Resources):
        self._options = options
        self._known = known
        self._resources = resources
        self._sampled: weakref.WeakKeyDictionary[StepProgram, set[frozenset[int]]] = (
            weakref.WeakKeyDictionary()
        )  # sets of leaves for whose samples all is compiled, or being so

    def make_ready(
        self, step: TracedStep, program: StepProgram, planned: Planned, leaves: Sequence[jax.Array]
    ) -> None:
        """Arms a step and compiles what else a plan needs, or gives the step up.

        Args:
          step: The step.
          program: Its program.
          planned: Its plan, which may be a snapshot's.
          leaves: Of its state.
        """
        if planned.plan.steps == 1:
            self._compile_rest(planned, leaves)
            return
        try:
            replayer = Replayer.of(leaves, self._options.replay_threads)
        except ReplayError as error:
            step.give_up(str(error))
            return
        if replayer.shares_backend and self._options.must_be_exact and cpu_contracts():
            step.give_up(_CONTRACTS)
            return
        step.arm()
        if not program.is_armed:  # nor can it be now, but by a call of its own
            return
        self.departures(program, planned, leaves)
        specs = replay_specs(planned.cut, planned.size.units)
        replayer.compile_ahead(specs, planned.plan.steps - 1)

    def departures(
        self, program: StepProgram, planned: Planned, leaves: Sequence[jax.Array]
    ) -> list[Departure]:
        """Those of a plan; all that its windows stage is compiled from now on.

        If it is a shorter one than was made ready, the trainer waits for what is staged first, and
        for nothing else.
        """
        was_ready = planned.has_departures
        found = planned.departures(leaves)
        if not was_ready:
            self._compile_rest(planned, leaves)
            self.compile_samples(program, planned, leaves)
        return found

    def compile_samples(
        self, program: StepProgram, planned: Planned, leaves: Sequence[jax.Array]
    ) -> None:
        """What the audit will copy of each item; before the first save there is one, of all."""
        audit, limit_bytes = self._options.audit, self._resources.device.limit_bytes
        if audit is None:
            return
        early, seen = frozenset(planned.early_leaves()), self._sampled.setdefault(program, set())
        for item in self._known.saves(program).items or (early,):
            if (sampled := early & item) not in seen:
                arrays = [leaves[j] for j in sorted(sampled)]
                replicas = self._resources.replicas
                if compile_samples_ahead(arrays, audit.fraction, replicas, limit_bytes):
                    seen.add(sampled)

    def _compile_rest(self, planned: Planned, leaves: Sequence[jax.Array]) -> None:
        """What is staged at the sealed version: late leaves, and rows of early ones."""
        early, sent = planned.early_leaves(), planned.size.leaves
        late = [a for j, a in enumerate(leaves) if j not in early and sent[j]]
        compile_late_ahead(late, self._resources, planned.rows_behind(leaves))
