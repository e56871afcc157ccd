"""How much memory the host has left: the container's limit, not the machine's size."""

from pathlib import Path

from gockpt_jax.transfer.mounts import file_system

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


def is_in_memory(directory: str | Path, root: Path = Path("/")) -> bool:
    """Whether a directory is a tier in memory: what is written there is taken from the host's."""
    return file_system(directory, root) in _TMPFS


def _available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(root: Path) -> list[tuple[Path, _Names]]:
    """The memory control groups of this process, up to the topmost that can be seen."""
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
        groups += [(base.joinpath(*parts[:n]), names) for n in range(len(parts), -1, -1)]
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
