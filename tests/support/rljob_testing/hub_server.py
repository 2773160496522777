"""A Hugging Face hub with one model or data set, for tests: the parts of its HTTP interface that downloads use.

    python hub_server.py DIRECTORY PORT

Depends on the standard library only, so that the file can be run in any image. `GET /downloads` returns the number of
downloads by file name.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from urllib.parse import parse_qs

REPOSITORY = "tests/tiny"
COMMIT = "a" * 40


class HubServer(ThreadingHTTPServer):
    """Serves the files of `directory` as the repository `tests/tiny`, of a model and of a data set."""

    daemon_threads = True

    def __init__(
        self,
        directory: Path,
        port: int = 0,
        host: str = "127.0.0.1",
        delay_seconds: float = 0.0,
        broken: Container[str] = (),
        token: str | None = None,
    ) -> None:
        """`delay_seconds`: of each download, so that concurrent ones meet. `broken`: files whose connection is reset in
        their middle. `token`: the only one that may read the repository, which is gated; None: anyone may."""
        super().__init__((host, port), _Handler)
        self.directory = directory
        self.delay_seconds = delay_seconds
        self.broken = broken
        self.token = token
        self.downloads: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def served_hub(
    directory: Path, *, delay_seconds: float = 0.0, broken: Container[str] = (), token: str | None = None
) -> Iterator[HubServer]:
    """A hub that runs within the context, on a free port."""
    with HubServer(directory, delay_seconds=delay_seconds, broken=broken, token=token) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.partition("?")[0].replace("/api/datasets/", "/api/models/").replace("/datasets/", "/")
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        files = {file.name: file for file in self.server.directory.iterdir() if file.is_file()}
        entries = [
            {"type": "file", "path": name, "size": file.stat().st_size, "oid": _etag(file)}
            for name, file in files.items()
        ]
        if path == "/downloads":
            self._send(json.dumps(self.server.downloads).encode())
        elif self.server.token and self.headers["Authorization"] != f"Bearer {self.server.token}":
            self._send(b"{}", 401, {"X-Error-Code": "GatedRepo"})
        elif path.startswith(f"/api/models/{REPOSITORY}/paths-info/"):
            paths = parse_qs(sent).get("paths", [])
            self._send(json.dumps([entry for entry in entries if entry["path"] in paths]).encode())
        elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            self._send(json.dumps(entries).encode())
        elif path.startswith(f"/api/models/{REPOSITORY}"):
            siblings = [{"rfilename": name} for name in files]
            self._send(json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/{REPOSITORY}/resolve/") and (name := path.rpartition("/")[2]) in files:
            if self.command == "GET":
                self.server.downloads[name] += 1
                time.sleep(self.server.delay_seconds)
            headers = {"ETag": f'"{_etag(files[name])}"', "X-Repo-Commit": COMMIT}
            self._send(files[name].read_bytes(), headers=headers, breaks=name in self.server.broken)
        else:
            self._send(b"{}", 404, {"X-Error-Code": "EntryNotFound" if REPOSITORY in path else "RepoNotFound"})

    def _send(
        self,
        body: bytes,
        status: int = 200,
        headers: Mapping[str, str] = MappingProxyType({}),
        *,
        breaks: bool = False,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if breaks else body)
            if breaks:  # closed without a lingering time, a connection is reset
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())
                self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    HubServer(Path(sys.argv[1]), int(sys.argv[2]), "0.0.0.0").serve_forever()
