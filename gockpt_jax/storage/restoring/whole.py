"""Verifies what is to be restored, before it is: each process its share, and all raise together."""

import functools
from collections.abc import Callable
from typing import Any

from gockpt_jax.errors import VerifyError
from gockpt_jax.storage.inspecting.verify import verify_item
from gockpt_jax.window.processes import READING_SECS, Processes, attempted, in_short


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
