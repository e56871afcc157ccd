"""How much memory the host has left, by the container's limit, and how much XLA may pin."""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gockpt_jax.transfer.mounts import file_system

GPUS = ("gpu", "cuda", "rocm")
"""Names of JAX's platforms whose devices are GPUs."""

PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The environment variable that says how many GiB XLA may pin for each GPU."""

_PINNED_AT_ONCE = "XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE"
_PINNED_GIB = {False: 64, True: 16}  # without the limit; by whether all of it is pinned at once

_TMPFS = ("tmpfs", "ramfs")

# The files of a control group, by version: its limit, what is taken, and of what that is; in the
# last, the name of file pages that can be dropped.
_VERSION_1 = (
    "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file ",
)  # fmt: skip
_VERSION_2 = ("memory.max", "memory.current", "memory.stat", "inactive_file ")
_Names = tuple[str, str, str, str]


def host_headroom_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still take before something is killed.

    The least of what the kernel calls available and of what every control group above this process
    leaves below its limit, v1 or v2. File pages that the kernel can drop do not count as taken;
    those of a tmpfs do, since nothing can drop them.

    Args:
      root: Where `proc` and `sys` are, for tests.

    Returns:
      The bytes; `None` where the system tells nothing (not Linux).
    """
    found = [_available(root), *(_below_limit(*group) for group in _groups(root))]
    known = [num_bytes for num_bytes in found if num_bytes is not None]
    return max(0, min(known)) if known else None


@dataclasses.dataclass(frozen=True, slots=True)
class PinnedPool:
    """The pinned memory through which GPUs transfer: XLA has a pool for each, with a limit.

    Attributes:
      devices: How many GPUs there are.
      gib: What the pool of each may take, in GiB.

    Example:
      >>> PinnedPool(devices=2, gib=64).gib_for(200 * 10**9)
      103
    """

    devices: int
    gib: int

    @property
    def limit_bytes(self) -> int:
        """Of all pools together."""
        return self.devices * self.gib * 2**30

    def gib_for(self, num_bytes: int) -> int:
        """What each pool would have to take for so many bytes in all, and a tenth, in GiB."""
        return -(-num_bytes * 11 // (10 * self.devices * 2**30))


def pinned_pool(
    devices: Iterable[Any], environ: Mapping[str, str] = os.environ
) -> PinnedPool | None:
    """The pool of pinned memory of some devices; `None` if none of them has one.

    As XLA reads its environment (`GetGpuHostAllocator` in `xla/pjrt/gpu/gpu_helpers.cc`).

    Args:
      devices: Of this process.
      environ: The environment.
    """
    number = sum(device.platform in GPUS for device in devices)
    if not number:
        return None
    said = environ.get(PINNED_LIMIT, "")
    at_once = environ.get(_PINNED_AT_ONCE, "").lower() in ("1", "true")
    return PinnedPool(number, int(said) if said.isdigit() else _PINNED_GIB[at_once])


def is_in_memory(directory: str | Path, root: Path = Path("/")) -> bool:
    """Whether a directory is a tier in memory: what is written there is taken from the host's."""
    return file_system(directory, root) in _TMPFS


def _available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(root: Path) -> list[tuple[Path, _Names]]:
    """The memory control groups of this process, from the topmost that can be seen."""
    groups = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", _VERSION_2
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", _VERSION_1
        else:
            continue
        # In a container the path may be that of the host, and only the top is there.
        parts = Path(path.strip("/")).parts
        groups += [(base.joinpath(*parts[:n]), names) for n in range(len(parts) + 1)]
    return groups


def _below_limit(group: Path, names: _Names) -> int | None:
    """Bytes between a group's limit and what it has taken; `None` if there is none ("max")."""
    of_limit, of_used, of_what, idle = names
    limit, used = ("".join(_lines(group / name)).strip() for name in (of_limit, of_used))
    if not (limit.isdigit() and used.isdigit()):
        return None
    told = (line for line in _lines(group / of_what) if line.startswith(idle))
    return int(limit) - int(used) + int(next(told, "0").split()[-1])


def _lines(path: Path) -> list[str]:
    """Of a file of the kernel's: asked before every window, so without what is for other files."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall().decode().splitlines()
    except OSError:
        return []
