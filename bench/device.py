"""The device that a benchmark runs on: what JAX is told of it before it starts its backends."""

import os
import shutil
from collections.abc import Mapping, MutableMapping
from pathlib import Path

import jax

DEVICE_MEMORY = 0.92
"""The part of a GPU's memory that training takes: what there is. JAX's own default is 0.75."""


def use_device(part: float, environment: MutableMapping[str, str] = os.environ) -> bool:
    """Has JAX run on a GPU of NVIDIA's; without one, on a CPU that stands in for it.

    Args:
      part: Of a GPU's memory that JAX takes, unless the user has said another.
      environment: Of the process that JAX will run in.

    Returns:
      Whether it is a GPU. If JAX cannot start it, that is an error: no CPU is measured instead.
    """
    if not has_nvidia(environment):
        without_fma(environment)
        return False
    if environment.get("JAX_PLATFORMS", "cuda") in ("cuda", "gpu"):
        # Replay needs the CPU backend. Unset, JAX would go on without a GPU that fails.
        environment["JAX_PLATFORMS"] = "cuda,cpu"
    if environment is os.environ:  # which JAX has read by now
        jax.config.update("jax_platforms", environment["JAX_PLATFORMS"])
    use_device_memory(part, environment, unless_said=True)
    return True


def has_nvidia(environment: Mapping[str, str]) -> bool:
    """Whether there is a GPU of NVIDIA's for JAX to run on, without starting JAX."""
    if environment.get("JAX_PLATFORMS") == "cpu":
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def use_device_memory(
    part: float, environment: MutableMapping[str, str] = os.environ, *, unless_said: bool = False
) -> None:
    """Says how much of a GPU's memory JAX takes; before it starts its backends.

    JAX refuses to start if the variable is set under its old name, too.

    Args:
      part: Of the memory, at most 1.
      environment: Of the process that JAX will run in.
      unless_said: Whether the user's own choice stands.
    """
    said = environment.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
    if unless_said and (said or "XLA_CLIENT_MEM_FRACTION" in environment):
        environment.setdefault("XLA_CLIENT_MEM_FRACTION", said or "")
    else:
        environment["XLA_CLIENT_MEM_FRACTION"] = f"{part:g}"


def without_fma(environment: MutableMapping[str, str] = os.environ) -> None:
    """Has the CPU backend fuse no multiplication with an addition; before JAX starts its backends.

    So a CPU stands in for an accelerator. With it exact replay is impossible, and no window opens.
    """
    flags = environment.get("XLA_FLAGS", "")
    if "xla_cpu_max_isa" not in flags:
        environment["XLA_FLAGS"] = f"{flags} --xla_cpu_max_isa=AVX".strip()
