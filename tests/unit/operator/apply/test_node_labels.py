"""The label of nodes with GPUs: written where it is wrong, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rljob_operator.apply import node_labels
from rljob_operator.apply.node_labels import NodeLabels
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.retry import RetryPolicy
from tests.unit.operator.kube.scripted_api_server import ScriptedApiServer, Serving, nothing, play, refusal


def written(
    nodes: list[tuple[str, bool, bool]], script: Callable[[ScriptedApiServer], None] = nothing, writes: int = 1
) -> list[tuple[str, object]]:
    """The writes after these nodes were seen, each with whether it has GPUs and whether it is labelled."""

    async def story(serving: Serving) -> None:
        client = ApiClient(serving.connection, concurrency=1, retry=RetryPolicy(attempts=1))
        labels = NodeLabels(client)
        running = asyncio.create_task(labels.run())
        for node, has_gpus, labelled in nodes:
            labels.check(node, has_gpus=has_gpus, labelled=labelled)
        while len(serving.server.asked) < writes:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        running.cancel()
        await client.close()

    return [(asked.path, asked.body["metadata"]["labels"]) for asked in play(story, script).asked]


def test_a_node_that_gains_or_loses_gpus_gains_or_loses_the_label() -> None:
    nodes = [("gained", True, False), ("lost", False, True), ("has", True, True), ("never", False, False)]
    assert sorted(written(nodes, writes=2)) == [
        ("/api/v1/nodes/gained", {"rljob.dev/has-gpus": "true"}),
        ("/api/v1/nodes/lost", {"rljob.dev/has-gpus": None}),
    ]


def test_a_node_that_was_set_right_meanwhile_is_left_alone() -> None:
    assert written([("node", True, False), ("node", True, True)], writes=0) == []


def test_a_write_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_labels, "_FIRST_RETRY_SECONDS", 0.01)
    failing = refusal(500, "Internal")
    assert len(written([("node", True, False)], lambda server: server.answer("PATCH", "/node", failing), 2)) == 2


def test_a_node_that_is_gone_is_forgotten() -> None:
    gone = refusal(404, "NotFound")
    assert len(written([("node", True, False)], lambda server: server.answer("PATCH", "/node", gone))) == 1


def test_a_refused_node_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_labels, "_FIRST_RETRY_SECONDS", 0.01)

    def script(server: ScriptedApiServer) -> None:
        for _ in range(100):
            server.answer("PATCH", "/refused", refusal(403, "Forbidden"))

    nodes = [("first", True, False), ("refused", True, False), ("last", True, False)]
    paths = [path.rpartition("/")[2] for path, _ in written(nodes, script, writes=5)]
    assert paths[:3] == ["first", "refused", "last"]
    assert set(paths[3:]) == {"refused"}
    assert len(paths) < 10, "the retries of a refused node become rare"
