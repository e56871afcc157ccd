"""For users of `orbax.checkpoint.v1`; apart, because importing that takes time and may change."""

from gockpt_jax.storage.saving.checkpointable import GoCkptCheckpointable as GoCkptCheckpointable
