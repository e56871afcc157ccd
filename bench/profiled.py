"""JAX's profiler, as benchmarks have it watch a piece of a run."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax


@contextlib.contextmanager
def profiled(kept: Path) -> Iterator[None]:
    """Has what runs meanwhile profiled, without Python's own calls.

    Args:
      kept: Where the profile is left (`.xplane.pb`).
    """
    with tempfile.TemporaryDirectory() as scratch:
        watched = jax.profiler.ProfileOptions()
        watched.python_tracer_level = 0
        jax.profiler.start_trace(scratch, profiler_options=watched)
        try:
            yield
        finally:
            jax.profiler.stop_trace()
            kept.parent.mkdir(parents=True, exist_ok=True)
            for file in Path(scratch).rglob("*.xplane.pb"):
                shutil.copy(file, kept)
