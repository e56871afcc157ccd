"""An item of a checkpoint as it lies on disk: its leaves, its layout, and how to read them.

Knows what stock Orbax writes (`_METADATA`, zarr v2 or v3, plain files or OCDBT), and needs no
devices and no shardings for it, so any host can look at any checkpoint.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import tensorstore as ts
from etils import epath

from gockpt_jax.errors import in_a_line, without_specs
from gockpt_jax.storage.files import bucket, grid
from gockpt_jax.storage.files.plain_array import PlainArray, PlainArrays
from gockpt_jax.transfer.budget import ByteBudget

METADATA_FILE = "_METADATA"
ARRAY_TYPES = frozenset({"jax.Array", "np.ndarray", "scalar"})
_STRINGS_FILE = "_strings.json"

READ_LIMIT_BYTES = 256 * 2**20
READ_THREADS = 8

_T = TypeVar("_T")
_Out = TypeVar("_Out")


class StoredItemError(ValueError):
    """A directory does not hold the metadata of a tree that Orbax has saved, or not whole."""


class StoredLeafError(ValueError):
    """A leaf cannot be read: what is stored of it is missing or damaged."""


@contextlib.contextmanager
def telling_of(name: str, what: str) -> Iterator[None]:
    """Says of which leaf an error of TensorStore's is, without a page of its specification."""
    try:
        yield
    except Exception as error:
        raise StoredLeafError(f"`{name}` cannot be {what}: {without_specs(error)}") from error


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """One leaf, as the item's metadata tells of it.

    Attributes:
      path: Its keys from the root of the tree.
      value_type: Orbax's name of its type: `jax.Array`, `np.ndarray`, `scalar`, `string`, ...
      has_data: Whether anything is stored for it; empty nodes and `None` are only named.
    """

    path: tuple[str, ...]
    value_type: str
    has_data: bool

    @property
    def name(self) -> str:
        """Its parameter name: the key prefix of its chunks."""
        return ".".join(self.path)

    @property
    def is_array(self) -> bool:
        """Whether its value is an array on disk."""
        return self.has_data and self.value_type in ARRAY_TYPES


class StoredItem:
    """An item's directory.

    Args:
      path: The directory that holds `_METADATA`.

    Attributes:
      leaves: By parameter name, in the order of the metadata.
      use_ocdbt: Whether the chunks are in an OCDBT database; else each is a file.
      use_zarr3: Whether the arrays are zarr v3; else v2.
      custom_metadata: What the user, and gockpt_jax, have put beside the tree.

    Raises:
      StoredItemError: There is no `_METADATA`, or it is damaged.
    """

    def __init__(self, path: Any) -> None:
        self.path = epath.Path(path)
        try:
            metadata = json.loads((self.path / METADATA_FILE).read_text())
            entries = metadata["tree_metadata"].values()
            leaves = [_leaf(entry) for entry in entries]
        except FileNotFoundError:
            raise StoredItemError(
                f"{self.path} has no `{METADATA_FILE}`: it is no tree that Orbax has saved, or an "
                "old Orbax has, of which `ocp.args.StandardRestore(target)` restores what it can."
            ) from None
        except OSError as error:
            raise StoredItemError(
                f"`{METADATA_FILE}` in {self.path} cannot be read: {error}"
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise self._damaged(METADATA_FILE, error) from error
        self.leaves: dict[str, StoredLeaf] = {}
        for leaf in leaves:  # an empty node may have an array's name: `{"a": {"b": x}, "a.b": {}}`
            if leaf.has_data or leaf.name not in self.leaves:
                self.leaves[leaf.name] = leaf
        ocdbt = metadata.get("use_ocdbt")
        has_database = (self.path / "manifest.ocdbt").exists()
        self.use_ocdbt: bool = has_database if ocdbt is None else bool(ocdbt)
        self.use_zarr3 = bool(metadata.get("use_zarr3"))
        self.custom_metadata = metadata.get("custom_metadata")
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},  # each box is read once
                "cache_pool#ocdbt": {"total_bytes_limit": 64 * 2**20},  # nodes of its tree
            }
        )

    @property
    def arrays(self) -> dict[str, StoredLeaf]:
        """The leaves whose values are arrays."""
        return {name: leaf for name, leaf in self.leaves.items() if leaf.is_array}

    @property
    def texts(self) -> set[str]:
        """The names of the leaves that are strings, of which `text` gives the value."""
        return {x.name for x in self.leaves.values() if x.has_data and x.value_type == "string"}

    def text(self, name: str) -> str | None:
        """The value of a leaf that is a string: Orbax takes its name for a JSON pointer."""
        found: Any = self._strings
        for key in name.split("/"):
            key = key.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, str) else None

    @functools.cached_property
    def key_algorithms(self) -> dict[str, str | None]:
        """Those of typed random keys by name, `None` for other arrays.

        Names of which it is not known are left out: older versions of Orbax did not write it down.
        """
        found: dict[str, str | None] = {}
        try:
            files = sorted((self.path / "array_metadatas").iterdir())
            for text in for_each(files, lambda file: file.read_text()):
                for told in (x["array_metadata"] for x in json.loads(text)["array_metadatas"]):
                    more = told.get("ext_metadata") or {}
                    found[told["param_name"]] = more.get("random_key_impl")
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or damaged
            return {}
        return found

    @functools.cached_property
    def _strings(self) -> Any:
        file = self.path / _STRINGS_FILE
        try:
            return json.loads(file.read_text()) if file.exists() else {}
        except (OSError, ValueError) as error:
            raise self._damaged(_STRINGS_FILE, error) from error

    def _damaged(self, file: str, error: Exception) -> StoredItemError:
        return StoredItemError(f"`{file}` in {self.path} is damaged: {in_a_line(error)}")

    def open(self, name: str) -> ts.TensorStore:
        """Opens a leaf; a chunk that is missing is an error, not a chunk of zeros.

        Raises:
          StoredLeafError: The leaf is not there, or its metadata is damaged.
        """
        spec = {
            "driver": "zarr3" if self.use_zarr3 else "zarr",
            "kvstore": self._kvstore(name),
            "fill_missing_data_reads": False,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
        }
        with telling_of(name, "opened"):
            return ts.open(spec, open=True, read=True, context=self._context).result()

    def plain(self, name: str) -> PlainArray | None:
        """Where the values of a leaf lie; `None` where it is stored in another way."""
        return None if self._plain is None else self._plain.find(name)

    @functools.cached_property
    def _plain(self) -> PlainArrays | None:
        is_other = self.use_zarr3 or bucket.is_bucket(self.path)
        return None if is_other else PlainArrays(self.path.as_posix(), self.use_ocdbt)

    def _kvstore(self, name: str) -> Any:
        folder = self.path.as_posix()
        if not self.use_ocdbt:
            return bucket.store_of(f"{folder}/{name}/")
        return {
            "driver": "ocdbt",
            "base": bucket.store_of(f"{folder}/"),
            "path": name if name.endswith("/") else f"{name}/",
            "cache_pool": "cache_pool#ocdbt",
        }


