"""Which update will be saved.

Predicted in updates, not in labels: a label is whatever the user counts (a loop index, updates,
epochs), and only its being called at consecutive updates ties it to them. No device value is read.
"""

import logging
from collections.abc import Callable

from gockpt_jax.checks import counted

_log = logging.getLogger("gockpt_jax")

_PATIENCE = 2
_UNFORESEEN = "the save was not predicted, so no window was open"
_REMEDY = "`manager.expect_save(in_steps=n)` announces such a save"
_COUNTED = "`expect_save(in_steps=n)` counts the calls of the wrapped step until the save"


class CallHistory:
    """The last two calls of a loop, of one kind: where they were, and with which labels.

    Attributes:
      last: Version and label of the last one.
      updates_apart: Updates between the last two.
      labels_apart: And how far their labels are apart.
      refused: Version of the last one that was answered with no.
    """

    def __init__(self) -> None:
        self.last: tuple[int, int] | None = None
        self.updates_apart: int | None = None
        self.labels_apart: int | None = None
        self.refused: int | None = None

    def observe(self, version: int, label: int, accepted: bool) -> None:
        """Told of every call, and of the answer."""
        if not accepted:
            self.refused = version
        if self.last is not None and version != self.last[0]:
            self.updates_apart, self.labels_apart = version - self.last[0], label - self.last[1]
        self.last = (version, label)

    def updates_per_label(self, *, sees_every_call: bool) -> int | None:
        """How many updates a label stands for; `None` if the calls do not come with all labels."""
        updates, labels = self.updates_apart, self.labels_apart
        if updates is None or labels is None:
            return None
        if sees_every_call:
            return updates if labels == 1 else None
        return 1 if updates == labels else None

    def come_with_all_labels(self, version: int, updates_per_label: int) -> bool:
        """Whether they do so now: none has passed without one, and not all of them were saves.

        Those of a loop that calls when it saves, and only then, may come with two labels in a row.
        """
        if self.last is None or self.refused is None:
            return False
        last = self.last[0]
        return version - last < updates_per_label and last - self.refused <= updates_per_label


