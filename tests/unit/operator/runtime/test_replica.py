"""The start of a replica, which a signal may interrupt at any moment."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from rljob_api.metadata import GROUP
from rljob_operator import handlers
from rljob_operator.handlers import Replica
from rljob_operator.settings import OperatorSettings
from rljob_testing.patience import PATIENCE_SECONDS
from tests.unit.operator.kube.scripted_api_server import Answer, ScriptedApiServer, Serving, play, refusal


def no_leader_yet(server: ScriptedApiServer) -> None:
    """The replica repeats requests that take 5 s, as they may on a busy machine."""
    server.answer("GET", "/apis", Answer(body={"groups": [{"name": GROUP}]}), times=50)
    server.answer("GET", "/leases/rljob-operator", refusal(404, "NotFound"), times=50)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [found.getsockname()[1] for found in sockets]


def test_a_replica_that_is_stopped_before_it_leads_releases_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    probes_port, metrics_port = free_ports(2)
    answers: list[int] = []

    async def interrupted() -> None:
        addresses = f"http://127.0.0.1:{probes_port}/healthz", f"https://127.0.0.1:{metrics_port}/metrics"
        async with aiohttp.ClientSession() as session:
            for address in addresses:
                async with session.get(address, ssl=False) as answer:
                    answers.append(answer.status)
        raise asyncio.CancelledError

    async def story(serving: Serving) -> None:
        settings = OperatorSettings(
            trainer_image="trainer:1",
            trainer_torch_version="2.8.0",
            network_policy=False,
            metrics_port=metrics_port,
            probes_port=probes_port,
        )
        with pytest.raises(asyncio.CancelledError):
            await Replica(settings, serving.connection).run()

    monkeypatch.setattr(handlers, "Leader", lambda *_, **__: SimpleNamespace(run=interrupted, nodes=tuple))
    server = play(story, no_leader_yet)
    first, *_, last = [asked.body["spec"]["holderIdentity"] for asked in server.asked if asked.method != "GET"]
    assert first != ""
    assert last == ""
    assert answers == [200, 401], "probes without TLS, metrics over TLS for callers with a token"


def test_a_replica_without_a_cluster_ends_with_exit_code_1(tmp_path: Path) -> None:
    options = ["--trainer-image", "trainer:1", "--trainer-torch-version", "2.8.0"]
    done = subprocess.run(
        [sys.executable, "-m", "rljob_operator.cli", "run", *options],
        env={**os.environ, "KUBECONFIG": str(tmp_path / "nothing")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert "set KUBECONFIG" in done.stderr
