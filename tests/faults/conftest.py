"""What all subprocesses of the tests here share: compiled programs."""

import os
from pathlib import Path

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
