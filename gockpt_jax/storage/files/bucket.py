"""Buckets (`gs://`, `s3://`): TensorStore's own drivers, and how long they try.

Arrays go through TensorStore's drivers, the small files beside them through `fsspec` (gcsfs, s3fs).
Both retry by themselves; here is how long.
"""

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from etils import epath

from gockpt_jax.errors import StorageError
from gockpt_jax.storage.files import _compat as of_orbax

Json = dict[str, Any]

MARKER = "commit_success.txt"
"""In a bucket nothing can be renamed at once: what has no such file was never committed."""

# TensorStore waits initial_delay * 2**i, at most max_delay, between tries: 0.5 + 1 + 2 + 4 + 8 and
# five times 16 s, about a minute and a half. That outlives a throttled or restarted server. Its own
# default, 32 retries up to 32 s apart, is a quarter of an hour in which no later save can begin.
RETRIES: Mapping[str, Any] = {"max_retries": 10, "initial_delay": "500ms", "max_delay": "16s"}

# TensorStore's HTTP client waits for ever on a server that takes a request and never answers. With
# these it gives up where less than a byte per second has moved for half a minute, and tries again.
_STALLS = {
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "30",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}

_SCHEMES = ("gs://", "s3://")
# `etils.epath`, and so Orbax, needs these to make, list and delete what is not an array.
_MODULES = {
    "gs://": {"gcsfs": "gcsfs", "google.cloud.storage": "google-cloud-storage"},
    "s3://": {"s3fs": "s3fs"},
}


def is_bucket(directory: Any) -> bool:
    """Returns whether a directory is an address in a bucket.

    Example:
      >>> is_bucket("gs://bucket/run"), is_bucket("/data/run")
      (True, False)
    """
    return str(directory).startswith(_SCHEMES)


def kvstore(url: str) -> Json:
    """Returns TensorStore's spec of an address in a bucket.

    Of the environment it takes `TENSORSTORE_GCS_BACKEND`, as Orbax does, and `AWS_ENDPOINT_URL_S3`,
    `AWS_ENDPOINT_URL`, `AWS_REGION` and `AWS_DEFAULT_REGION`, as s3fs does and TensorStore's driver
    does not: both must speak to the same server. Credentials are looked up by the drivers.

    Example:
      >>> kvstore("gs://bucket/run/8/")["bucket"], kvstore("gs://bucket/run/8/")["path"]
      ('bucket', 'run/8/')
    """
    scheme, _, address = url.partition("://")
    bucket, _, path = address.partition("/")
    spec: Json = {"bucket": bucket, "path": path}
    if scheme == "gs":
        driver = os.environ.get("TENSORSTORE_GCS_BACKEND", "gcs")
        return {"driver": driver, **spec, "gcs_request_retries": dict(RETRIES)}
    spec = {"driver": "s3", **spec, "s3_request_retries": dict(RETRIES)}
    for name, variables in (
        ("endpoint", ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
        ("aws_region", ("AWS_REGION", "AWS_DEFAULT_REGION")),
    ):
        given = next((os.environ[v] for v in variables if os.environ.get(v)), None)
        if given is not None:
            spec[name] = given
    if "endpoint" in spec:
        spec.setdefault("aws_region", "us-east-1")  # or the driver asks Amazon where the bucket is
    return spec


def store_of(path: str) -> Json:
    """Returns TensorStore's spec of a file or folder, in a bucket or on a disk."""
    return kvstore(path) if is_bucket(path) else {"driver": "file", "path": path}


def prepare(directory: Any) -> None:
    """Makes Orbax and TensorStore ready for a directory; nothing to do unless it is in a bucket.

    Raises:
      StorageError: A library that is needed for it is missing; says which to install. Or nobody
        knows what the address means.
    """
    scheme = str(directory)[:5]
    try:
        epath.Path(directory)
    except KeyError:
        raise StorageError(
            f"{directory}: checkpoints are kept in directories, `gs://` and `s3://`, not in what"
            " this names. Give the path of a directory, or the address of a bucket."
        ) from None
    if scheme not in _SCHEMES:
        return
    missing = [package for module, package in _MODULES[scheme].items() if not _is_there(module)]
    if missing:
        raise StorageError(
            f"{directory}: checkpoints in {scheme} need {' and '.join(missing)}, which are not"
            f" installed. Run `pip install {' '.join(missing)}`."
        )
    for name, value in _STALLS.items():
        os.environ.setdefault(name, value)
    if not of_orbax.route_buckets(_SCHEMES, kvstore) and scheme == "s3://":
        raise StorageError(
            f"{directory}: this Orbax cannot keep arrays in s3://, and we know no way to help it."
            " Use orbax-checkpoint 0.12.8, a gs:// bucket, or mount the bucket as a directory."
        )


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
