"""What Orbax waits for before it commits a save: an item's writes, here and on all processes."""

import time
from collections.abc import Sequence
from typing import Any

import orbax.checkpoint as ocp

from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.saving.commit import agree
from gockpt_jax.storage.writing.write_budget import WriteStats
from gockpt_jax.telemetry.save_record import PendingReport, SaveRecord
from gockpt_jax.window.processes import PATIENCE_SECS, Processes


class Written(ocp.future.Future):  # type: ignore[misc]
    """All of an item's writes and their checksums, with the time at which the last one ended."""

    def __init__(
        self, futures: Sequence[Any], record: SaveRecord, stats: WriteStats, directory: Any
    ):
        self._directory = directory
        self._futures = futures
        self._record = record
        self._stats = stats

    def result(self, timeout: float | None = None) -> None:
        """Waits for every write; raises what the first failing one raised.

        Raises:
          StorageError: where the storage refused.
        """
        try:
            for future in self._futures:
                future.result(timeout)
            self._stats.checksums.write(getattr(self._directory, "path", self._directory))
        except (OSError, ValueError) as error:  # TensorStore's are the latter
            doing = f"writing {self._directory}"
            raise bucket.storage_error(doing, self._directory, error) from error
        finally:
            self._record.write_secs = max(self._record.write_secs, self._stats.write_secs)
            self._record.written_bytes += self._stats.written_bytes
            self._record.written_at = time.perf_counter()


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
        error: Exception | None = None
        try:
            self._written.result(timeout)
        except Exception as failed:
            error = failed
        patience = PATIENCE_SECS if timeout is None else timeout
        agree(self._processes, "written", self._label, error, patience)
        if self._pending is not None:
            self._pending.committed()  # but for merge and rename


class Reported(ocp.future.Future):  # type: ignore[misc]
    """A save's writes, whose failure is put into its report; for managers that do not do that."""

    def __init__(self, written: ocp.future.Future, pending: PendingReport):
        self._written = written
        self._pending = pending

    def result(self, timeout: float | None = None) -> None:
        """Waits for every write; raises what the first failing one raised."""
        try:
            self._written.result(timeout)
        except BaseException as error:
            self._pending.failed(error)
            raise
