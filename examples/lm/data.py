"""The corpus: the Python standard library of the machine this runs on, as raw bytes."""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np

# What distributions add or leave out; the rest is the same wherever the Python version is.
SKIPPED = {"site-packages", "dist-packages", "test", "tests"}
SEPARATOR = b"\0"  # Never occurs in source code, so the model sees where a file ends.


def load_corpus() -> np.ndarray:
    """Read every module of the standard library, in a fixed order, into one uint8 array."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if SKIPPED.isdisjoint(path.relative_to(root).parts)
    ]
    if not files:
        raise FileNotFoundError(f"no Python source files under `{root}` (a zipped library?)")
    return np.frombuffer(SEPARATOR.join(path.read_bytes() for path in files), np.uint8)


def fingerprint(corpus: np.ndarray) -> str:
    """Return a short digest: a resumed run must read the same bytes."""
    return hashlib.sha256(corpus.data).hexdigest()[:16]


def batch(corpus: np.ndarray, *, seed: int, step: int, size: int, length: int) -> np.ndarray:
    """Return `size` random excerpts of `length + 1` bytes, `[size, length + 1]` uint8.

    A pure function of `(seed, step)`: a resumed run sees the batches that the lost one would have
    seen, and there is no iterator whose state must be saved.
    """
    starts = np.random.default_rng((seed, step)).integers(len(corpus) - length, size=size)
    return corpus[starts[:, None] + np.arange(length + 1)]
