"""Little is computed here and much compiled, so compilations are made cheap."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def fast_compilation() -> Iterator[None]:
    """Halves the time; `tests/invariants` runs programs as users compile them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
