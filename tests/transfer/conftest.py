"""What tests of transfers share."""

from __future__ import annotations

import collections

import pytest

from gockpt_jax.transfer import pull


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> collections.Counter:
    """The bytes that each device has sent so far."""
    found: collections.Counter = collections.Counter()

    def start_buffer(buffer):
        found.update({next(iter(buffer.devices())): buffer.nbytes})
        return buffer

    monkeypatch.setattr(pull, "start_buffer", start_buffer)
    return found
