"""A restore on several processes: each waits for the slowest, and hears of one that has failed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from gockpt_jax import GoCkptManager, ProcessError, VerifyError
from gockpt_jax.storage.restoring.together import Together, one_step
from gockpt_jax.window.processes import MEETING_SECS, PATIENCE_SECS, Processes


class Others:
    """The other processes of a restore.

    Args:
        objection: What they say of it.
    """

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


def together(read: Any, path: Any, processes: Any) -> Any:
    return Together(processes, lambda: None).read(read, path)


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


def test_one_process_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor if Orbax is told that it is the one which takes part."""
    monkeypatch.setattr(Processes, "objection", lambda *_: pytest.fail("nobody is asked"))
    monkeypatch.setattr(Processes, "gather", lambda *_: pytest.fail("nobody is asked"))
    together = ocp.options.MultiprocessingOptions(
        active_processes={0}, barrier_sync_key_prefix="alone"
    )
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=together)
    with ocp.CheckpointManager(tmp_path) as stock:
        stock.save(7, args=ocp.args.StandardSave({"w": np.arange(3)}))
    with GoCkptManager(tmp_path, options=options) as manager:
        assert manager.restore(None)["w"].tolist() == [0, 1, 2]


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


def test_one_that_fails_in_another_item_comes_where_the_others_come_next() -> None:
    """They read two trees: to its end, or to the next question, or as far as all meet."""

    def read(trees: int, failure: Exception | None = None) -> Any:
        for _ in range(trees):
            items.read(lambda: 7, "a tree")
        if failure is not None:
            raise failure
        return "all"

    for trees, comes_to in ((0, "question"), (1, "question"), (2, "meeting")):
        others: Any = Others()
        met: list[int] = []
        items = Together(others, lambda met=met, others=others: met.append(len(others.heard)))
        assert items.read_items(functools.partial(read, 2), "the step", 2) == "all"
        assert (others.heard, met) == ([None] * 3, [])
        others.heard.clear()
        with pytest.raises(OSError, match="a disk"):
            items.read_items(functools.partial(read, trees, OSError("a disk")), "the step", 2)
        assert others.heard == [None] * trees + ["OSError: a disk"]
        assert met == ([trees] if comes_to == "meeting" else [])


def test_a_tree_is_checked_on_all_before_it_is_read_on_any() -> None:
    """One that has failed in an item before it is heard of there, by the same question."""
    others: Any = Others()
    items = Together(others, lambda: pytest.fail("nobody comes there"))
    items.check(lambda: None, "the tree")
    assert items.read(lambda: 7, "the tree") == 7
    with pytest.raises(OSError, match="a disk"):
        items.check(failing, "the tree")
    assert others.heard == [None, None, "OSError: a disk is gone"]
    for told, error in (
        ("process 1: OSError: no such item", ProcessError),
        ("process 1: VerifyError: a chunk is damaged", VerifyError),
    ):
        others = Others(told)
        items = Together(others, lambda: pytest.fail("nobody comes there"))
        with pytest.raises(error, match="the tree was not restored, for one process has failed"):
            items.read_items(functools.partial(items.check, list, "the tree"), "the step", 1)
        assert len(others.heard) == 1


def test_what_all_know_is_not_asked_about_again() -> None:
    others: Any = Others()
    items = Together(others, lambda: pytest.fail("nobody comes there"))
    with pytest.raises(OSError, match="a disk"):
        items.read_items(lambda: items.read(failing, "a tree"), "the step", 1)
    assert len(others.heard) == 1
    others = Others("process 1: no such disk")
    items = Together(others, lambda: pytest.fail("nobody comes there"))
    with pytest.raises(ProcessError, match="the tree was not restored"):
        items.read_items(lambda: items.read(lambda: 7, "the tree"), "the step", 1)
    assert len(others.heard) == 1
    items = Together(Others("process 1: no such disk"), lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ProcessError, match="the step was not restored"):
        items.read_items(lambda: 7, "the step", 0)
