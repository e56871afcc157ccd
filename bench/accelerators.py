"""Accelerators whose compilers run without them."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies

# An H100 SXM, as XLA describes it to itself.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Of one kind of accelerators.

    Attributes:
      platform: As JAX names it.
      modules: Of which one must be installed.
      packages: To be installed, of the version that fits this jaxlib.
      environment: That the compiling process needs.
    """

    platform: str
    modules: tuple[str, ...]
    packages: str
    environment: Mapping[str, str]

    def is_installed(self) -> bool:
        """Whether it can be used here."""
        return any(importlib.util.find_spec(name) is not None for name in self.modules)


_OF_GPUS = Compiler(
    "cuda",
    ("jax_cuda13_plugin", "jax_cuda12_plugin"),
    "jax-cuda13-plugin jax-cuda13-pjrt",
    # Kernels are not tried out: there is nothing to try them on.
    {"XLA_FLAGS": "--xla_gpu_autotune_level=0"},
)
_OF_TPUS = Compiler(
    "tpu",
    ("libtpu",),
    "jax[tpu]",
    # Asks no metadata server; and libtpu lets one process at a time load it, for the TPU's sake.
    {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
)


def compiler_of(topology: str) -> Compiler:
    """What compiles for a topology: `h100:4`, that many GPUs of one host; `v5e:4x4`, of TPUs."""
    return _OF_GPUS if topology.startswith("h100:") else _OF_TPUS


def compiler_versions() -> list[str]:
    """Of the compilers that are installed, as notes of a record."""
    found = []
    for name in ("libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}.")
    return found


def devices_of(topology: str) -> list[Any]:
    """Its devices, to compile for; none of them is here.

    Raises:
      Exception: JAX's, if its compiler is not installed, or there is no such topology.
    """
    jax.local_devices(backend="cpu")  # JAX looks for compilers when its backends start
    if compiler_of(topology) is _OF_TPUS:
        return list(topologies.get_topology_desc(topology, "tpu").devices)
    count = topology.partition(":")[2]
    options = {"topology": f"1x1x{count}", "target_config": _H100}
    return list(topologies.get_topology_desc("", "cuda", **options).devices)