class SavePredictor:
    """Predicts the version of the next save.

    In order: what `expect` was told, which is all that comes until then, but for what the policy
    will say to a loop that asks it at every label; the user's policy, once `save` has come, or was
    asked for, with two consecutive labels; the period of the last two accepted saves.

    Attributes:
      is_save_label: Whether a label will be saved, as the user's policy tells, where that is known
        beforehand.
      sees_every_call: Whether `observe` is told of calls that the policy refused, too. If it is,
        only consecutive labels tie labels to versions, which are a few updates apart where
        gradients are accumulated: a loop that calls `save` now and then has a rule of its own. If
        not, any two saves do that lie as far apart in both.
      takes_state: Whether our handler took a tree in the last accepted save. If all went to others'
        handlers, so will the next ones, and a window would be in vain.
      is_alone: Whether no other process saves along. Of several, one alone may ask whether a label
        would be saved: what it foresaw from that, the others would not.
      agreed: Of several, what all of them have found by asking until the last accepted save, as
        `found_by_asking` says; `None` if they have not found the same.
      is_started: Whether the policy goes by the clock, and its yes starts the windows: the period
        of the saves so far says nothing then.
    """

    def __init__(
        self, is_save_label: Callable[[int], bool] | None = None, *, is_alone: bool = True
    ):
        self.is_save_label = is_save_label
        self.sees_every_call = True
        self.takes_state = True
        self.is_alone = is_alone
        self.agreed: int | None = None
        self.is_started = False
        self._expected: int | None = None
        self._calls = CallHistory()  # of `save`
        self._questions = CallHistory()  # whether a label would be saved
        self._said_yes = False  # to the last one
        self._saves_as_told = True  # what it asks for, when the answer is yes
        self._accepted: list[int] = []  # versions of the last two accepted saves
        self._abandoned = 0
        self._has_restored = False  # since the last accepted save
        self._cached: tuple[int, int | None] | None = None  # computed at, predicted

    def expect(self, version: int) -> None:
        """The user says that this version will be saved."""
        self._expected = version
        self._cached = None

    def observe(self, version: int, label: int, accepted: bool) -> None:
        """Told of every call of `save`."""
        self._calls.observe(version, label, accepted)
        self._cached = None
        if accepted:
            self._abandoned, self._has_restored = 0, False
            if self._questions.last is not None:
                asked_at, asked_for = self._questions.last
                updates = self._questions.updates_per_label(sees_every_call=True) or 1
                self._saves_as_told &= (label - asked_for) * updates == version - asked_at
            if not self._accepted or self._accepted[-1] != version:
                self._accepted = [*self._accepted[-1:], version]

    def asked(self, version: int, label: int, answer: bool) -> None:
        """Told of every time that the loop asks whether a label would be saved, and the answer.

        A loop that asks at every update and calls `save` if the answer is yes has its policy as one
        that always calls `save`; unless it saves other labels, or has a rule of its own besides.
        """
        before = self._questions.last
        if before is not None and self._said_yes and version != before[0]:
            self._saves_as_told &= self._calls.last is not None and self._calls.last[0] >= before[0]
        self._said_yes = answer
        self._questions.observe(version, label, answer)
        self._cached = None

    @property
    def updates_between_calls(self) -> int | None:
        """After how many updates the loop will call `save` again, or ask; `None`: nobody knows.

        As this process has seen it: of several, one may have asked alone.
        """
        kinds = [self._calls, *[self._questions] * self._saves_as_told]
        if any(calls.updates_apart == 1 for calls in kinds):  # whatever labels count
            return 1
        known = [calls.updates_per_label(sees_every_call=True) for calls in kinds]
        return min((n for n in known if n is not None), default=None)

    def found_by_asking(self, version: int, label: int) -> int | None:
        """How many updates a label stands for in a loop that has asked for all, to this save's."""
        if self._questions.last != (version, label) or not self._saves_as_told:
            return None
        return self._questions.updates_per_label(sees_every_call=True)

    def has_saved_since(self, version: int) -> bool:
        """Whether the last accepted save is of this version, or a later one."""
        return bool(self._accepted) and self._accepted[-1] >= version

    def abandoned(self) -> None:
        """Told when a window was opened for a save that did not come."""
        self._abandoned += 1
        if self._abandoned == _PATIENCE:
            _log.warning(
                "%d windows were opened for saves that did not come; none is predicted until one "
                "has come. Call `manager.expect_save(in_steps=n)` before a save that is n calls of "
                "the wrapped step away.",
                _PATIENCE,
            )  # fmt: skip

    def state_replaced(self) -> None:
        """Told when the loop has restored a checkpoint: labels and periods may begin anew."""
        self._has_restored = True

    def why_unforeseen(self, version: int) -> str:
        """That the save of this version was not predicted, and why, as far as that is known."""
        told = self._expected
        if told is not None and not self.has_saved_since(told) and not self._has_restored:
            apart = version - told
            if apart:
                when = f"{counted(abs(apart), 'step')} {'before' if apart > 0 else 'after'} it"
                return f"{_UNFORESEEN}: one was announced for {when}; {_COUNTED}"
        why = ""
        if not self._accepted:
            why = ": it is the first of this run"
        elif self._has_restored:
            why = ": a checkpoint was restored since the last one"
        elif self._abandoned >= _PATIENCE:
            why = ": windows had been opened for saves that did not come"
        elif len(self._accepted) == 1 and not self._knows_better_than_periods:
            why = ": it is the second, and their period is not known yet"
        elif (later := (self._cached or (0, None))[1]) is not None and later > version:
            why = f": the next one was foreseen for {counted(later - version, 'step')} after it"
        return f"{_UNFORESEEN}{why}; {_REMEDY}"

    def next_save(self, version: int, horizon: int) -> int | None:
        """The version of the next save.

        Args:
          version: Updates made so far.
          horizon: How many updates ahead to look.

        Returns:
          A version in (version, version + horizon], or None if no save is predicted there.
        """
        if not self.takes_state:
            return None
        told = self._expected if self._expected is not None and self._expected > version else None
        found = None
        if self._abandoned < _PATIENCE and (told is None or self._policy_tells_all(version)):
            found = self._foreseen(version, horizon)
        target = min((v for v in (told, found) if v is not None), default=None)
        return target if target is not None and target <= version + horizon else None

    def _policy_tells_all(self, version: int) -> bool:
        """Whether the loop will ask the policy at every label ahead, as it has until now."""
        found = self._in_step()
        if self.is_save_label is None or found is None:
            return False
        calls, updates = found
        return calls.come_with_all_labels(version, updates)

    def _foreseen(self, version: int, horizon: int) -> int | None:
        if self._cached is not None:
            computed_at, target = self._cached
            if target is not None and target > version:
                return target
            if target is None and version == computed_at:
                return None
        target = self._by_policy(version, horizon)
        if target is None:
            target = self._by_period(version)
        self._cached = (version, target)
        return target

    def _in_step(self) -> tuple[CallHistory, int] | None:
        """The calls by which labels are tied to versions, if any are; and the updates per label."""
        updates = self._calls.updates_per_label(sees_every_call=self.sees_every_call)
        if updates is not None:
            return self._calls, updates
        if not self.is_alone:  # from what all know: the last save, and what they have agreed on
            return None if self.agreed is None else (self._calls, self.agreed)
        updates = self._questions.updates_per_label(sees_every_call=True)
        if updates is not None and self._saves_as_told:
            return self._questions, updates
        return None

    def _by_policy(self, version: int, horizon: int) -> int | None:
        found = self._in_step()
        if self.is_save_label is None or found is None or found[0].last is None:
            return None
        (last_version, last_label), updates = found[0].last, found[1]
        first = (version - last_version) // updates + 1  # label behind the last one, not yet past
        for label in range(first, (version + horizon - last_version) // updates + 1):
            if self.is_save_label(last_label + label):
                return last_version + label * updates
        return None

    @property
    def _knows_better_than_periods(self) -> bool:
        """Whether a policy says no to the labels ahead, whatever the period of the past."""
        return self.is_started or (self.is_save_label is not None and self._in_step() is not None)

    def _by_period(self, version: int) -> int | None:
        if len(self._accepted) < 2 or self._knows_better_than_periods:
            return None
        period = self._accepted[1] - self._accepted[0]
        target = self._accepted[1] + period
        return target if target > version else None
