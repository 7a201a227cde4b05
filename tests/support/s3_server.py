"""A real S3 server, moto's, behind a proxy that counts what is fetched and injects faults."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, urlsplit

from moto.server import ThreadedMotoServer

BUCKET = "weights"
SECRET = "a-secret-key-that-no-message-may-show"


class Moto:
    """The server."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]
        self.request("PUT", f"/{BUCKET}")

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, body, {"x-amz-acl": "public-read"})
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status < 300, (method, path, answer.status, content)
        connection.close()
        return content

    def put_folder(self, folder: Path, prefix: str) -> None:
        for file in folder.rglob("*"):
            if file.is_file():
                self.request("PUT", quote(f"/{BUCKET}/{prefix}/{file.relative_to(folder)}"), file.read_bytes())

    def close(self) -> None:
        self._server.stop()


Fault = Callable[[str, str, int], str]
"""Takes the method, the path and the number of a request. Returns "", "latency", one of _ERRORS, "truncate" or "reset"."""

_ERRORS = {
    "301": (301, "PermanentRedirect"), "403": (403, "AccessDenied"), "429": (429, "TooManyRequests"),
    "500": (500, "InternalError"), "503": (503, "ServiceUnavailable"), "slow down": (503, "SlowDown"),
}  # fmt: skip


class Proxy:
    """Passes requests on to a server, but for faults; notes the ranges of each object that were sent in full."""

    def __init__(self, port: int) -> None:
        self.fault: Fault = lambda method, path, number: ""
        self.latency = 0.0
        self.hidden: set[str] = set()
        """Headers, in lower case, that answers lack."""
        self.sent: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Ranges [begin, end) of each object."""
        self.requests = 0
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy._answer(self, port)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def reset(self) -> None:
        self.fault, self.latency, self.requests = (lambda method, path, number: ""), 0.0, 0
        self.hidden.clear()
        self.sent.clear()

    def _answer(self, request: BaseHTTPRequestHandler, port: int) -> None:
        with self._lock:
            self.requests += 1
            number = self.requests
        fault = self.fault(request.command, request.path, number)
        time.sleep(self.latency)
        if fault == "reset":
            request.connection.shutdown(socket.SHUT_RDWR)
            request.close_connection = True
            return
        if fault in _ERRORS:
            status, code = _ERRORS[fault]
            self._send(request, status, {}, f"<Error><Code>{code}</Code></Error>".encode())
            return
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {key: value for key, value in request.headers.items() if key.lower() not in ("connection", "host")}
        connection.request(request.command, request.path, headers=headers)
        answer = connection.getresponse()
        content = answer.read()
        own = {"connection", "server", "date", "transfer-encoding", *self.hidden}
        forwarded = {key: value for key, value in answer.getheaders() if key.lower() not in own}
        truncated = fault == "truncate"
        if request.command == "GET" and answer.status == 206 and not truncated and (span := request.headers.get("Range")):
            begin, _, end = span.removeprefix("bytes=").partition("-")
            with self._lock:  # before the client has the answer, and a test looks
                self.sent[urlsplit(request.path).path].append((int(begin), int(end) + 1))
        self._send(request, answer.status, forwarded, content, truncated)
        request.close_connection |= truncated

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes, half: bool = False) -> None:
        request.send_response(status)
        for key, value in ({"Content-Length": str(len(content))} | headers).items():
            request.send_header(key, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content[: len(content) // 2] if half else content)


def environment(address: str) -> dict[str, str]:
    """What makes a process use a server, with its own chain of credentials."""
    return {
        "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
    }  # fmt: skip


@contextmanager
def serving() -> Iterator[tuple[Moto, Proxy]]:
    moto = Moto()
    try:
        proxy = Proxy(moto.port)
        yield moto, proxy
        proxy.close()
    finally:
        moto.close()
