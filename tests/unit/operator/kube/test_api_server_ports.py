"""Ports of the API server, for NetworkPolicies."""

from __future__ import annotations

import pytest

from rljob_operator.kube.api_server_ports import api_server_ports
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.retry import RetryPolicy
from tests.unit.operator.kube.scripted_api_server import Answer, ScriptedApiServer, Serving, play, refusal


@pytest.mark.parametrize(
    ("answer", "server", "ports"),
    [
        (Answer(body={"ports": [{"name": "https", "port": 16443}]}), "https://10.96.0.1:443", (443, 16443)),
        (Answer(body={"ports": [{"port": 8443}]}), "https://10.96.0.1", (443, 8443)),
        (Answer(body={"ports": None}), "https://example.org:7443", (443, 7443)),
        (refusal(403, "Forbidden"), "https://10.96.0.1:443", (443, 6443)),
        (refusal(404, "NotFound"), "https://[fd00::1]:8443", (443, 6443, 8443)),
    ],
)
def test_ports_of_service_and_endpoints(answer: Answer, server: str, ports: tuple[int, ...]) -> None:
    found: list[tuple[int, ...]] = []

    def script(api: ScriptedApiServer) -> None:
        api.answer("GET", "/endpointslices/kubernetes", answer)

    async def story(serving: Serving) -> None:
        client = ApiClient(serving.connection, concurrency=1, retry=RetryPolicy(attempts=1))
        found.append(await api_server_ports(client, server))
        await client.close()

    assert play(story, script).asked[0].path == "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes"
    assert found == [ports]
