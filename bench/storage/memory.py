"""How much memory saving, restoring and verifying take, each in a fresh process."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.record import ROOT, peak_memory
from bench.storage.contenders import (
    OURS,
    forget,
    give_back,
    our_restore,
    our_save,
    random_state,
)
from gockpt_jax.storage.inspecting.verify import verify_item


def extra_rss_ratio(what: str, layout: str, folder: Path, nbytes: int, limit_bytes: int) -> float:
    """The growth of a fresh process, over the byte limit.

    Args:
      what: `save`, `restore` (less the arrays themselves) or `verify`.
      layout: One of `OURS`.
      folder: Where to save.
      nbytes: Of the state: two equal leaves for `save`, sixteen else.
      limit_bytes: Of the bytes in flight; chunks are a quarter of it.
    """
    with tempfile.TemporaryDirectory(dir=folder) as target:
        words = [what, layout, target, str(nbytes), str(limit_bytes)]
        command = [sys.executable, "-m", "bench.storage.memory", *words]
        child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if child.returncode:
        raise RuntimeError(f"{what} of {layout} failed: {child.stderr}")
    return float(json.loads(child.stdout.splitlines()[-1])) / limit_bytes


def extra_rss(what: str, layout: str, target: Path, nbytes: int, limit_bytes: int) -> int:
    """By how many bytes this process grows; an earlier run warms it up."""
    leaves = 2 if what == "save" else 16
    state = random_state(leaves, nbytes // leaves)
    options = OURS[layout] | {
        "write_limit_bytes": limit_bytes,
        "chunk_byte_size": limit_bytes // 4,
    }
    first = target / "first"
    our_save(first, state, options)
    runs: dict[str, Callable[[], None]] = {
        "save": lambda: our_save(target / "second", state, options),
        "restore": lambda: our_restore(first, state, restore_concurrent_gb=limit_bytes / 1e9),
        "verify": lambda: verify_item(first, limit_bytes=limit_bytes).require_whole(),
    }
    if what != "save":
        runs[what]()
    forget(first)
    # What was done before must not hide what this takes.
    give_back()
    with peak_memory() as grown:
        runs[what]()
        return max(0, grown() - (nbytes if what == "restore" else 0))


if __name__ == "__main__":
    kind, name, where, state_bytes, limit = sys.argv[1:]
    print(extra_rss(kind, name, Path(where), int(state_bytes), int(limit)))
