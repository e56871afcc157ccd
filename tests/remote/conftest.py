"""Emulators of S3 and GCS, each in a process of its own, with a troubling proxy before it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from .proxy import Proxy, as_google

BUCKET = "bucket"

# They end when their input does, that is, with this process at the latest.
_S3 = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
_GS = """
import logging, sys
from gcp_storage_emulator import server as lib
from http import server
port = []
made = server.HTTPServer.server_activate
def told(self):
    made(self)
    print(self.server_port, flush=True)
server.HTTPServer.server_activate = told
lib.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket").start()
sys.stdin.read()
"""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket, and the proxy on the way to it."""

    scheme: str
    proxy: Proxy

    def directory(self) -> str:
        """An address that no test has used."""
        return f"{self.scheme}://{BUCKET}/{uuid.uuid4().hex}/a run"

    @property
    def data(self) -> str:
        """Matches the requests that write arrays."""
        return (
            r"^PUT .*/ocdbt\.process_0/d/" if self.scheme == "s3"
            else r"^POST .*uploadType=media.*/ocdbt\.process_0/d/"
        )  # fmt: skip

    def marker(self, step: int) -> str:
        """Matches the request that writes a step's commit marker, whichever client makes it."""
        return rf"^P(UT|OST) .*/{step}/commit_success\.txt"


@pytest.fixture(scope="session", params=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    needed = {"s3": ("moto", "flask", "s3fs"), "gs": ("gcp_storage_emulator", "gcsfs")}
    for module in needed[request.param]:
        pytest.importorskip(module, reason="`make test-remote` installs what these need")
    emulator = subprocess.Popen(
        [sys.executable, "-c", _S3 if request.param == "s3" else _GS],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert emulator.stdin is not None
    assert emulator.stdout is not None
    proxy = Proxy(int(emulator.stdout.readline()), as_google if request.param == "gs" else None)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _environment(request.param, proxy.url).items():
            patch.setitem(os.environ, name, value)
        if request.param == "s3":
            assert proxy.ask("PUT", f"/{BUCKET}")[0] == 200
        yield Bucket(request.param, proxy)
    proxy.close()
    emulator.terminate()
    emulator.communicate(timeout=30)


def _environment(scheme: str, url: str) -> dict[str, str]:
    # TensorStore reads it once, when it first speaks HTTP. A stall takes this long, not 30 s.
    common = {"TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "1"}
    if scheme == "gs":
        return common | {
            "TENSORSTORE_GCS_HTTP_URL": url, "STORAGE_EMULATOR_HOST": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none", "GOOGLE_CLOUD_PROJECT": "test",
        }  # fmt: skip
    return common | {
        "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


@pytest.fixture
def bucket(server: Bucket) -> Iterator[Bucket]:
    server.proxy.seen.clear()
    yield server
    server.proxy.trouble(None)
