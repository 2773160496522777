"""Callers without any right, on the operator's ports: they take neither the Lease, nor memory, nor Prometheus' turn."""

from __future__ import annotations

import asyncio
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta

import aiohttp
import pytest

from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.eventually import EFFECT_SECONDS, eventually
from rljob_testing.operator.installation import token_of
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.restarts import OPERATOR_NAMESPACE
from rljob_testing.operator.watched_job import WatchedJob

CALLERS = 600
FLOOD_SECONDS = 6.0
MAX_GROWTH_BYTES = 64 << 20


@pytest.fixture
def prometheus(api: ApiClient, namespace: str) -> Iterator[str]:
    """A token that may read the metrics."""
    name = f"metrics-{namespace}"
    group = "rbac.authorization.k8s.io"
    api.create("serviceaccounts", {"metadata": {"name": "prometheus"}}, namespace)
    api.create(
        "clusterroles", {"metadata": {"name": name}, "rules": [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]}
    )
    subject = {"kind": "ServiceAccount", "name": "prometheus", "namespace": namespace}
    role = {"apiGroup": group, "kind": "ClusterRole", "name": name}
    api.create("clusterrolebindings", {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]})
    eventually(lambda: may_read_metrics(api, f"system:serviceaccount:{namespace}:prometheus"), "the right to arrive")
    yield token_of(api, namespace, "prometheus")
    api.delete("clusterrolebindings", name)
    api.delete("clusterroles", name)


def may_read_metrics(api: ApiClient, user: str) -> bool:
    """The API server authorizes by a binding a moment after it is stored; the operator keeps refusals for a minute."""
    spec = {"user": user, "nonResourceAttributes": {"path": "/metrics", "verb": "get"}}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = api.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def test_callers_without_rights_take_neither_lease_nor_memory(
    job: WatchedJob, operator: OperatorProcess, api: ApiClient, prometheus: str
) -> None:
    assert asyncio.run(scrape(operator, prometheus)) == 200
    before, memory = lease(api), operator.process.memory_info().rss
    job.create()

    asyncio.run(flood(operator, prometheus, lambda: renewed(lease(api)) - renewed(before)))

    assert lease(api)["holderIdentity"] == before["holderIdentity"]
    assert operator.process.memory_info().rss - memory < MAX_GROWTH_BYTES
    assert operator.probe("readyz") == 200
    job.run(step=1)


async def flood(operator: OperatorProcess, prometheus: str, lease_age: Callable[[], timedelta]) -> None:
    """Idle connections on both ports, and requests with tokens that nobody knows; Prometheus scrapes all the while.
    It ends after FLOOD_SECONDS, and not before the Lease was renewed twice. `lease_age`: from the renewal before the
    flood to the last one.
    """
    idle = [silent(port) for port in (operator.probes_port, operator.metrics_port) for _ in range(CALLERS)]
    connector = aiohttp.TCPConnector(limit=CALLERS, ssl=unverified())
    async with aiohttp.ClientSession(connector=connector) as session:
        callers = [asyncio.create_task(call(session, operator)) for _ in range(CALLERS)]
        scraped = []
        end = time.monotonic() + FLOOD_SECONDS
        async with asyncio.timeout(EFFECT_SECONDS):
            while time.monotonic() < end or await asyncio.to_thread(lease_age) < timedelta(seconds=FLOOD_SECONDS / 2):
                scraped.append(await scrape(operator, prometheus))
                await asyncio.sleep(0.5)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
    assert scraped
    assert set(scraped) == {200}
    for connection in idle:
        connection.close()


async def call(session: aiohttp.ClientSession, operator: OperatorProcess) -> None:
    while True:
        with suppress(aiohttp.ClientError, OSError):
            headers = {"Authorization": f"Bearer {secrets.token_hex(400)}"}
            async with session.get(address(operator), headers=headers) as answer:
                assert answer.status in (401, 503)


async def scrape(operator: OperatorProcess, token: str) -> int:
    """HTTP status of a scrape; once more if the connection was closed for a newer one."""
    for _ in range(5):
        with suppress(aiohttp.ClientConnectionError):
            async with aiohttp.ClientSession() as session:
                headers = {"Authorization": f"Bearer {token}"}
                async with session.get(address(operator), headers=headers, ssl=unverified()) as answer:
                    await answer.read()
                    return answer.status
    return 0


def silent(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def address(operator: OperatorProcess) -> str:
    return f"https://127.0.0.1:{operator.metrics_port}/metrics"


def unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def lease(api: ApiClient) -> dict[str, str]:
    [found] = api.list("leases", OPERATOR_NAMESPACE)
    spec: dict[str, str] = found["spec"]
    return spec


def renewed(spec: dict[str, str]) -> datetime:
    return datetime.fromisoformat(spec["renewTime"])
