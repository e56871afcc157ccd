"""Where arrays shall lie of which a target does not say it: there where they lay."""

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from gockpt_jax.errors import TargetError


def metadata_of(directory: Any, options: Mapping[str, Any]) -> Any:
    """Orbax's metadata of a stored tree: shapes, dtypes and shardings.

    Args:
      directory: The item's.
      options: Of `ocp.PyTreeCheckpointHandler`.
    """
    with contextlib.closing(ocp.PyTreeCheckpointHandler(**options)) as handler:
        return handler.metadata(epath.Path(directory))


def shardings_of(
    directory: Any,
    target: Any,
    fallback: jax.sharding.Sharding | None,
    options: Mapping[str, Any],
    *,
    layouts: bool = False,
) -> Any:
    """Where all leaves shall lie, as stock's standard handler finds it.

    What has none stock's tree handler reads as NumPy arrays, of whatever shape they have.

    Args:
      directory: The item's.
      target: A tree of arrays or `ShapeDtypeStruct`s, or the stored one's metadata.
      fallback: For what lay on devices that are not here; `None`: an error.
      options: Of `ocp.PyTreeCheckpointHandler`.
      layouts: Whether the target says how, too.

    Returns:
      A tree like the target, with `Format`s of what has a layout; `None` for what is on no device.

    Raises:
      TargetError: A leaf lay on devices that are not here.
    """
    stored: dict[str, Any] = {}
    if any(map(lies_nowhere, jax.tree.leaves(target))):
        stored = ocp.tree.to_flat_dict(metadata_of(directory, options).tree, sep=".")

    def place(leaf: Any, name: str) -> Any:
        told = stored.get(name) if lies_nowhere(leaf) else leaf
        sharding = getattr(told, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding | None):
            form = getattr(told, "format", None) if layouts and sharding is not None else None
            return sharding if form is None or form.layout is None else form
        try:
            return sharding.to_jax_sharding()
        except ValueError as error:
            if fallback is None:
                raise TargetError(
                    f"{name}: it lay on devices that are not here, and no target says where it "
                    "shall lie. Pass `ShapeDtypeStruct`s with shardings, or `fallback_sharding`."
                ) from error
            return fallback

    names = ocp.tree.get_param_names(target, include_empty_nodes=False)
    return jax.tree.map(place, target, names)


def lies_nowhere(leaf: Any) -> bool:
    """Whether it is an abstract array of which the target does not say where it shall lie."""
    return isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None


def stand_in_sharding() -> jax.sharding.Sharding | None:
    """Where arrays go whose devices do not exist here: the host's memory, where that is all."""
    if jax.process_count() == 1 and jax.default_backend() == "cpu":
        return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return None
