"""The votes at the commit of a save, with threads in the place of processes."""

from __future__ import annotations

import collections
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orbax.checkpoint as ocp
import pytest
from etils import epath

from gockpt_jax.errors import ProcessError
from gockpt_jax.storage.files import _compat as of_orbax
from gockpt_jax.storage.managing.calls import Calls
from gockpt_jax.storage.saving import commit
from gockpt_jax.storage.saving.commit import CommitVotes
from gockpt_jax.window.processes import PATIENCE_SECS, Processes

WAIT_SECS = 30  # only ends a test that hangs
WRITTEN, RENAMED = (f"{part}.7" for part in of_orbax.COMMIT_BARRIERS)
OVER = f"{of_orbax.PROGRESS_BARRIER}.7"


class Group:
    """What the processes of a job tell each other, and where they have met."""

    def __init__(self, count: int):
        self.all_here = threading.Barrier(count)
        self.told: dict[tuple[str, int], str] = {}
        self.met: list[tuple[str, float]] = []


class Member(Processes):
    """One process of a group; each subject is asked as often by all, in the same order."""

    def __init__(self, group: Group, index: int):
        super().__init__()
        self.members = frozenset(range(group.all_here.parties))
        self.several, self.prefix = len(self.members) > 1, "ours"
        self.is_gone = False
        self._group, self._index = group, index
        self._asked = collections.Counter()

    def barrier(self, subject: str, timeout_secs: float = PATIENCE_SECS) -> None:
        if self.is_gone:
            raise ProcessError(f"process 1 did not come to `{subject}`")
        if self._group.all_here.wait(WAIT_SECS) == 0:
            self._group.met.append((subject, timeout_secs))
        self._group.all_here.wait(WAIT_SECS)

    def objection(
        self, subject: str, mine: str | None, timeout_secs: float = PATIENCE_SECS
    ) -> str | None:
        question = subject, self._asked[subject]
        if mine is not None and not self.is_gone:
            self._group.told.setdefault(question, f"process {self._index}: {mine}")
        self.barrier(subject, timeout_secs)
        self._asked[subject] += 1
        return self._group.told.get(question)


class Saver:
    """A process that commits as Orbax does; `fails_before` is the barrier it does not come to."""

    def __init__(self, group: Group, index: int):
        self.processes = Member(group, index)
        self.visible: list[int] = []
        self.votes = CommitVotes(self.processes, lambda: self.visible.append(self.label))
        self.label = -1

    def save(self, label: int, fails_before: str | None = None) -> BaseException | None:
        """Begins a save and commits it; gives what that ended with."""
        self.label = label
        self.votes.begin(label)
        try:
            for key in (WRITTEN, RENAMED):
                if key == fails_before:
                    raise OSError("the disk is full.")
                self.votes(key=key, timeout_ms=5000)
        except Exception as error:
            self.votes(key=OVER, timeout_ms=3000)  # Orbax's bookkeeping, whatever has happened
            return error
        self.votes(key=OVER, timeout_ms=3000)
        return None


def group_of(count: int) -> tuple[Group, list[Saver]]:
    group = Group(count)
    return group, [Saver(group, index) for index in range(count)]


