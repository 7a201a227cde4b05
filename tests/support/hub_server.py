"""A server on loopback that speaks as much of the Hugging Face Hub's API as huggingface_hub needs to download a model."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_a_token_that_no_message_may_show"


class HubServer:
    """Serves a folder as ``org/name``, and ``others`` as ``org/`` and their keys. ``private`` and ``gated`` models need the
    token."""

    def __init__(self, folder: Path, private: bool = False, gated: bool = False, delay: float = 0.0, **others: Path) -> None:
        self.folders, self.private, self.gated, self.delay = {"name": folder, **others}, private, gated, delay
        self.broken = 0
        """The status with which it answers everything; 0 if it works."""
        self.fetched: Counter[str] = Counter()
        """How often the content of each file was sent."""
        self.described: Counter[str] = Counter()
        """How often its ETag was asked for, of each file."""
        self.asked = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server._answer(self, True)

            def do_HEAD(self) -> None:
                server._answer(self, False)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        with self._lock:
            self.asked += 1
        path = request.path.partition("?")[0]
        status, headers, content = self._route(path, request.headers.get("Authorization", ""), body)
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        if "Content-Length" not in headers:
            request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if body:
            request.wfile.write(content)

    def _route(self, path: str, authorization: str, body: bool) -> tuple[int, dict[str, str], bytes]:
        if self.broken:
            return self.broken, {}, b""
        model = re.match(r"(?:/api/models)?/org/([^/]+)(?:/|$)", path)
        if model is None or model[1] not in self.folders:
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if authorization != f"Bearer {TOKEN}" and (self.private or (self.gated and "/resolve/" in path)):
            return (401, {"X-Error-Code": "RepoNotFound"}, b"") if self.private else (403, {"X-Error-Code": "GatedRepo"}, b"")
        folder, path = self.folders[model[1]], path.replace(model[1], "name", 1)
        files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        if match := re.fullmatch(r"/api/models/org/name(?:/revision/([^/]+))?", path):
            if match[1] not in (None, "main", "v1", COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            about = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(about).encode()
        if re.fullmatch(f"/api/models/org/name/tree/{COMMIT}", path):
            tree = [
                {"type": "file", "path": file, "size": (folder / file).stat().st_size, "oid": _etag(folder / file)}
                for file in files
            ]
            return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
        if (match := re.fullmatch(f"/org/name/resolve/(?:{COMMIT}|main|v1)/(.+)", path)) and match[1] in files:
            content = (folder / match[1]).read_bytes()
            headers = {
                "X-Repo-Commit": COMMIT, "ETag": f'"{_etag(folder / match[1])}"', "Content-Length": str(len(content))
            }  # fmt: skip
            with self._lock:
                (self.fetched if body else self.described)[match[1]] += 1
            time.sleep(self.delay if body else 0)
            return 200, headers, content
        return 404, {"X-Error-Code": "EntryNotFound"}, b""


def _etag(file: Path) -> str:
    """Returns what the Hub has: git's digest for a small file, and sha256 for one in its large file storage."""
    content = file.read_bytes()
    if file.suffix in (".safetensors", ".bin", ".pt", ".distcp"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serving(server: HubServer) -> Iterator[HubServer]:
    try:
        yield server
    finally:
        server.close()


@contextmanager
def pointing(address: str, cache: Path, token: str = "", offline: bool = False) -> Iterator[None]:
    """Makes huggingface_hub, which reads its environment when it is imported, use a server and a cache."""
    with (
        mock.patch.object(constants, "ENDPOINT", address),
        mock.patch.object(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"),
        mock.patch.object(constants, "HF_HUB_CACHE", str(cache)),
        mock.patch.object(constants, "HF_HUB_OFFLINE", offline),
        mock.patch.dict("os.environ", {"HF_TOKEN": token} if token else {}),
    ):
        yield
