"""What all tests here share: compiled programs, among the tests and among the subprocesses."""

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JAX's persistent compilation cache, one for all subprocesses of this run.

    A killed one may leave half an entry. Another then warns and compiles; this process, in which
    warnings are errors, has a cache of its own.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return shared / "compilation_cache"


@pytest.fixture(autouse=True, scope="module")
def _compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every manager traces its step anew, and nearly every test here makes one."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "own_cache"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
