"""What the storage tests share: a state with every kind of leaf, and a look at the disk."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gockpt_jax.promise import Promise
from gockpt_jax.storage.writing.host_array import HostArray, HostShard

WAIT_SECS = 200  # only ends a test that hangs


def mesh(*sizes, names=("data", "model")):
    return Mesh(np.array(jax.devices()).reshape(sizes), names)


def example_state(seed=0):
    """Every dtype, sharding and kind of leaf that a training state may have."""
    rng = np.random.default_rng(seed)
    m = mesh(4, 2)

    def put(value, *spec):
        return jax.device_put(value, NamedSharding(m, PartitionSpec(*spec)))

    weights = rng.standard_normal((16, 24)).astype(np.float32)
    return {
        "replicated": put(weights),
        "fsdp": put(weights, "data"),
        "tensor": put(weights, None, "model"),
        "mixed": put(weights, "model", "data"),
        "both": put(weights, ("data", "model")),
        "bf16": put(jnp.asarray(weights, jnp.bfloat16), "data", "model"),
        "zeros": put(jnp.zeros((8, 4), jnp.float32), "data"),
        "int": put(rng.integers(-9, 9, (3, 8)).astype(np.int32), None, "data"),
        "bool": put(weights[0] > 0, "model"),
        "odd": put(rng.standard_normal((5, 3)).astype(np.float32)),
        "one": put(jnp.ones((1,))),
        "count": put(jnp.int32(7)),
        "single": jax.device_put(weights, SingleDeviceSharding(jax.devices()[3])),
        "raw_key": put(jax.random.PRNGKey(3)),
        "key": put(jax.random.key(4)),
        "keys": put(jax.random.split(jax.random.key(5, impl="rbg"), (8, 2)), "data"),
        "numpy": rng.standard_normal((4, 4)),
        "scalars": [3, 2.5, np.float32(1.5)],
        "text": "of a state",
        "nothing": None,
        "opt": (optax.EmptyState(), {}, optax.ScaleByScheduleState(count=put(jnp.int32(2)))),
    }


def resolved(index, data):
    """A shard whose bytes are there already."""
    promise = Promise()
    promise.set_result(data)
    return HostShard(index, promise)


def host_array(array, make_shard=resolved):
    """The `HostArray` of an array."""
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(array) if is_key else array
    shards = [
        make_shard(shard.index, np.array(shard.data))
        for shard in data.addressable_shards
        if shard.replica_id == 0
    ]
    return HostArray.like(array, shards)


def host_tree(tree, make_shard=resolved):
    return jax.tree.map(
        lambda x: host_array(x, make_shard) if isinstance(x, jax.Array) else x, tree
    )


def save(handler, path, tree, **args):
    """An asynchronous save that is waited for."""
    with ocp.AsyncCheckpointer(handler) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree, **args))
        checkpointer.wait_until_finished()


def kvstore_items(folder):
    spec = {"driver": "ocdbt", "base": f"file://{folder}/"}
    store = ts.KvStore.open(spec).result()
    return {key: store.read(key).result().value for key in store.list().result()}


def disk_contents(path):
    """All that stock reads: files with their bytes, and keys with values where there is OCDBT.

    OCDBT's own files have random names and hold times, so only the names of its manifests count,
    and of a database in another not even those: what it has is in the other's, too.
    `_CHECKPOINT_METADATA` holds times too, and `commit_success.txt` the path.
    """
    path = pathlib.Path(path)
    contents = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        name = file.relative_to(path).as_posix()
        if "/direct/" in name:
            continue
        if file.name == "manifest.ocdbt":
            contents[name] = kvstore_items(file.parent)
        elif file.parent.name != "d":
            varies = name in ("_CHECKPOINT_METADATA", "commit_success.txt")
            contents[name] = b"" if varies else file.read_bytes()
    return contents


def assert_same_arrays(restored, expected):
    """Bit-identical leaves, typed keys included."""

    def check(got, want):
        if isinstance(want, jax.Array) and jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            assert got.dtype == want.dtype
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        if isinstance(want, str):
            assert got == want
            return
        got, want = np.asarray(got), np.asarray(want)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert got.tobytes() == want.tobytes()

    jax.tree.map(check, restored, expected)
