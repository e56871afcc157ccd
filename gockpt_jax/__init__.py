"""Checkpoints JAX training over several steps, with almost no stall, on top of Orbax.

The public names. Start at `GoCkptManager`.
"""

from gockpt_jax.errors import AuditError as AuditError
from gockpt_jax.errors import DeviceMemoryError as DeviceMemoryError
from gockpt_jax.errors import HostBudgetError as HostBudgetError
from gockpt_jax.errors import NoCheckpointError as NoCheckpointError
from gockpt_jax.errors import ProcessError as ProcessError
from gockpt_jax.errors import ReplayError as ReplayError
from gockpt_jax.errors import SaveFailedWarning as SaveFailedWarning
from gockpt_jax.errors import SnapshotOnlyWarning as SnapshotOnlyWarning
from gockpt_jax.errors import StepMismatchError as StepMismatchError
from gockpt_jax.errors import StorageError as StorageError
from gockpt_jax.errors import TargetError as TargetError
from gockpt_jax.errors import VerifyError as VerifyError
from gockpt_jax.errors import WrapError as WrapError
from gockpt_jax.manager import GoCkptManager as GoCkptManager
from gockpt_jax.options import Audit as Audit
from gockpt_jax.options import WindowOptions as WindowOptions
from gockpt_jax.storage.restoring.arguments import GoCkptRestore as GoCkptRestore
from gockpt_jax.storage.saving.handler import GoCkptHandler as GoCkptHandler
from gockpt_jax.storage.saving.handler import GoCkptSave as GoCkptSave
from gockpt_jax.telemetry.report import SaveReport as SaveReport
from gockpt_jax.training.jit import jit as jit
from gockpt_jax.training.markers import GoCkptState as GoCkptState
from gockpt_jax.training.markers import retain as retain

__version__ = "0.1.0"
