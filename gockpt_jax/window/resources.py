"""What the windows and saves of a session share."""

import dataclasses

from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.replicas import Replicas
from gockpt_jax.window.host_budget import HostBudget
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
    device: ByteBudget
    host: HostBudget
    replicas: Replicas
