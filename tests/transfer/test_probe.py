"""Probes: a copy that nobody donates, of what can be copied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gockpt_jax.transfer.probe import probe

HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 3)], ids=str)
def test_a_probe_is_a_buffer_of_its_own(shape):
    """A later step may donate what it is copied from."""
    array = jnp.full(shape, 3.0)
    copied = probe([array])
    assert copied.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
    array.delete()
    np.testing.assert_array_equal(copied, np.full((1,) * len(shape), 3.0))


def test_what_cannot_be_copied_is_left_out():
    kept, gone = jnp.arange(5.0), jnp.zeros(3)
    gone.delete()
    others = [
        jax.random.key(0), jnp.zeros(2, "int4"), jnp.zeros(0), jax.device_put(jnp.ones(2), HOST),
        np.zeros(1), None,
    ]  # fmt: skip
    assert probe(others) is None
    assert probe([*others, kept]).tolist() == [0]
    assert probe([*others, gone]) is None
