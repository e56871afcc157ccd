"""What a storage refused, by name: whatever the library that raised it calls that."""

from typing import Any

from gockpt_jax.errors import StorageError, without_specs
from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.files.item_files import TEMPORARY

_CLIENTS = frozenset({"aiobotocore", "aiohttp", "botocore", "gcsfs", "google", "requests"})
_TENSORSTORE_SAYS = ("tensorstore_spec", "CURL ", "HTTP ", "OCDBT", "Error writing ")
_TOO_SOON = (
    "Items of a `Composite` within a `Composite`, and handlers that write before Orbax has made "
    "their directory, fail so now and then, with stock Orbax too: name such items side by side in "
    "one `Composite`, and have handlers wait for the directory."
)


def named(directory: Any, label: int, error: BaseException) -> BaseException:
    """Returns the error to raise for a failed save: a `StorageError` where the storage refused it.

    Args:
      directory: Of the manager.
      label: Of the save.
      error: What failed. Whatever is no failure of the storage's is returned as it is.
    """
    if not isinstance(error, OSError) and not (
        bucket.is_bucket(directory) and _is_of_client(error)
    ):
        return error
    assert isinstance(error, Exception)
    found = storage_error(f"the save of step {label} in {directory}", directory, error)
    if found is not error:
        found.__cause__ = error
    return found


def storage_error(doing: str, directory: Any, error: Exception) -> StorageError:
    """The named error for what a storage refused, and what to do; raise it from `error`."""
    if isinstance(error, StorageError):
        return error
    advice = "Make room, or see to the directory and its permissions."
    if isinstance(error, FileExistsError):
        advice = _TOO_SOON
    if isinstance(error, FileNotFoundError):
        advice = (
            "Of several hosts all need to see this directory, and nothing else may clean it up."
        )
        if f"{TEMPORARY}/" in str(error):
            advice = f"{advice} {_TOO_SOON}"
    if bucket.is_bucket(directory):
        advice = (
            "It was retried as long as docs/storage.md says: see to the bucket, the credentials and"
            " the network."
        )
    cause = without_specs(error).rstrip(".")
    found = StorageError(
        f"{doing} failed: {cause}. Nothing of this save is visible, earlier checkpoints are "
        f"intact. {advice} The next save tries anew."
    )
    found.errno = getattr(error, "errno", None)
    return found


def _is_of_client(error: BaseException) -> bool:
    """Whether an error comes from one of the libraries that speak to buckets."""
    if type(error).__module__.partition(".")[0] in _CLIENTS:
        return True
    # TensorStore has no types of its own: it raises builtin ones, and its texts tell.
    text = str(error)
    return isinstance(error, ValueError | NotImplementedError) and any(
        words in text for words in _TENSORSTORE_SAYS
    )
