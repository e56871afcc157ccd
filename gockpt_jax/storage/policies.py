"""What an Orbax save policy says about labels that have not come yet."""

from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

# Neither speaks of the future: the first save cannot be seen coming, a preemption may not be asked.
_WITHOUT_FORESIGHT = (managers.InitialSavePolicy, managers.PreemptionCheckpointingPolicy)


def labels_to_save(options: ocp.CheckpointManagerOptions) -> Callable[[int], bool] | None:
    """Which labels a manager with these options will save.

    Args:
      options: Of the manager.

    Returns:
      A function of the label that has no side effects; `None` if only the policy itself knows, when
      it is asked (by time, by load, or a function of the user's).
    """
    if options.save_decision_policy is not None:
        return labels_of_policy(options.save_decision_policy)
    if options.should_save_fn is not None:
        return None
    interval, steps = options.save_interval_steps, frozenset(options.save_on_steps or ())
    return lambda label: bool((interval and label % interval == 0) or label in steps)


def labels_of_policy(policy: Any) -> Callable[[int], bool] | None:
    """Which labels a policy will save; `None` if only it knows, when it is asked."""
    if isinstance(policy, managers.FixedIntervalPolicy):
        return lambda label: label % policy.interval == 0
    if isinstance(policy, managers.SpecificStepsPolicy):
        return lambda label: label in policy.steps
    if isinstance(policy, managers.AnySavePolicy):
        foreseen = [p for p in policy.policies if not isinstance(p, _WITHOUT_FORESIGHT)]
        parts = [labels_of_policy(p) for p in foreseen]
        known = [p for p in parts if p is not None]
        if len(known) == len(parts) and known:
            return lambda label: any(part(label) for part in known)
    return None
