"""The part of a kubelet that the API server asks for logs and commands of pods.

Logs are texts that a test sets. Commands run on this machine, with a directory of the test in place of the volume.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve
from websockets.typing import Subprotocol

from rljob_client.fetch_command import MOUNT
from rljob_cluster.certificates import Authority

_PROTOCOL = Subprotocol("v4.channel.k8s.io")
_FRAME_BYTES = 1 << 15


class KubeletServer:
    """Listens on 127.0.0.1, for the API server."""

    def __init__(self, directory: Path, port: int) -> None:
        authority = Authority(directory)
        authority.ensure()
        pair = authority.server("kubelet", ("127.0.0.1",))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pair.certificate, pair.key)
        self.port = port
        self.logs: dict[tuple[str, str], str] = {}
        """Logs by namespace and pod. The one before a restart has the name POD.previous."""
        self.volumes: dict[str, Path] = {}
        """Directory of the volume by namespace."""
        self._server: Server = serve(
            self._execute, "127.0.0.1", port, ssl=context, subprotocols=[_PROTOCOL], process_request=self._log
        )
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def _log(self, connection: ServerConnection, request: Request) -> Response | None:
        """The answer to a request for a log; None for a command."""
        url = urlsplit(request.path)
        kind, namespace, pod, _ = url.path.strip("/").split("/")
        if kind != "containerLogs":
            return None
        previous = parse_qs(url.query).get("previous") == ["true"]
        text = self.logs.get((namespace, f"{pod}.previous" if previous else pod))
        if text is None:
            return connection.respond(400, f'previous terminated container "rljob" in pod "{pod}" not found')
        body = text.encode()
        headers = Headers({"Content-Type": "text/plain", "Content-Length": str(len(body)), "Connection": "close"})
        return Response(200, "OK", headers, body)

    def _execute(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        url = urlsplit(connection.request.path)
        _, namespace, *_ = url.path.strip("/").split("/")
        words = [word.replace(MOUNT, str(self.volumes[namespace])) for word in parse_qs(url.query)["command"]]
        done = subprocess.run(words, capture_output=True, check=False)
        for begin in range(0, len(done.stdout), _FRAME_BYTES):
            connection.send(b"\1" + done.stdout[begin : begin + _FRAME_BYTES])
        if done.stderr:
            connection.send(b"\2" + done.stderr)
        connection.send(b"\3" + json.dumps(_status(done.returncode)).encode())


def _status(code: int) -> dict[str, Any]:
    if code == 0:
        return {"status": "Success"}
    cause = {"reason": "ExitCode", "message": str(code)}
    message = f"command terminated with non-zero exit code: exit status {code}"
    return {"status": "Failure", "reason": "NonZeroExitCode", "message": message, "details": {"causes": [cause]}}
