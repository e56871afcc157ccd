"""What must be so on every process before a step may run armed on any."""

import contextlib
import weakref
from collections.abc import Iterator

from gockpt_jax.errors import ProcessError, SnapshotOnlyWarning, StepMismatchError, in_a_line
from gockpt_jax.options import WindowOptions
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.traced import TracedStep
from gockpt_jax.window.processes import Processes


class Agreement:
    """Asks the other processes about a program, once where the answer is yes.

    Args:
      options: The user's.
      processes: Those that run the same steps.
    """

    def __init__(self, options: WindowOptions, processes: Processes):
        self._options = options
        self._processes = processes
        self._asked: weakref.WeakSet[StepProgram | TracedStep] = weakref.WeakSet()
        self._ready: weakref.WeakSet[StepProgram] = weakref.WeakSet()
        self._refused = (-1, "")  # the last save for which a process was not ready, and why

    def settle(self, step: TracedStep, *, planned: bool) -> None:
        """A step that one process cannot arm is given up by all.

        Args:
          step: Traced and planned for, by all processes at the same call.
          planned: Whether a plan was made just now: it may be the first that arms the step.
        """
        why_not = None if step.program is not None else step.why_not
        if not self._processes.several or (step.program is None and why_not is None):
            return
        if (step.program or step) in self._asked and not planned:
            return
        objection = self._processes.objection("program", why_not)
        if objection is not None and step.program is not None:
            step.give_up(objection)
        self._asked.add(step.program or step)  # a step that was given up has no other answer

    @contextlib.contextmanager
    def held(self, step: TracedStep) -> Iterator[None]:
        """An error with a step that all have agreed on ends this process: it cannot give it up.

        The others would run it armed, and this one not.

        Args:
          step: Of which a window is looked for.

        Raises:
          ProcessError: from the original error.
        """
        program = step.program
        try:
            yield
        except (StepMismatchError, ProcessError, SnapshotOnlyWarning):
            raise
        except Exception as error:
            if program not in self._asked:  # as where there are no others
                raise
            raise ProcessError(
                "this process cannot open the window that the others open, and they would wait for "
                f"its steps for ever, so it ends: {in_a_line(error)}. Earlier checkpoints are "
                "intact. Please report it."
            ) from error

    def why_not_ready(self, program: StepProgram, target: int) -> str | None:
        """Why a window of this program cannot open, or go on with it; `None` if it can.

        Args:
          program: Planned for by all processes.
          target: The version at whose save the window ends. All are asked once for each: the
            slowest would be waited for.
        """
        if self._options.steps is not None:
            program.wait_until_ready()  # a fixed K promises a window, and pays for it
        mine = program.why_not_ready()
        if not self._processes.several or program in self._ready:
            return mine
        if target == self._refused[0]:
            return self._refused[1]
        objection = self._processes.objection("armed", mine)
        if objection is None:
            self._ready.add(program)
        else:
            self._refused = (target, objection)
        return objection
