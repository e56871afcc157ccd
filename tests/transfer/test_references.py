"""Why everything is staged (docs/decisions/0022): what JAX 0.10 and 0.11 do with references.

If one of these fails after an update of JAX, the decision is to be looked at again.
"""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from gockpt_jax.transfer.staging import stage

SIZE = 4096
MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
PLACES = {
    "one device": SingleDeviceSharding(jax.devices()[0]),
    "sharded": NamedSharding(MESH, PartitionSpec("x")),
}
every_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
donating = jax.jit(lambda x: x + 1, donate_argnums=0)


@every_place
def test_arrays_made_of_the_same_buffers_end_with_them(place):
    """So nothing that we could make of a user's array outlives a donation of it."""
    array = jax.device_put(np.arange(SIZE, dtype=np.float32), place)
    shards = [s.data for s in array.addressable_shards]
    others = [jax.make_array_from_single_device_arrays(array.shape, place, shards), *shards]
    donating(array)
    assert all(other.is_deleted() for other in others)
    with pytest.raises(RuntimeError, match="has been deleted"):
        np.asarray(others[0])


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="there it is one of its own")
def test_a_shard_of_one_device_is_the_users_own_array():
    """So what `copy_to_host_async` caches stays with the user's array."""
    array = jnp.arange(SIZE)
    assert array.addressable_shards[0].data is array


def test_a_view_of_the_users_buffer_stops_donation():
    """On the CPU backend the step copies instead, and takes more memory than without us."""
    array = jnp.arange(SIZE, dtype=jnp.float32)
    view = np.asarray(array)
    buffer = array.unsafe_buffer_pointer()
    new = donating(array)
    assert new.unsafe_buffer_pointer() != buffer
    assert view[3] == 3


@pytest.mark.usefixtures("its_own_garbage")
@every_place
@pytest.mark.parametrize("frozen", [True, False])
def test_a_reference_holds_as_much_as_a_copy(place, frozen):
    """Of steps that donate nothing: even a leaf that they return as it is is a new array."""

    def step(state):
        return {"frozen": state["frozen"], "w": state["w"] + 1}

    step, leaf = jax.jit(step), "frozen" if frozen else "w"

    def bytes_held_by(take):
        state = {
            k: jax.device_put(np.ones(SIZE, np.float32), place) for k in ("frozen", "w")
        }  # fmt: skip
        state = step(state)
        taken = take(state[leaf])
        for _ in range(2):
            state = step(state)
        jax.block_until_ready((state, taken))
        with_it = live_bytes()
        del taken
        return with_it - live_bytes()

    assert bytes_held_by(lambda x: x) == bytes_held_by(lambda x: stage([x])) == SIZE * 4


def live_bytes():
    """Of distinct buffers: arrays and their shards are listed both."""
    gc.collect()
    shards = [s.data for x in jax.live_arrays() for s in x.addressable_shards]
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in shards}.values())


def test_what_the_host_holds_is_copied_there():
    place = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    array = jax.device_put(np.arange(SIZE, dtype=np.float32), place)
    (copy,) = stage([array])
    assert copy.sharding == place
    assert copy.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
    array.delete()
    np.testing.assert_array_equal(copy, np.arange(SIZE))


def test_what_pmap_returned_is_copied_where_it_lies():
    """In jax 0.7 such arrays lie as no program that was compiled ahead takes them."""
    arrays = jax.pmap(lambda n: (n * jnp.ones(3), jax.random.key(n)))(jnp.arange(8))
    for array, copy in zip(arrays, stage(arrays), strict=True):
        plain = array if array.ndim == 2 else jax.random.key_data(array)
        assert copy.sharding.is_equivalent_to(plain.sharding, plain.ndim)
        for old, new in zip(plain.addressable_shards, copy.addressable_shards, strict=True):
            assert old.data.unsafe_buffer_pointer() != new.data.unsafe_buffer_pointer()
        np.testing.assert_array_equal(copy, plain)
