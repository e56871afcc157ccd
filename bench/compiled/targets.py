"""Accelerators whose compilers run without them."""

import dataclasses
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
class Target:
    """An accelerator, and what compiles for it.

    Attributes:
      platform: As JAX names it.
      modules: Of which one must be installed.
      packages: To be installed, of the version that fits this jaxlib.
      topology: As JAX names it.
      options: Of the topology.
      environment: That the compiling process needs.
    """

    platform: str
    modules: tuple[str, ...]
    packages: str
    topology: str = ""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def is_installed(self) -> bool:
        """Whether its compiler is."""
        return any(importlib.util.find_spec(name) is not None for name in self.modules)

    def device(self) -> Any:
        """One of the devices, to compile for."""
        jax.local_devices(backend="cpu")  # JAX looks for compilers when its backends start
        return topologies.get_topology_desc(self.topology, self.platform, **self.options).devices[0]


TARGETS: Mapping[str, Target] = {
    "h100": Target(
        "cuda",
        ("jax_cuda13_plugin", "jax_cuda12_plugin"),
        "jax-cuda13-plugin jax-cuda13-pjrt",
        options={"topology": "1x1x1", "target_config": _H100},
        # Kernels are not tried out: there is nothing to try them on.
        environment={"XLA_FLAGS": "--xla_gpu_autotune_level=0"},
    ),
    # Asks no metadata server; and one process at a time may load libtpu, for the TPU's sake.
    "v5e": Target(
        "tpu",
        ("libtpu",),
        "libtpu",
        topology="v5e:2x2",
        environment={"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
    ),
}
