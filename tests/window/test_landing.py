"""Landing: rows become the shards that are written, however those lie."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gockpt_jax.transfer.chunks import Chunk, Source, row_ranges
from gockpt_jax.transfer.pull import HostChunk, owned_shards
from gockpt_jax.window.landing import Landing

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
    source, landing = Source.of(array), Landing()
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
