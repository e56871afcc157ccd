"""What the processes of one job tell each other: by the coordination service, never by the devices.

A device collective would wait behind every step in flight, and may not run on a second thread. The
coordination service of `jax.distributed` does neither: a few remote calls of about a millisecond.

A window is not one process's affair. The armed step is another executable than the user's, with
collectives of its own, so either every process runs it for an update or none does. What one process
alone can know (its compilation, its memory) is therefore asked of all before a window opens. What
befalls one of them later is its own affair until the commit: the others' chunks are final at the
same version however its own were taken, and it keeps running the armed step beside them.
"""

import collections
import contextlib
import functools
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import jax

from gockpt_jax import _compat
from gockpt_jax.errors import ProcessError

PATIENCE_SECS = 1200.0
"""How long one process waits for the others on the trainer's thread: as Orbax does for a commit.

Its own barriers end after 300 s. Without us the next step would wait for ever, so a loop whose data
come late on one host goes on when they have come.
"""

MEETING_SECS = 3600.0
"""And where they may be far apart: one finds its first step in the compilation cache, or its data
prepared, and another does not; or one reads a checkpoint for longer. Stock waits there for ever."""

READING_SECS = 86_400.0
"""And where others may read for hours: of one that is gone the coordination service tells."""

_MOST_CHARACTERS = 300  # of what another process is told, of all lines

_asking: collections.Counter[frozenset[int]] = collections.Counter()

_T = TypeVar("_T")


