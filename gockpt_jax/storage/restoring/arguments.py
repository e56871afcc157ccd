"""`GoCkptRestore`: what a restore is asked for."""

import dataclasses
from typing import Any

import jax
import orbax.checkpoint as ocp


@dataclasses.dataclass
class GoCkptRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to restore: arguments of `GoCkptManager.restore`, like `ocp.args.StandardRestore`.

    Checkpoint and target are compared before anything is read, and one `TargetError` names all
    leaves that do not fit.

    Attributes:
      item: A tree of arrays or `jax.ShapeDtypeStruct`s to restore into, with their shardings;
        `None`: as it was saved.
      strict: Whether a stored shape other than the target's is an error (or padded, truncated).
      support_layout: Whether to restore into the device layouts of `item`.
      fallback_sharding: Placement of arrays whose stored sharding does not exist here. `None`: the
        first device, where one process runs on CPUs; an error elsewhere.
      partial_restore: Whether to leave out what the target does not name, such as all but the
        parameters.
      cast: Whether a stored dtype other than the target's is converted (or an error; Python's
        numbers take what loses nothing by its kind, such as an integer as a float). Stock's
        arguments always convert.
      single_replica: Whether one replica reads and sends to the others what is replicated over the
        first axis of the mesh, as with `ocp.type_handlers.SingleReplicaArrayRestoreArgs`. It is
        sent as a sum with zeros: -0.0 becomes 0.0, and denormals may, too.
      verify: Whether to re-read the item and compare it with its checksums first.
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: jax.sharding.Sharding | None = None
    partial_restore: bool = False
    cast: bool = False
    single_replica: bool = False
    verify: bool = False
