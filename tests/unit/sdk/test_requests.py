"""Warnings of an API server, and the output of commands in pods, from local servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from websocket import WebSocket
from websockets.sync.server import ServerConnection, serve

from rljob_client.api_server import PodCommand
from rljob_client.jobs import RLJobClient
from tests.unit.sdk.test_refusals import KUBECONFIG

STORED = {"metadata": {"name": "job", "namespace": "research"}}


class Warns(BaseHTTPRequestHandler):
    """Answers each request with a job, and a warning about it."""

    def do_POST(self) -> None:
        body = json.dumps(STORED).encode()
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201)
        self.send_header("Warning", r'299 - "spec: the job \"does not fit\""')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_warning_of_the_api_server_names_the_line_of_the_caller(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Warns) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "config").write_text(KUBECONFIG.replace("127.0.0.1:9", f"127.0.0.1:{server.server_port}"))
        client = RLJobClient(kubeconfig=str(tmp_path / "config"))
        with pytest.warns(UserWarning, match='^spec: the job "does not fit"$') as warned:
            assert client.create({"metadata": {"name": "job"}}).name == "job"
        server.shutdown()
    assert warned[0].filename == __file__


@contextmanager
def command(answer: Callable[[ServerConnection], None]) -> Iterator[PodCommand]:
    """A command whose API server answers so."""
    with serve(answer, "127.0.0.1", 0, close_timeout=0.1) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        socket = WebSocket()
        socket.connect("ws://{}:{}".format(*server.socket.getsockname()))
        yield PodCommand(socket)
        server.shutdown()


def read_all(running: PodCommand) -> bytes:
    return b"".join(iter(lambda: running.read(3), b""))


@pytest.mark.parametrize(
    ("frames", "failure"),
    [
        ([b"\1out", b"\2warning\n", b"\1put", b'\3{"status": "Success"}'], None),
        ([b"\1output", b"\2tar: no such ", b"\2file\n", b'\3{"status": "Failure"}'], "tar: no such file"),
        ([b"\1output", b'\3{"status": "Failure", "message": "exit status 2"}'], "exit status 2"),
        ([b"\1output"], "the connection was lost"),
    ],
)
def test_output_errors_and_status_of_a_command_are_told_apart(frames: list[bytes], failure: str | None) -> None:
    def answer(connection: ServerConnection) -> None:
        for frame in frames:
            connection.send(frame)

    with command(answer) as running:
        assert read_all(running) == b"output"
        assert running.failure == failure
