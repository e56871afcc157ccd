"""What has landed: rows become the shards that are written, however those lie."""

from __future__ import annotations

import contextlib
import weakref

import jax
import numpy as np
import pytest
from alone import owned_shards
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gockpt_jax.transfer.chunks import Chunk, Source, row_ranges
from gockpt_jax.transfer.pull import HostChunk
from gockpt_jax.window.landed import LandedLeaf
from gockpt_jax.window.landing import landing_task

MESH = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
VALUES = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)


def stored(array):
    return jax.random.key_data(array) if Source.of(array).is_key else array


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", ["numbers", "keys"])
@pytest.mark.parametrize(
    "wanted", [P("a", "b"), P(("a", "b")), P("b", "a"), P(None, "b"), P("a"), P()], ids=str
)
def test_shards_are_cut_anew_where_they_lie_otherwise(wanted, kind, parts):
    values = VALUES if kind == "numbers" else jax.random.split(jax.random.key(1), VALUES.shape)
    array = jax.device_put(values, NamedSharding(MESH, P("a", "b")))
    source, landing = Source.of(array), LandedLeaf()
    for start, stop in row_ranges(source.shard_shape, parts):
        assert not landing.is_complete
        rows = [
            HostChunk(s.index, np.array(s.data).reshape(-1)[start:stop])
            for s in owned_shards(stored(array))
        ]
        landing.put(Chunk(source, start, stop), rows)
    boxes = [
        s.index for s in owned_shards(stored(jax.device_put(array, NamedSharding(MESH, wanted))))
    ]
    found = landing.chunks(boxes)
    assert [chunk.index for chunk in found] == boxes
    for chunk in found:
        np.testing.assert_array_equal(chunk.data, np.array(stored(array))[chunk.index])
    is_same = [np.shares_memory(a.data, b) for a, b in zip(found, landing.flat, strict=False)]
    assert all(is_same) == (wanted == P("a", "b")), "only what lies otherwise is copied"
    backwards = landing.chunks(boxes[::-1])
    assert [chunk.index for chunk in backwards] == boxes[::-1]
    for one, other in zip(backwards[::-1], found, strict=True):
        np.testing.assert_array_equal(one.data, other.data)


def test_rows_do_not_land_twice():
    source, landing = Source.of(array := jax.numpy.arange(6.0)), LandedLeaf()
    index = array.addressable_shards[0].index
    landing.put(Chunk(source, 0, 4), [HostChunk(index, np.zeros(4, np.float32))])
    with pytest.raises(AssertionError, match="landed twice"):
        landing.put(Chunk(source, 1, 5), [HostChunk(index, np.zeros(4, np.float32))])


class Copy:
    """On the device, until nobody has it any more."""


class OnItsWay:
    """What happens as a copy lands."""

    def __init__(self, error=None):
        copy, self.happened = Copy(), []
        self.copy = weakref.ref(copy)

        def pull(copy=copy):
            if error is not None:
                raise error
            return "landed"

        self.task, self.failed = landing_task(
            pull,
            self.happened.append,
            lambda: self.happened.append(f"free: {self.copy() is None}"),
            lambda error: self.happened.append(("heeded", error)),
            lambda error: self.happened.append(("told", error)),
        )


def test_a_copy_is_free_before_it_is_taken_in():
    on_its_way = OnItsWay()
    on_its_way.task()
    assert on_its_way.happened == ["free: True", "landed"]


def test_a_copy_that_did_not_land_is_free_before_anybody_hears_of_it():
    """Its traceback would hold it."""
    error = MemoryError()
    on_its_way = OnItsWay(error)
    try:
        on_its_way.task()
    except MemoryError as caught:
        on_its_way.failed(caught)
    assert on_its_way.happened == ["free: True", ("heeded", error), ("told", error)]


def test_a_copy_that_nobody_waited_for_is_free():
    on_its_way, error = OnItsWay(), MemoryError()
    on_its_way.failed(error)
    assert on_its_way.happened == ["free: True", ("heeded", error), ("told", error)]


def test_an_error_is_told_though_it_cannot_be_heeded():
    told, error = [], MemoryError()

    def cannot(error):
        raise RuntimeError

    _, failed = landing_task(lambda: None, print, lambda: None, cannot, told.append)
    with contextlib.suppress(RuntimeError):
        failed(error)
    assert told == [error]