def on_all(savers: list[Saver], do: Callable[[int, Saver], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(savers)) as pool:
        return [f.result(WAIT_SECS) for f in [pool.submit(do, *s) for s in enumerate(savers)]]


VOTES = [(part, 5.0) for part in of_orbax.COMMIT_BARRIERS]
FAILED = {WRITTEN: [(VOTES[0][0], 5.0)], RENAMED: VOTES}


@pytest.mark.parametrize("count", [2, 3])
def test_a_save_is_visible_when_all_have_renamed(count):
    group, savers = group_of(count)
    assert on_all(savers, lambda _, saver: saver.save(7)) == [None] * count
    assert [saver.visible for saver in savers] == [[7]] * count
    assert [saver.votes.failure for saver in savers] == [None] * count
    assert group.met == [*VOTES, (OVER, 3.0)]


@pytest.mark.parametrize("where", FAILED)
@pytest.mark.parametrize("failing", [{1}, {0, 2}, {0, 1, 2}])
def test_who_fails_votes_so_and_all_hear_why(where, failing):
    """Then all meet once more, and the next save is another."""
    group, savers = group_of(3)
    ended = on_all(savers, lambda i, s: s.save(7, where if i in failing else None))
    for index, (saver, error) in enumerate(zip(savers, ended, strict=True)):
        assert isinstance(error, OSError if index in failing else ProcessError)
        message = str(saver.votes.failure)
        assert "the save of step 7 was given up on all 3 processes" in message
        assert "OSError: the disk is full. Nothing of it is visible" in message
        assert saver.visible == []
    assert [met for met, _ in group.met] == [met for met, _ in FAILED[where]] + [OVER]
    assert on_all(savers, lambda _, saver: saver.save(8)) == [None] * 3
    assert [saver.visible for saver in savers] == [[8]] * 3
    assert [saver.votes.failure for saver in savers] == [None] * 3


@pytest.mark.parametrize("where", [None, WRITTEN])
def test_who_does_not_come_is_waited_for_once(where):
    """A save that fails here finds it missing, too; the next save waits for all again."""
    group, (here, there) = group_of(2)
    here.processes.is_gone = True
    assert isinstance(here.save(7, where), OSError if where else ProcessError)
    assert "process 1 did not come" in str(here.votes.failure)
    assert here.visible == group.met == []
    here.processes.is_gone = False
    assert on_all([here, there], lambda _, saver: saver.save(8)) == [None, None]
    assert here.visible == there.visible == [8]
    assert group.met == [*VOTES, (OVER, 3.0)]


def test_without_a_word_of_why_it_has_failed_all_the_same():
    """Orbax may come to the end of a save with nothing being raised."""
    _, savers = group_of(2)

    def save(index: int, saver: Saver) -> None:
        if index == 0:
            saver.save(7)
        else:
            saver.votes.begin(7)
            saver.votes(key=OVER, timeout_ms=3000)

    on_all(savers, save)
    assert "process 1: RuntimeError: its commit failed" in str(savers[0].votes.failure)
    assert [saver.visible for saver in savers] == [[], []]


def test_no_other_save_is_voted_on():
    """Neither before the first, nor of one that is refused; what became of the last is past."""
    group, savers = group_of(2)

    def refused(_: int, saver: Saver) -> None:
        saver.votes(key=OVER, timeout_ms=1000)
        assert isinstance(saver.save(7, WRITTEN), OSError)
        saver.votes.begin(8)
        saver.votes.cancel()
        saver.votes(key=OVER, timeout_ms=2000)

    on_all(savers, refused)
    assert [met for met, _ in group.met] == [OVER, VOTES[0][0], OVER, OVER]
    assert [saver.votes.failure for saver in savers] == [None, None]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("failing", [(), (0,)])
def test_an_agreement_raises_on_all_or_on_none(count, failing):
    group, savers = group_of(count)

    def agree(index: int, saver: Saver) -> tuple[BaseException, BaseException | None] | None:
        error = OSError("no") if index in failing else None
        try:
            commit.agree(saver.processes, "written", 7, error, 9.0)
        except (OSError, ProcessError) as raised:
            return raised, error
        return None

    ended = on_all(savers, agree)
    assert [found is not None for found in ended] == [bool(failing)] * count
    for raised, mine in filter(None, ended):
        assert raised is mine if count == 1 else raised.__cause__ is mine
        assert isinstance(raised, OSError if count == 1 else ProcessError)
    assert group.met == [("written", 9.0)] * (count > 1)


# What a manager's options become.

OPTIONS = ocp.CheckpointManagerOptions
TOGETHER = ocp.options.MultiprocessingOptions


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (1, OPTIONS()),
        (2, OPTIONS(read_only=True)),
        (2, OPTIONS(create=False, multiprocessing_options=TOGETHER(active_processes={0, 1}))),
    ],
)
def test_options_that_stay(tmp_path, count, options):
    group, (here, *_) = group_of(count)
    assert commit.never_draining(tmp_path / "run", options, here.processes) is options
    assert group.met == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("given", [None, "users"])
