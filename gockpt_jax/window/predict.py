"""Which update will be saved.

Predicted in updates, not in labels: a label is whatever the user counts (a loop index, updates,
epochs), and only its being called at consecutive updates ties it to them. No device value is read.
"""

import logging
from collections.abc import Callable

_log = logging.getLogger("gockpt_jax")

_PATIENCE = 2


class SavePredictor:
    """Predicts the version of the next save.

    In order: what `expect` was told; the user's policy, once `save` has come with two consecutive
    labels at two consecutive versions; the period of the last two accepted saves.

    Attributes:
      is_save_label: Whether the user's policy saves at a label, where that is known beforehand.
      sees_every_call: Whether `observe` is told of calls that the policy refused, too. If it is,
        only labels of consecutive calls tie labels to versions: a loop that calls `save` now and
        then has a rule of its own. If not, any two saves do that lie as far apart in both.
      is_called_every_update: Whether the last two calls that `observe` was told of were an update
        apart.
    """

    def __init__(self, is_save_label: Callable[[int], bool] | None = None):
        self.is_save_label = is_save_label
        self.sees_every_call = True
        self.is_called_every_update = False
        self._expected: int | None = None
        self._last_call: tuple[int, int] | None = None  # version, label
        self._consecutive = False
        self._accepted: list[int] = []  # versions of the last two accepted saves
        self._abandoned = 0
        self._is_over = False
        self._cached: tuple[int, int | None] | None = None  # computed at, predicted

    def expect(self, version: int) -> None:
        """The user says that this version will be saved."""
        self._expected = version
        self._abandoned = 0
        self._cached = None

    def observe(self, version: int, label: int, accepted: bool) -> None:
        """Told of every call of `save`."""
        if self._last_call is not None and version != self._last_call[0]:
            updates, labels = version - self._last_call[0], label - self._last_call[1]
            self.is_called_every_update = updates == 1
            self._consecutive = updates == labels and (updates == 1 or not self.sees_every_call)
        self._last_call = (version, label)
        self._cached = None
        if accepted:
            self._abandoned = 0
            if not self._accepted or self._accepted[-1] != version:
                self._accepted = [*self._accepted[-1:], version]

    def abandoned(self) -> None:
        """Told when a window was opened for a save that did not come."""
        self._abandoned += 1
        self._cached = None
        if self._abandoned == _PATIENCE:
            _log.warning(
                "%d windows were opened for saves that did not come; no more are predicted. Call "
                "`manager.expect_save(in_steps=n)` some steps before a save.", _PATIENCE,
            )  # fmt: skip

    def end(self) -> None:
        """No more saves will come: the manager is closed."""
        self._is_over = True

    def next_save(self, version: int, horizon: int) -> int | None:
        """The version of the next save.

        Args:
          version: Updates made so far.
          horizon: How many updates ahead to look.

        Returns:
          A version in (version, version + horizon], or None if no save is predicted there.
        """
        if self._is_over:
            return None
        if self._expected is not None and self._expected > version:
            target: int | None = self._expected
        elif self._abandoned >= _PATIENCE:
            return None
        else:
            target = self._periodic(version, horizon)
        return target if target is not None and target <= version + horizon else None

    def _periodic(self, version: int, horizon: int) -> int | None:
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

    def _by_policy(self, version: int, horizon: int) -> int | None:
        if self.is_save_label is None or not self._consecutive or self._last_call is None:
            return None
        last_version, last_label = self._last_call
        label = last_label + version - last_version
        for ahead in range(1, horizon + 1):
            if self.is_save_label(label + ahead):
                return version + ahead
        return None

    def _by_period(self, version: int) -> int | None:
        # A policy that says no to the labels ahead knows better than the period of the past.
        if len(self._accepted) < 2 or (self.is_save_label is not None and self._consecutive):
            return None
        period = self._accepted[1] - self._accepted[0]
        target = self._accepted[1] + period
        return target if target > version else None
