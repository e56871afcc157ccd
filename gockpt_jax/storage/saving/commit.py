"""The commit of a save on several processes: all of it, or an error that names who failed and why.

Orbax waits for all processes when every chunk is written, and again when the checkpoint has been
renamed. One that has failed does not come there: the others would wait until their time is up, and
learn nothing. So these two barriers are votes. Whoever fails goes straight to the barrier at which
Orbax says that the save is over; on the way there it votes, in the place of the one it left out.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import orbax.checkpoint as ocp

from gockpt_jax.errors import ProcessError
from gockpt_jax.storage.files import _compat as of_orbax
from gockpt_jax.window.processes import (
    MEETING_SECS,
    PATIENCE_SECS,
    Processes,
    attempted,
    in_short,
)


class CommitVotes:
    """Orbax's `AsyncOptions.barrier_sync_fn`: its barriers, two of which are votes.

    Args:
      processes: Those that save together.
      committed: Called when all of them know that the checkpoint is visible.

    Attributes:
      failure: Why the last save was given up, if a process has failed, this one too, or is gone.
    """

    def __init__(self, processes: Processes, committed: Callable[[], None]):
        self._processes = processes
        self._committed = committed
        self._outstanding: tuple[str, ...] = ()
        self._label = -1
        self._is_one_missing = False
        self.failure: ProcessError | None = None

    def begin(self, label: int) -> None:
        """A save has begun; its commit follows on another thread, on every process."""
        self._label = label
        self._outstanding = of_orbax.COMMIT_BARRIERS
        self._is_one_missing = False
        self.failure = None

    def cancel(self) -> None:
        """The save was refused before its commit began."""
        self._outstanding = ()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes at a barrier of Orbax's.

        Raises:
          ProcessError: if a process has failed, or does not come.
        """
        timeout_secs = timeout_ms / 1000
        if not self._outstanding:
            if not self._is_one_missing:  # nobody waits for it twice
                self._processes.barrier(key, timeout_secs)
        elif self._outstanding[0] in key:
            self._vote(None, timeout_secs)
            if self.failure is not None:
                raise self.failure
            if not self._outstanding:
                self._committed()
        else:  # another barrier than the one expected: the commit has failed here
            self._vote(sys.exc_info()[1] or RuntimeError("its commit failed"), timeout_secs)
            self(key=key, timeout_ms=timeout_ms)

    def _vote(self, error: BaseException | None, timeout_secs: float) -> None:
        subject, self._outstanding = self._outstanding[0], self._outstanding[1:]
        try:
            self.failure = vote(self._processes, subject, self._label, error, timeout_secs)
        except ProcessError as missing:
            self.failure, self._is_one_missing = missing, True
        if self.failure is not None:
            self._outstanding = ()


def vote(
    processes: Processes, subject: str, label: int, error: BaseException | None,
    timeout_secs: float,
) -> ProcessError | None:  # fmt: skip
    """Tells the other processes how a save goes here, and hears how it goes there.

    Args:
      processes: All of them vote.
      subject: What is voted on.
      label: Of the save.
      error: What has failed here; `None`: nothing.
      timeout_secs: How long to wait for the slowest.

    Returns:
      The error to raise on every process; `None` if none has failed.

    Raises:
      ProcessError: if a process does not come in time.
    """
    mine = None if error is None else f"{type(error).__name__}: {error}"
    objection = processes.objection(subject, mine, timeout_secs)
    if objection is None:
        return None
    return ProcessError(
        f"the save of step {label} was given up on all {len(processes.members)} processes, for one "
        f"has failed: {objection.rstrip('.')}. Nothing of it is visible, earlier checkpoints are "
        f"intact, and training can go on. This is process {jax.process_index()}."
    )


def agree(
    processes: Processes, subject: str, label: int, error: Exception | None,
    timeout_secs: float = PATIENCE_SECS,
) -> None:  # fmt: skip
    """Raises, on every process, what has failed on one; the arguments are those of `vote`."""
    if processes.several:
        failure = vote(processes, subject, label, error, timeout_secs)
        if failure is not None:
            raise failure from error
    elif error is not None:
        raise error


def never_draining(
    root: Any, options: ocp.CheckpointManagerOptions, processes: Processes
) -> ocp.CheckpointManagerOptions:
    """Options with which a save does not wait for the devices; what the user set stays.

    Orbax's barriers are collectives of the devices, behind all steps in flight, unless it is told
    which processes take part. For processes that it was told of it makes no directory, so that is
    made here.

    Args:
      root: Of the manager's checkpoints.
      options: The user's.
      processes: Those that save together; all of them call this.

    Raises:
      OSError: if the directory cannot be made; `ProcessError` on the other processes.
    """
    given = options.multiprocessing_options
    if not processes.several or options.read_only or given.active_processes is not None:
        return options
    if options.create:
        mode = options.file_options.path_permission_mode if options.file_options else None
        _make(root, mode, processes, given.primary_host)
    together = dataclasses.replace(
        given,
        active_processes=set(processes.members),
        barrier_sync_key_prefix=given.barrier_sync_key_prefix or processes.prefix,
    )
    return dataclasses.replace(options, create=False, multiprocessing_options=together)


def _make(root: Any, mode: int | None, processes: Processes, maker: int | None) -> None:
    """Has one process make a directory; returns when it is there, and raises on all if it cannot.

    Raises:
      OSError: on that process.
      ProcessError: on the others.
    """

    def make() -> None:
        if ocp.multihost.is_primary_host(maker):
            root.mkdir(parents=True, exist_ok=True, mode=mode)

    _, failure = attempted(make)
    elsewhere = processes.objection("root", in_short(failure), MEETING_SECS)
    if failure is not None:
        raise failure
    if elsewhere is not None:
        raise ProcessError(
            f"{root} could not be made on one process: {elsewhere}. Give a directory that can be "
            "made there, and that all processes see."
        )


def with_word_of_commits(
    options: ocp.CheckpointManagerOptions, processes: Processes, committed: Callable[[], None],
    telling: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> tuple[ocp.CheckpointManagerOptions, CommitVotes | None]:  # fmt: skip
    """The user's options, with a word to us after each commit, and a vote before it.

    Args:
      options: Of a manager that saves asynchronously.
      processes: Those that save together.
      committed: Called on a thread of Orbax's; tells listeners and the log of the save.
      telling: Entered there while these, or the user's own callback, are told.

    Returns:
      The options, and the votes; `None` for one process, and where the barriers are the user's.
    """
    async_options = options.async_options or ocp.options.AsyncOptions()
    users = async_options.post_finalization_callback

    def tell() -> None:
        with telling():
            committed()

    def finalized() -> None:  # on the primary process alone
        tell()
        if users is not None:
            with telling():
                users()

    told = dataclasses.replace(async_options, post_finalization_callback=finalized)
    votes = None
    if processes.several and async_options.barrier_sync_fn is None:
        votes = CommitVotes(processes, tell)
        told = dataclasses.replace(told, barrier_sync_fn=votes)
    return dataclasses.replace(options, async_options=told), votes
