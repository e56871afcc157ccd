"""What an Orbax save policy says about saves that have not come yet, and how that is arranged."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from gockpt_jax.window.session import Session

SaveLabels = Callable[[int], bool]
WaitingOne = Callable[[], Any]
"""Gives the save that Orbax does not know of yet (its `step`, `time`, `metrics`), or `None`."""

# Neither speaks of the future: the first save cannot be seen coming, a preemption may not be asked.
_WITHOUT_FORESIGHT = (managers.InitialSavePolicy, managers.PreemptionCheckpointingPolicy)
# Say yes when the time has come, whatever the label.
_START_DRIVEN = (managers.ContinuousCheckpointingPolicy,)


def arrange(
    options: ocp.CheckpointManagerOptions, session: Session, waiting: WaitingOne,
    is_refused: SaveLabels,
) -> ocp.CheckpointManagerOptions:  # fmt: skip
    """Has a manager's policy answer early enough for windows, and tells the predictor of it.

    Args:
      options: The user's.
      session: Whose windows end at the saves.
      waiting: Gives a save that counts as one that has been made.
      is_refused: Whether the manager refuses a label, as things are, without asking the policy.

    Returns:
      The options to build the manager with. They save at the same labels, but for policies by time
      or load: those start a window, at whose end the save is.
    """
    labels: SaveLabels | None
    if options.save_decision_policy is not None:
        labels = labels_of_policy(options.save_decision_policy)
        policy = _start_windows(options.save_decision_policy, session)
        options = dataclasses.replace(options, save_decision_policy=_CountsWaiting(policy, waiting))
    elif options.should_save_fn is not None:
        asked = AskedAhead(options.should_save_fn, waiting)
        labels, options = asked.will_save, dataclasses.replace(options, should_save_fn=asked)
    else:
        labels = _labels_of_interval(options.save_interval_steps, options.save_on_steps)
    if labels is not None:
        session.predictor.is_save_label = lambda label: not is_refused(label) and labels(label)
    return options


def _labels_of_interval(interval: int | None, steps: Collection[int] | None) -> SaveLabels:
    named = frozenset(steps or ())
    return lambda label: bool((interval and label % interval == 0) or label in named)


def labels_of_policy(policy: Any, *, starts_windows: bool = True) -> SaveLabels | None:
    """Which labels a policy will save.

    Args:
      policy: Orbax's, or one of the user's own.
      starts_windows: Whether one by time or load has been arranged to start windows: then it saves
        no label of its own accord.

    Returns:
      A function of the label that has no side effects; `None` if only the policy itself knows, when
      it is asked (one of the user's own).
    """
    if isinstance(policy, managers.FixedIntervalPolicy):
        return lambda label: label % policy.interval == 0
    if isinstance(policy, managers.SpecificStepsPolicy):
        return lambda label: label in policy.steps
    if isinstance(policy, _START_DRIVEN) and starts_windows:
        return lambda label: False
    if isinstance(policy, managers.AnySavePolicy):
        foreseen = [p for p in policy.policies if not isinstance(p, _WITHOUT_FORESIGHT)]
        parts = [labels_of_policy(p, starts_windows=starts_windows) for p in foreseen]
        known = [p for p in parts if p is not None]
        if len(known) == len(parts) and known:
            return lambda label: any(part(label) for part in known)
    return None


class AskedAhead:
    """A `should_save_fn` that is asked of a label some steps before it comes.

    A yes holds, for a window has opened for it. A no is asked again when the label comes: the
    function may look at what the loop has found out meanwhile, such as a signal. So is a yes if the
    last save is then another than was foreseen: one was forced, left out, or deleted as not among
    the best.

    Args:
      should_save: The user's: of a label and the last saved one. Asked ahead, it is told of the
        last label that it has accepted.
      waiting: Gives an accepted save that Orbax does not know of yet.
    """

    def __init__(self, should_save: Callable[[int, int | None], bool], waiting: WaitingOne):
        self._should_save = should_save
        self._waiting = waiting
        # At each label the answer, and the last save that it was told of.
        self._answers: dict[int, tuple[bool, int | None]] = {}
        self._last_saved: int | None = None

    def will_save(self, label: int) -> bool:
        """The answer for a label that has not come yet; no, as long as the function has none."""
        if label not in self._answers:
            accepted = [x for x, (yes, _) in self._answers.items() if yes and x < label]
            try:
                self._ask(label, max(accepted, default=self._last_saved))
            except Exception:  # it may look up what the loop finds out until then
                return False
        return self._answers[label][0]

    def _ask(self, label: int, last_saved: int | None) -> None:
        self._answers[label] = bool(self._should_save(label, last_saved)), last_saved

    def __call__(self, label: int, last_saved: int | None) -> bool:
        """The answer for a label that has come; a yes given before, if all is as foreseen."""
        if (waiting := self._waiting()) is not None:
            last_saved = waiting.step
        self._last_saved = last_saved
        if self._answers.get(label) != (True, last_saved):
            self._ask(label, last_saved)
        self._answers = {x: found for x, found in self._answers.items() if x >= label}
        return self._answers[label][0]


class StartsWindow:
    """A policy by time or load: its yes starts a window, and the save is where the window ends.

    From there on the answer is yes until a save has come: a loop that asks first need not save when
    it is told so.

    Args:
      policy: The user's.
      session: Opens the window.
    """

    def __init__(self, policy: Any, session: Session):
        self._policy = policy
        self._session = session
        self._until: int | None = None  # the version from which on a save is due

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """As Orbax asks it; may be asked more than once at a step."""
        version = self._session.version
        predictor = self._session.predictor
        if self._until is not None and not predictor.has_saved_since(self._until):
            return version >= self._until
        if not self._policy.should_save(step, previous_steps, context=context):
            return False
        self._until = self._end_of_window(version)  # who asks again is told the same
        predictor.is_started = self._until > version
        if not predictor.is_started:
            return True
        predictor.expect(self._until)
        return False

    def _end_of_window(self, version: int) -> int:
        """The version to save, of a yes at this one; the same on all processes.

        They meet here as they would in the save. The yes is common, for Orbax tells them that of
        the primary one; at which calls the loop will ask again, each has seen for itself.
        """
        ahead, most_steps = self._session.window_steps - 1, self._session.options.most_steps
        between = self._session.predictor.updates_between_calls
        mine = version
        if ahead >= 1 and between is not None and between <= most_steps:
            mine = version + -(-ahead // between) * between  # at a call
        return mine if self._session.processes.all_say("started", str(mine)) else version


class _CountsWaiting:
    """A policy to which a save that waits has been made.

    Args:
      policy: The user's, arranged.
      waiting: Gives the save.
    """

    def __init__(self, policy: Any, waiting: WaitingOne):
        self._policy = policy
        self._waiting = waiting

    def should_save(self, step: Any, previous_steps: Sequence[Any], *, context: Any) -> bool:
        """As Orbax asks it."""
        if (waiting := self._waiting()) is not None:
            previous_steps = [*previous_steps, waiting]
        return bool(self._policy.should_save(step, previous_steps, context=context))


def _start_windows(policy: Any, session: Session) -> Any:
    if isinstance(policy, _START_DRIVEN):
        return StartsWindow(policy, session)
    if isinstance(policy, managers.AnySavePolicy):
        return managers.AnySavePolicy([_start_windows(p, session) for p in policy.policies])
    return policy
