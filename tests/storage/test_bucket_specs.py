"""What needs no server: addresses, libraries that are missing, and the names of failures."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import tensorstore as ts

import gockpt_jax as gockpt
from gockpt_jax.storage.files import _compat as of_orbax
from gockpt_jax.storage.files import bucket
from gockpt_jax.storage.files.storage_errors import named, storage_error

AWS = (
    "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION",
    "TENSORSTORE_GCS_BACKEND",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in AWS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("url", ["gs://bkt/run 1/?#%/8/", "s3://bkt/run 1/?#%/8/"])
def test_an_address_is_taken_letter_by_letter(url: str) -> None:
    spec = bucket.kvstore(url)
    assert spec["bucket"] == "bkt"
    assert spec["path"] == url.partition("//bkt/")[2]
    retries = ts.KvStore.Spec(spec).to_json()[
        "gcs_request_retries" if url[0] == "g" else "s3_request_retries"
    ]
    assert retries == bucket.RETRIES


def test_s3_is_asked_where_s3fs_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "endpoint" not in bucket.kvstore("s3://b/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store:9000")
    assert bucket.kvstore("s3://b/x")["endpoint"] == "http://store:9000"
    assert bucket.kvstore("s3://b/x")["aws_region"] == "us-east-1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://other:9000")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert bucket.kvstore("s3://b/x")["endpoint"] == "http://other:9000"
    assert bucket.kvstore("s3://b/x")["aws_region"] == "eu-west-1"


@pytest.mark.parametrize(
    ("url", "package"), [("s3://b/x", "s3fs"), ("gs://b/x", "gcsfs"), ("gs://b/x", "storage")]
)
def test_a_missing_library_is_named(
    url: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_is_there", lambda module: package not in module)
    # Not an extra of ours: no registry need have this package.
    with pytest.raises(gockpt.StorageError, match=rf"{package}.*`pip install [a-z-]*{package}`"):
        gockpt.GoCkptManager(url)


def test_local_paths_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "_is_there", lambda module: False)
    before = dict(os.environ)
    bucket.prepare("/data/s3:/x")
    assert dict(os.environ) == before


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_server_that_never_answers_is_given_up(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_is_there", lambda module: True)
    monkeypatch.setattr(of_orbax, "route_buckets", lambda *_: True)
    seconds, limit = bucket._STALLS
    monkeypatch.setenv(seconds, "7")
    monkeypatch.delenv(limit, raising=False)
    bucket.prepare(f"{scheme}://bkt/run")
    assert os.environ.pop(limit) == "1"
    assert os.environ[seconds] == "7", "what the user has set stays"


def test_an_orbax_that_is_not_known_keeps_gs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "_is_there", lambda module: True)
    monkeypatch.setattr(bucket, "_STALLS", {})
    monkeypatch.setattr(of_orbax, "route_buckets", lambda *_: False)
    bucket.prepare("gs://bkt/run")
    with pytest.raises(gockpt.StorageError, match="cannot keep arrays in s3://"):
        bucket.prepare("s3://bkt/run")


_ROUTED = """
from orbax.checkpoint._src.serialization import tensorstore_utils as stock
from orbax.checkpoint._src.path import atomicity_defaults, gcs_utils
from etils import epath
from gockpt_jax.storage.files import _compat as of_orbax
from gockpt_jax.storage.files import bucket
def specs():
    path = "/a//b/../c"
    return [stock.build_kvstore_tspec(path, name="n", use_ocdbt=o) for o in (True, False)]
local = specs()
routed = of_orbax.route_buckets(("gs://", "s3://"), bucket.kvstore)
assert routed == hasattr(stock, "_use_gcs_driver"), routed
assert routed == of_orbax.route_buckets(("gs://", "s3://"), bucket.kvstore)  # twice is once
assert local == specs()
if routed:
    for scheme in ("gs", "s3"):
        spec = stock.build_kvstore_tspec(f"{scheme}://b/r//x/", name="n", use_ocdbt=True)
        assert spec["base"] == bucket.kvstore(f"{scheme}://b/r/x"), spec
        assert gcs_utils.is_gcs_path(epath.Path(f"{scheme}://b/r"))
    marked = atomicity_defaults.get_default_temporary_path_class(epath.Path("s3://b/r"))
    assert marked.__name__ == "CommitFileTemporaryPath", marked
    assert not gcs_utils.is_gcs_path(epath.Path("/b/r"))
"""


def test_orbax_is_routed_and_local_paths_are_not() -> None:
    """In a process of its own, for it lasts."""
    done = subprocess.run([sys.executable, "-c", _ROUTED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_a_storage_refused_is_named() -> None:
    said = ValueError("UNAVAILABLE: Error writing x: CURL error [tensorstore_spec='{\\'a\\': 1}']")
    found = named("s3://b/run", 8, said)
    assert isinstance(found, gockpt.StorageError)
    assert found.__cause__ is said
    assert "the save of step 8 in s3://b/run failed: UNAVAILABLE" in str(found)
    assert "tensorstore_spec" not in str(found)
    assert named("s3://b/run", 8, found) is found
    client = types.new_class("ClientError", (Exception,), exec_body=lambda body: body.update(
        __module__="botocore.exceptions"))  # fmt: skip
    assert isinstance(named("s3://b/run", 8, client("no")), gockpt.StorageError)


@pytest.mark.parametrize(
    ("directory", "error"),
    [
        ("/data", ValueError("Error writing x")),
        ("gs://b/run", ValueError("`step` is negative")),
        ("gs://b/run", gockpt.ReplayError("late")),
        ("gs://b/run", KeyboardInterrupt()),
    ],
)
def test_what_is_no_failure_of_the_storage_stays(directory: str, error: BaseException) -> None:
    assert named(directory, 8, error) is error


def test_what_is_not_there_may_be_another_hosts() -> None:
    """A host on which the directory is another disk finds nothing there."""
    missing = FileNotFoundError(2, "No such file or directory")
    found = storage_error("the save of step 3", "/tmp/run", missing)
    assert "Of several hosts all need to see this directory" in str(found)
    full = storage_error("the save of step 3", "/tmp/run", OSError(28, "No space left"))
    assert "Make room" in str(full)
    assert "all need to see" not in str(full)
    assert "within a `Composite`" not in str(found) + str(full)
    away = storage_error("the save of step 3", "gs://bkt/run", missing)
    assert "see to the bucket" in str(away)


@pytest.mark.parametrize("kind", [FileExistsError, FileNotFoundError])
def test_a_directory_that_was_written_to_too_soon_is_told_of(kind: type[OSError]) -> None:
    """Orbax makes directories on a thread, and nested items do not wait for it."""
    path = "/tmp/run/3.orbax-checkpoint-tmp/rngs.orbax-checkpoint-tmp/key.orbax-checkpoint-tmp"
    found = storage_error("the save of step 3", "/tmp/run", kind(17, "no", path))
    assert "Items of a `Composite` within a `Composite`" in str(found)
    assert "Make room" not in str(found)
