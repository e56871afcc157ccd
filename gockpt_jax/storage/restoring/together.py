"""A restore on several processes: of one step, and over when all have read, or one has failed.

Orbax waits for them too, but only for some minutes, where it is told which processes take part.
What is verified before, each reads its share of, and all raise together.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from gockpt_jax.errors import ProcessError, VerifyError
from gockpt_jax.storage.inspecting.verify import verify_item
from gockpt_jax.window.processes import (
    MEETING_SECS,
    READING_SECS,
    Processes,
    attempted,
    in_short,
)

Found = TypeVar("Found", bound=tuple[int, Any, Any])


def one_step(find: Callable[[], Found], processes: Processes) -> Found:
    """What this process has found to restore, when all have found the same label.

    Args:
      find: Finds the label first, and raises if there is none; all processes call it.
      processes: Those that restore together.

    Raises:
      ProcessError: if others have found another, or nothing, or do not come.
    """
    found, failure = attempted(find)
    mine = f"step {found[0]}" if found is not None else str(in_short(failure))
    told = processes.gather("restoring", mine, MEETING_SECS)
    if found is None:
        assert failure is not None, "what has found nothing has raised"
        raise failure
    if len(set(told.values())) > 1:
        said = ", ".join(f"{text} on process {index}" for index, text in told.items())
        raise ProcessError(
            f"`restore` has not found the same on all processes: {said}. Nothing was restored. "
            "Restore the same label on all, such as one that the first tells the others."
        )
    return found


def require_whole(item: Any, processes: Processes) -> None:
    """Verifies an item before it is restored; each of the processes reads its share.

    Raises:
      VerifyError: It is damaged, or has no checksums. All processes raise.
    """
    raised_by_all(item, functools.partial(require_whole_share, item, processes), processes)


def require_whole_share(item: Any, processes: Processes) -> None:
    """Verifies this process's share of an item.

    Raises:
      VerifyError: It is damaged, or has no checksums.
    """
    verify_item(item, share=processes.share).require_whole()


def raised_by_all(path: Any, check: Callable[[], None], processes: Processes) -> None:
    """Runs a check; where it raises on one process all do: they would wait for that one in vain.

    Args:
      path: What is checked.
      check: Raises if something is wrong with it.
      processes: Those that restore together.
    """
    _, wrong = attempted(check)
    elsewhere = processes.objection("verified", in_short(wrong), READING_SECS)
    if wrong is not None:
        raise wrong
    if elsewhere is not None:
        raise VerifyError(f"{path} is not whole, as one process has found. {elsewhere}")


class Together:
    """Restores on several processes: each is over when all have read, or one has failed.

    Orbax reads the items of a step in turn, and all meet behind the last. Of each tree of ours all
    are asked, also before it where it is checked, or some of it is sent from one process to others;
    and of what else there is once more behind that. A process that has failed in an item that is
    not ours comes where the others do next: they would wait for it in vain.

    Args:
      processes: Those that restore together.
      meet: Comes to where Orbax has all meet.
    """

    def __init__(self, processes: Processes, meet: Callable[[], None]):
        self._processes = processes
        self._meet = meet
        self._asked = 0  # behind how many trees, in this restore
        self._is_told = False  # all know that one has failed

    def check(self, check: Callable[[], None], path: Any) -> None:
        """Checks a tree before it is read or sent: where that raises on one process all do.

        Args:
          check: Raises if something is wrong with it; all processes call this.
          path: What is checked.

        Raises:
          ProcessError: if another has failed in an item before it, or does not come.
          VerifyError: if another has found something wrong.
        """
        self._by_all(check, path, READING_SECS)

    def read(self, read: Callable[[], Any], path: Any) -> Any:
        """What this process has read, when all have: one may take far longer than another.

        Args:
          read: Reads this process's part; all processes call it.
          path: What is read.

        Raises:
          ProcessError: if another has failed, or does not come.
        """
        try:
            return self._by_all(read, path, MEETING_SECS)
        finally:
            self._asked += 1

    def _by_all(self, do: Callable[[], Any], path: Any, patience_secs: float) -> Any:
        found, failure = attempted(do)
        elsewhere = self._processes.objection("restored", in_short(failure), patience_secs)
        self._is_told = elsewhere is not None
        if failure is not None:
            raise failure
        if elsewhere is not None:
            kind = VerifyError if f": {VerifyError.__name__}: " in elsewhere else ProcessError
            raise kind(
                f"{path} was not restored, for one process has failed: {elsewhere.rstrip('.')}. "
                "Look at its log; the checkpoint is as it was."
            )
        return found

    def read_items(self, read: Callable[[], Any], path: Any, trees: int) -> Any:
        """What Orbax has read of a step's items, when all processes have.

        Args:
          read: Has Orbax read them; all processes call it.
          path: Of the step.
          trees: How many of them are ours, which `read` is asked for.

        Raises:
          ProcessError: if another has failed, or does not come.
        """
        self._asked, self._is_told = 0, False
        found, failure = attempted(read)
        if failure is not None:
            if self._is_told:
                raise failure
            if self._asked == trees:
                self._meet()

        def settled() -> Any:
            if failure is not None:
                raise failure
            return found

        return self.read(settled, path)
