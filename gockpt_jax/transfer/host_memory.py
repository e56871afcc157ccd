"""How much memory the host has left: the container's limit, not the machine's size."""

from pathlib import Path

from gockpt_jax.transfer.mounts import file_system

_TMPFS = ("tmpfs", "ramfs")


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
    found = [_available(root), *(_below_limit(group) for group in _groups(root))]
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


def _groups(root: Path) -> list[Path]:
    """The memory control groups of this process, up to the topmost that can be seen."""
    groups = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        # In a container the path may be that of the host, and only the top is there.
        parts = Path(path.strip("/")).parts
        groups += [base.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]
    return groups


def _below_limit(group: Path) -> int | None:
    """Bytes between a group's limit and what it has taken."""
    for limit_name, used_name, idle_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number(group / limit_name)
        used = None if limit is None else _number(group / used_name)
        if limit is not None and used is not None:
            stat = dict(line.split(" ", 1) for line in _lines(group / "memory.stat"))
            return limit - used + int(stat.get(idle_name, 0))
    return None


def _number(path: Path) -> int | None:
    """The number in a file; `None` for "max", and where there is no such file."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
