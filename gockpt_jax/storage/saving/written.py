"""What Orbax waits for before it commits a save: an item's writes, here and on all processes."""

import concurrent.futures
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import orbax.checkpoint as ocp

from gockpt_jax.storage.files.storage_errors import storage_error
from gockpt_jax.storage.saving.commit import agree
from gockpt_jax.storage.writing.write_budget import WriteStats
from gockpt_jax.telemetry.save_record import PendingReport, SaveRecord
from gockpt_jax.window.processes import PATIENCE_SECS, Processes, attempted

_A_MOMENT_SECS = 0.01
"""Given no time at all, some of Orbax's futures say that they have not ended when they have."""


class Written(ocp.future.Future):  # type: ignore[misc]
    """All of an item's writes and their checksums, with the time at which the last one ended."""

    def __init__(
        self, futures: Sequence[Any], record: SaveRecord, stats: WriteStats, directory: Any
    ):
        self._directory = directory
        self._futures = futures
        self._record = record
        self._stats = stats
        self._has_ended = False

    def result(self, timeout: float | None = None) -> None:
        """Waits for every write; raises what the first failing one raised.

        Raises:
          StorageError: where the storage refused.
        """
        try:
            self.wait(timeout)
            self._stats.checksums.write(getattr(self._directory, "path", self._directory))
        except (OSError, ValueError) as error:  # TensorStore's are the latter
            doing = f"writing {self._directory}"
            raise storage_error(doing, self._directory, error) from error
        finally:
            self._record.write_secs = max(self._record.write_secs, self._stats.write_secs)
            self._record.written_bytes += self._stats.written_bytes
            self._record.written_at = time.perf_counter()

    def wait(self, timeout: float | None) -> None:
        """Likewise; that is all. Also after one has failed: the next save may be in its place."""
        first: Exception | None = None
        for future in self._futures:
            started_at = time.perf_counter()
            try:
                future.result(timeout)
            except Exception as error:
                secs = time.perf_counter() - started_at
                # What the storage has raised may be a `TimeoutError`, too: it comes at once.
                if timeout is not None and isinstance(error, TimeoutError) and secs >= timeout / 2:
                    raise
                first = first or error
        self._has_ended = True
        if first is not None:
            raise first

    @property
    def has_ended(self) -> bool:
        """Whether nothing is being written any more; where nobody has waited for it, is tried."""
        if not self._has_ended:
            with contextlib.suppress(Exception):
                self.wait(_A_MOMENT_SECS)
        return self._has_ended


class Voting(ocp.future.Future):  # type: ignore[misc]
    """An item's writes on all processes; for managers that take no votes at their barriers.

    Args:
      written: The writes of this process.
      processes: Those that save together.
      pending: The save's report, where this is the last that is heard of it; `None` on the process
        that finalizes.
      label: Of the save.
    """

    def __init__(
        self, written: ocp.future.Future, processes: Processes, pending: PendingReport | None,
        label: int,
    ):  # fmt: skip
        self._written = written
        self._processes = processes
        self._pending = pending
        self._label = label

    def result(self, timeout: float | None = None) -> None:
        """Waits for every write of every process; raises what the first failing one raised."""
        _, error = attempted(functools.partial(self._written.result, timeout))
        patience = PATIENCE_SECS if timeout is None else timeout
        agree(self._processes, "written", self._label, error, patience)
        if self._pending is not None:
            self._pending.committed()  # but for merge and rename


class Reported(ocp.future.Future):  # type: ignore[misc]
    """A save's writes, whose failure is put into its report; for managers that do not do that.

    Args:
      written: The writes.
      pending: The save's report.
      give_up: Has nothing more of them be written.
    """

    def __init__(
        self, written: ocp.future.Future, pending: PendingReport, give_up: Callable[[], None]
    ):
        self._written = written
        self._pending = pending
        self._give_up = give_up
        self._is_cancelled = False

    def result(self, timeout: float | None = None) -> None:
        """Waits for every write; raises what the first failing one raised.

        Raises:
          concurrent.futures.CancelledError: if the save was cancelled meanwhile.
        """
        try:
            try:
                self._written.result(timeout)
            finally:
                if self._is_cancelled:
                    raise concurrent.futures.CancelledError
        except BaseException as error:
            self._pending.failed(error)
            raise

    def cancel(self) -> None:
        """What `ocp.AsyncCheckpointer.cancel` asks for: the save does not come to its end."""
        self._is_cancelled = True
        self._give_up()
