"""What all tests here share: compiled programs, among the workers and with the subprocesses."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JAX's persistent compilation cache, one for all pytest-xdist workers of this run."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return shared / "compilation_cache"


@pytest.fixture(autouse=True, scope="module")
def _compile_once(cache: Path) -> Iterator[None]:
    """Every manager traces its step anew, and nearly every test here makes one."""
    settings = {
        "jax_compilation_cache_dir": str(cache),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