@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("mode", [None, 0o700])
def test_the_root_is_there_when_all_have_met(tmp_path, monkeypatch, given, is_there, mode):
    """Orbax makes none for processes that it was told of."""
    group, savers = group_of(2)
    root, indices = tmp_path / "of" / "run", threading.local()
    monkeypatch.setattr(ocp.multihost, "is_primary_host", lambda host: indices.of_this == host)
    if is_there:
        root.mkdir(parents=True)
    options = OPTIONS(
        multiprocessing_options=TOGETHER(primary_host=1, barrier_sync_key_prefix=given),
        file_options=ocp.options.FileOptions(path_permission_mode=mode) if mode else None,
    )
    made = []

    class Root(type(epath.Path())):
        def mkdir(self, *args: Any, **kwargs: Any) -> None:
            made.append(indices.of_this)
            super().mkdir(*args, **kwargs)

    def look(index: int, saver: Saver) -> Any:
        indices.of_this = index
        found = commit.never_draining(Root(root), options, saver.processes)
        assert root.is_dir()
        return found

    for found in on_all(savers, look):
        together = found.multiprocessing_options
        assert not found.create
        assert (together.active_processes, together.primary_host) == ({0, 1}, 1)
        assert together.barrier_sync_key_prefix == (given or "ours")
    assert set(made) == {1}, "by the primary process alone"
    assert [met for met, _ in group.met] == ["root"]
    if mode and not is_there:
        assert stat.S_IMODE(root.stat().st_mode) == mode


def test_all_hear_of_a_root_that_cannot_be_made(tmp_path, monkeypatch):
    """The others would wait for an hour for the one that makes it."""
    _, savers = group_of(2)
    (tmp_path / "of").touch()
    root, indices = epath.Path(tmp_path / "of" / "run"), threading.local()
    monkeypatch.setattr(ocp.multihost, "is_primary_host", lambda _: indices.of_this == 0)

    def make(index: int, saver: Saver) -> None:
        indices.of_this = index
        error = (NotADirectoryError, ProcessError)[index]
        with pytest.raises(error, match=str(root)) as caught:
            commit.never_draining(root, OPTIONS(), saver.processes)
        assert index == 0 or "process 0: NotADirectoryError" in str(caught.value)

    on_all(savers, make)


def test_no_root_is_made_if_none_shall_be(tmp_path):
    group, (here, _) = group_of(2)
    found = commit.never_draining(tmp_path / "run", OPTIONS(create=False), here.processes)
    assert found.multiprocessing_options.active_processes == {0, 1}
    assert not (tmp_path / "run").exists()
    assert group.met == []


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("barrier", [None, lambda *, key, timeout_ms: None])
@pytest.mark.parametrize("is_asked", [False, True])
def test_a_word_of_commits_beside_the_users(count, barrier, is_asked):
    _, (here, *_) = group_of(count)
    said: list[str] = []
    users = ocp.options.AsyncOptions(
        timeout_secs=11, barrier_sync_fn=barrier,
        post_finalization_callback=(lambda: said.append("users")) if is_asked else None,
    )  # fmt: skip
    options, votes = commit.with_word_of_commits(
        OPTIONS(async_options=users), here.processes, lambda: said.append("ours")
    )
    told = options.async_options
    told.post_finalization_callback()
    assert said == ["ours", "users"][: 1 + is_asked]
    assert told.timeout_secs == 11
    assert (votes is not None) == (count > 1 and barrier is None)
    assert told.barrier_sync_fn is (barrier if votes is None else votes)


def test_a_word_of_commits_where_the_user_says_nothing():
    _, (here, _) = group_of(2)
    said: list[str] = []
    options, votes = commit.with_word_of_commits(
        OPTIONS(), here.processes, lambda: said.append("ours")
    )
    options.async_options.post_finalization_callback()
    assert said == ["ours"]
    assert options.async_options.barrier_sync_fn is votes is not None


def test_who_has_told_of_a_commit_may_wait_again():
    """Python gives the number of a thread that has ended to another one."""
    calls = Calls(threading.RLock())
    with calls.telling(), pytest.raises(RuntimeError, match="in the middle of a save"):
        calls.refuse_waiting()
    calls.refuse_waiting()