def attempted(do: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """What comes of it, or the error: the other processes would wait for one that raises alone."""
    try:
        return do(), None
    except Exception as error:
        return None, error


def in_short(failure: Exception | None) -> str | None:
    """What other processes are told of a failure, in a line; `None` if there is none."""
    if failure is None:
        return None
    return " ".join(f"{type(failure).__name__}: {failure}".split())[:_MOST_CHARACTERS]


class Processes:
    """The processes that save together.

    Every method is called by all of them, as often and in the same order for each `subject`.
    Subjects do not wait for each other, so the trainer's thread and a thread of Orbax's may ask at
    the same time.

    Args:
      members: Their indices, of which this process's is one; `None`: all.

    Attributes:
      is_one_missing: Whether one did not come to the last barrier, or the coordination service is
        gone.

    Raises:
      RuntimeError: if there are several, and `jax.distributed` has not been initialized.

    Example:
      >>> alone = Processes()
      >>> alone.several, alone.objection("window", "still compiling")
      (False, 'still compiling')
      >>> alone.gather("limit", "7")
      {0: '7'}
    """

    def __init__(self, members: Collection[int] | None = None):
        count = jax.process_count()
        self.members = frozenset(range(count) if members is None else members)
        self.several = len(self.members) > 1
        self.is_one_missing = False
        self._name = f"gockpt_{'_'.join(map(str, sorted(members))) if members else 'all'}"
        self._index = jax.process_index()
        self._lead = min(self.members)
        self._asked: collections.Counter[str] = collections.Counter()
        self._client: Any = None
        self._are_alike = False
        if self.several:
            self._client = _compat.coordination_client()
            if self._client is None:
                raise RuntimeError(
                    f"{len(self.members)} processes save together, and nothing connects them. Call "
                    "`jax.distributed.initialize()` at the start of the program."
                )

    @functools.cached_property
    def prefix(self) -> str:
        """A name that these have on every process, and no others of the same members.

        Managers ask in the same order everywhere, as their barriers demand. One that is made on one
        process alone, to read, asks nothing, and is not counted.
        """
        if not self.several:
            return self._name
        number = _asking[self.members]
        _asking[self.members] += 1
        return f"{self._name}_{number}"

    @property
    def share(self) -> tuple[int, int]:
        """The how-manyth of them this one is, from 0, and how many they are."""
        return sorted(self.members).index(self._index), len(self.members)

    def barrier(self, subject: str, timeout_secs: float = PATIENCE_SECS) -> None:
        """Returns when every process has come to this barrier, as often as this one.

        Raises:
          ProcessError: if one does not come in time, or is gone; it is named.
        """
        if not self.several:
            return
        self._asked[subject] += 1
        at = f"{self.prefix}/at/{subject}/"
        self._set(f"{at}{self._index}", str(self._asked[subject]), allow_overwrite=True)
        started_at = time.monotonic()
        try:
            self._client.wait_at_barrier(
                f"{self.prefix}/{subject}",
                int(timeout_secs * 1000),
                process_ids=sorted(self.members),
            )
            self.is_one_missing = False
        except jax.errors.JaxRuntimeError as error:
            self.is_one_missing = True
            secs = time.monotonic() - started_at
            missing = self._missing(at, self._asked[subject])
            what = f"{_named(missing)} did not come to `{subject}` within {secs:.0f} s"
            if missing == [] and "DEADLINE_EXCEEDED" in str(error) and secs < timeout_secs / 2:
                what = f"process {self._index} came to `{subject}` when others had ceased to wait"
            raise ProcessError(
                f"{what}: {_first_line(error)}. Look at its log, and whether all make the "
                "same calls. Earlier checkpoints are intact."
            ) from error

    def objection(
        self, subject: str, mine: str | None, timeout_secs: float = PATIENCE_SECS
    ) -> str | None:
        """Asks all processes whether something stands against it.

        Args:
          subject: What is asked.
          mine: What stands against it here; `None`: nothing.
          timeout_secs: How long to wait for the slowest.

        Returns:
          One process's objection with the process's name, the same everywhere; `None` if there is
          none.

        Raises:
          ProcessError: if a process does not come in time.
        """
        if not self.several:
            return mine
        if mine is not None:
            first = f"{self._next(subject)}first"
            # Another process may be first: one reason is enough.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.key_value_set(first, f"process {self._index}: {mine}")
        return next(iter(self._answers(subject, timeout_secs).values()), None)

    def gather(self, subject: str, mine: str, timeout_secs: float | None = None) -> dict[int, str]:
        """What every process says, by its index.

        Args:
          subject: What is asked.
          mine: The answer of this process; short.
          timeout_secs: How long to wait for the slowest; `None`: `PATIENCE_SECS`.

        Raises:
          ProcessError: if a process does not come in time.
        """
        if not self.several:
            return {self._index: mine}
        self._set(f"{self._next(subject)}{self._index}", mine)
        told = self._answers(subject, timeout_secs or PATIENCE_SECS)
        return {int(index): text for index, text in sorted(told.items())}

    def all_say(self, subject: str, mine: str) -> bool:
        """Whether every process says the same.

        Raises:
          ProcessError: if a process does not come in time.
        """
        return set(self.gather(subject, mine).values()) == {mine}

    def least(self, subject: str, mine: int | None) -> int | None:
        """The smallest of all processes' numbers; `None` stands for a number without bound."""
        told = self.gather(subject, "" if mine is None else str(mine))
        return min((int(text) for text in told.values() if text), default=None)

    def require_alike(self, settings: Mapping[str, Any]) -> None:
        """Asked once: processes that were set up differently wait for each other in vain, later.

        Args:
          settings: Of this process, by their names.

        Raises:
          ProcessError: on all of them, if one has others.
        """
        if self._are_alike:
            return
        mine = json.dumps({k: str(v) for k, v in settings.items()})
        told = self.gather("settings", mine, MEETING_SECS)
        of_each = {index: json.loads(text) for index, text in told.items()}
        for name in settings:
            values = {index: answer.get(name) for index, answer in of_each.items()}
            if len(set(values.values())) > 1:
                said = ", ".join(f"{value} on process {index}" for index, value in values.items())
                raise ProcessError(
                    f"`WindowOptions` differ between processes: {name} is {said}. Give all the "
                    "same; budgets and threads of the host, `step_secs` and the like may differ."
                )
        self._are_alike = True

    def _next(self, subject: str) -> str:
        """Where the answers to the next question are."""
        return f"{self.prefix}/{subject}/{self._asked[subject] + 1}/"

    def _answers(self, subject: str, timeout_secs: float) -> dict[str, str]:
        """Waits for all, and reads what they have said."""
        folder = self._next(subject)
        self.barrier(subject, timeout_secs)
        with self._service():
            if self._index == self._lead:
                # Whoever has come to this question has read the answers to the one before.
                before = f"{self.prefix}/{subject}/{self._asked[subject] - 1}/"
                self._client.key_value_delete(before)
            found = self._client.key_value_dir_get(folder)
        return {name.rpartition("/")[2]: text for name, text in found}

    def _set(self, key: str, value: str, *, allow_overwrite: bool = False) -> None:
        with self._service():
            self._client.key_value_set(key, value, allow_overwrite=allow_overwrite)

    @contextlib.contextmanager
    def _service(self) -> Iterator[None]:
        """What the coordination service is asked in here it may not answer any more."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            self.is_one_missing = True
            raise ProcessError(
                f"the coordination service does not answer: {_first_line(error)}. It belongs to "
                "the process with index 0, as a rule: look at its log. Earlier checkpoints are "
                "intact."
            ) from error

    def _missing(self, at: str, number: int) -> list[int] | None:
        """Those that have not come to a barrier yet; `None`: nobody knows."""
        try:
            found = self._client.key_value_dir_get(at)
        except jax.errors.JaxRuntimeError:  # the coordination service itself is gone
            return None
        there = {int(name.rpartition("/")[2]) for name, text in found if int(text) >= number}
        return sorted(self.members - there)


def _named(missing: list[int] | None) -> str:
    if not missing:
        return "a process"
    return f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
