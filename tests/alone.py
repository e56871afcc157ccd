"""Replicas that share nothing: the first takes and writes all."""

from __future__ import annotations

from gockpt_jax.storage.writing.array_layout import ReplicaLayout
from gockpt_jax.transfer.replicas import Replicas

FIRST_ALONE = Replicas(ReplicaLayout(use_replica_parallel=False).write_shape)
