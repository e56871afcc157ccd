"""Stands between the clients and an emulator, and troubles what passes, by count or by switch."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

_OF_ONE_HOP = {"content-length", "transfer-encoding", "connection"}

Kind = Literal["throttle", "refuse", "stall", "cut"]


@dataclasses.dataclass
class Fault:
    """What befalls requests whose `METHOD path` matches; the first `times` of them, or all."""

    kind: Kind
    pattern: str
    times: int | None = None
    hits: int = 0

    def takes(self, line: str) -> bool:
        is_over = self.times is not None and self.hits >= self.times
        if is_over or not re.search(self.pattern, line):
            return False
        self.hits += 1
        return True


class Proxy:
    """Forwards to an emulator.

    Args:
        port: The emulator's.
        mend: Changes a request's answer where the emulator is not as the real server.
    """

    def __init__(self, port: int, mend: Callable[..., Any] | None = None) -> None:
        self.port, self.mend = port, mend
        self.lock = threading.RLock()
        self.seen: list[str] = []
        self._fault: Fault | None = None
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def trouble(self, fault: Fault | None) -> Fault | None:
        """From now on; `None`: no more, and whoever is stalled goes."""
        with self.lock:
            self._released.set()
            self._released = threading.Event()
            self._fault = fault
        return fault

    def close(self) -> None:
        self.trouble(None)
        self._server.shutdown()
        self._server.server_close()

    def befalls(self, line: str) -> tuple[Kind | None, threading.Event]:
        with self.lock:
            self.seen.append(line)
            hit = self._fault is not None and self._fault.takes(line)
            return (self._fault.kind if hit and self._fault else None), self._released

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: Any = ()
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Asks the emulator itself."""
        upstream = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            upstream.request(method, path, body or None, dict(headers))
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def _handler(proxy) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def handle_any(self) -> None:
                body = self._body()
                kind, released = proxy.befalls(f"{self.command} {urllib.parse.unquote(self.path)}")
                if kind == "stall":
                    released.wait()
                    self.close_connection = True
                elif kind == "cut":  # half of an answer, and no more
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")
                    self.close_connection = True
                elif kind == "throttle":
                    self._answer(
                        503, [("Retry-After", "0")], b"<Error><Code>SlowDown</Code></Error>"
                    )
                elif kind == "refuse":
                    self._answer(403, [], b"<Error><Code>AccessDenied</Code></Error>")
                else:
                    # The body of HEAD and the framing of the answer are the server's own business.
                    self._answer(*self._forwarded(body))

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = handle_any

            def _body(self) -> bytes:
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def _forwarded(self, body: bytes) -> tuple[int, Any, bytes]:
                headers = {
                    k: v for k, v in self.headers.items()
                    if k.lower() not in _OF_ONE_HOP | {"expect"}
                }  # fmt: skip
                if proxy.mend is not None:
                    return proxy.mend(proxy, self.command, self.path, body, headers)
                return proxy.ask(self.command, self.path, body, headers)

            def _answer(self, status: int, headers: Any, body: bytes) -> None:
                self.send_response(status)
                length = str(len(body))
                for name, value in headers:
                    if name.lower() == "content-length" and self.command == "HEAD":
                        length = value
                    if name.lower() not in _OF_ONE_HOP | {"date", "server"}:
                        self.send_header(name, value)
                if status not in (204, 304):
                    self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        return Handler


def as_google(
    proxy: Proxy, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, Any, bytes]:
    """Adds what the GCS emulator lacks: generations of what is read, preconditions and ranges."""
    url = urllib.parse.urlsplit(path)
    query = dict(urllib.parse.parse_qsl(url.query))
    name = query.get("name")
    with proxy.lock:  # a precondition and what follows are one
        if method == "POST" and name and "ifGenerationMatch" in query:
            bucket = url.path.split("/b/")[1].split("/")[0]
            if _generation(proxy, bucket, name) != int(query["ifGenerationMatch"]):
                return 412, [], b"{}"
        if method != "GET" or query.get("alt") != "media" or "/o/" not in url.path:
            return proxy.ask(method, path, body, headers)
        bucket, name = url.path.split("/b/")[1].split("/o/")
        generation = _generation(proxy, bucket, urllib.parse.unquote(name))
        status, answered, content = proxy.ask(method, path, body, headers)
    if status not in (200, 206):
        return status, answered, content
    if query.get("ifGenerationNotMatch") == str(generation):
        return 304, [("x-goog-generation", str(generation))], b""
    answered = [(k, v) for k, v in answered if k.lower() != "content-encoding"]
    answered.append(("x-goog-generation", str(generation)))
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("Range", headers.get("range", "")))
    if status == 200 and asked is not None:
        first, last = int(asked[1]), int(asked[2] or len(content) - 1)
        answered.append(
            ("Content-Range", f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}")
        )
        return 206, answered, content[first : last + 1]
    return status, answered, content


def _generation(proxy: Proxy, bucket: str, name: str) -> int:
    """Of an object; 0 where there is none."""
    quoted = urllib.parse.quote(name, safe="")
    status, _, content = proxy.ask("GET", f"/storage/v1/b/{bucket}/o/{quoted}")
    return int(json.loads(content)["generation"]) if status == 200 else 0
