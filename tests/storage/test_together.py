"""A restore on several processes: each waits for the slowest, and hears of one that has failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gockpt_jax import ProcessError
from gockpt_jax.storage.restoring.together import one_step, together
from gockpt_jax.window.processes import MEETING_SECS, PATIENCE_SECS


class Others:
    """The other processes of a restore.

    Args:
        objection: What they say of it.
    """

    several = True

    def __init__(self, objection: str | None = None):
        self._objection = objection
        self.heard: list[str | None] = []
        self.waited_secs: list[float] = []

    def objection(self, _: str, mine: str | None, timeout_secs: float) -> str | None:
        self.heard.append(mine)
        self.waited_secs.append(timeout_secs)
        return self._objection if mine is None else f"process 0: {mine}"

    def gather(self, _: str, mine: str, timeout_secs: float) -> dict[int, str]:
        self.waited_secs.append(timeout_secs)
        return {0: self._objection or mine, 1: mine}


def failing() -> Any:
    raise OSError("a disk\nis gone")


def test_the_slowest_is_waited_for_longer_than_orbax_would() -> None:
    others: Any = Others()
    assert together(lambda: 7, "the item", others) == 7
    assert others.waited_secs == [MEETING_SECS]
    assert MEETING_SECS > PATIENCE_SECS


def test_one_that_has_failed_is_told_of_everywhere_and_raises_its_own_error() -> None:
    others: Any = Others()
    with pytest.raises(OSError, match="a disk"):
        together(failing, "the item", others)
    assert others.heard == ["OSError: a disk is gone"]
    with pytest.raises(ProcessError, match=r"the item was not restored.*process 1: no such disk\."):
        together(lambda: 7, "the item", Others("process 1: no such disk."))  # type: ignore[arg-type]


def test_one_process_asks_nobody() -> None:
    alone: Any = SimpleNamespace(several=False)
    assert together(lambda: 7, "the item", alone) == 7
    with pytest.raises(OSError, match="a disk"):
        together(failing, "the item", alone)


def test_all_restore_the_same_step() -> None:
    """Parts of several would make one state; one that has found nothing is heard of at once."""
    others: Any = Others()
    assert one_step(lambda: (7, "there", ()), others) == (7, "there", ())
    assert others.waited_secs == [MEETING_SECS]
    others = Others("step 6")
    with pytest.raises(ProcessError, match="step 6 on process 0, step 7 on process 1"):
        one_step(lambda: (7, "there", ()), others)
    with pytest.raises(OSError, match="a disk"):
        one_step(failing, others)
    others = Others("NoCheckpointError: no step `7`")
    with pytest.raises(ProcessError, match="no step `7` on process 0, step 7 on process 1"):
        one_step(lambda: (7, "there", ()), others)
    alone: Any = SimpleNamespace(several=False)
    assert one_step(lambda: (7, "there", ()), alone)[0] == 7