def _leaf(entry: Mapping[str, Any]) -> StoredLeaf:
    value = entry["value_metadata"]
    keys = tuple(str(key["key"]) for key in entry["key_metadata"])
    return StoredLeaf(keys, str(value["value_type"]), not value["skip_deserialize"])


def chunk_shape(store: ts.TensorStore) -> tuple[int, ...]:
    """The shape of what TensorStore decodes at once."""
    return tuple(max(1, n or 1) for n in store.chunk_layout.read_chunk.shape or store.shape)


def chunk_boxes(store: ts.TensorStore) -> Iterator[grid.Box]:
    """Cuts an array into boxes that are its zarr chunks, so that each chunk is read once."""
    return grid.cells(grid.whole(store.shape), chunk_shape(store))


def nbytes_of(store: ts.TensorStore, box: grid.Box) -> int:
    """Bytes of a box of an array."""
    return math.prod(grid.shape_of(box)) * int(store.dtype.numpy_dtype.itemsize)


def for_each(
    jobs: Iterable[_T],
    work: Callable[[_T], _Out],
    *,
    nbytes: Callable[[_T], int] = lambda _: 0,
    limit_bytes: int = READ_LIMIT_BYTES,
    threads: int = READ_THREADS,
) -> Iterator[_Out]:
    """Does jobs on threads, as many at once as their bytes allow; yields results in order.

    Args:
      jobs: Taken from as they can be started.
      work: Called with each job, on one of the threads.
      nbytes: The bytes that a job holds.
      limit_bytes: The most bytes at one time; a job larger than that runs alone.
      threads: The most jobs at one time.
    """
    budget = ByteBudget(limit_bytes)

    def run(job: _T, held_bytes: int) -> _Out:
        try:
            return work(job)
        finally:
            budget.release(held_bytes)

    waiting: list[concurrent.futures.Future[_Out]] = []
    with concurrent.futures.ThreadPoolExecutor(threads, "gockpt-read") as pool:
        try:
            for job in jobs:
                while len(waiting) >= 2 * threads:
                    yield waiting.pop(0).result()
                held_bytes = nbytes(job)
                budget.acquire(held_bytes)
                waiting.append(pool.submit(run, job, held_bytes))
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()
