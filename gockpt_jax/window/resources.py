"""What the windows and saves of a session share."""

import dataclasses
import weakref

from gockpt_jax.options import WindowOptions
from gockpt_jax.telemetry.save_record import SaveRecord
from gockpt_jax.transfer.replicas import Replicas
from gockpt_jax.window.device_budget import DeviceBudget
from gockpt_jax.window.host_budget import HostBudget
from gockpt_jax.window.processes import Processes
from gockpt_jax.window.worker import Worker


@dataclasses.dataclass(frozen=True, slots=True)
class Resources:
    """Threads and memory, one of each for all windows and saves.

    Attributes:
      worker: Lands what leaves, in the trainer's order; the one behind it replays.
      watcher: Finds out when armed steps have run.
      device: Budget for staged copies and retained values.
      host: Budget for what saves hold on the host.
      replicas: How they share what is taken and written.
    """

    worker: Worker
    watcher: Worker
    device: DeviceBudget
    host: HostBudget
    replicas: Replicas
    _measured: list[weakref.ref[SaveRecord]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, options: WindowOptions, processes: Processes, replicas: Replicas) -> "Resources":
        """Those of a session; its threads start with their first task."""
        return cls(
            worker=Worker(behind=Worker("gockpt-replayer")),
            watcher=Worker("gockpt-steps"),
            device=DeviceBudget(options.device_budget_bytes, processes),
            host=HostBudget(options),
            replicas=replicas,
        )

    def measure_from_now(self, record: SaveRecord) -> None:
        """Measures the peaks of a save that begins; of those under way, what was measured stays."""
        self._measured[:] = [ref for ref in self._measured if ref() is not None]
        for ref in self._measured:
            if (before := ref()) is not None:
                before.measure()
        self.device.reset_peak()
        self.host.reset_peak()
        device, host = self.device, self.host
        record.peaks = lambda: (host.peak_bytes, device.peak_bytes)
        self._measured.append(weakref.ref(record))

    def close(self) -> None:
        """Ends the threads, after what they were given."""
        self.worker.close()
        self.watcher.close()
