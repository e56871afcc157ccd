"""Replicas that share nothing: the first takes and writes all."""

from __future__ import annotations

import jax

from gockpt_jax.storage.writing.array_layout import ReplicaLayout
from gockpt_jax.transfer.replicas import Replicas

FIRST_ALONE = Replicas(ReplicaLayout(use_replica_parallel=False).write_shape)


def owned_shards(array: jax.Array) -> list[jax.Shard]:
    """What a process writes of an array then, as JAX tells replicas apart."""
    return [s for s in array.addressable_shards if s.replica_id == 0]
