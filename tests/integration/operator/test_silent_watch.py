"""A watch whose connection stays open and says nothing any more, as behind some load balancers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rljob_operator.kube.client import ApiClient as OperatorClient
from rljob_operator.kube.connection import connect
from rljob_operator.kube.resources import STEP_REPORTS
from rljob_operator.kube.watch import Key, Reflector, key_of
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.fault_proxy import FaultProxy

INACTIVITY_SECONDS = 10.0
"""A minute and more in an installation: the API server sends a bookmark once a minute."""


class Names:
    """A sink that keeps the names of what there is."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def put(self, obj: dict[str, Any]) -> None:
        self.names.add(key_of(obj)[1])

    def remove(self, obj: dict[str, Any]) -> None:
        self.names.discard(key_of(obj)[1])

    def keep_only(self, keys: set[Key], resource_version: str, namespace: str | None) -> None:
        self.names &= {name for _, name in keys}


def test_what_a_silent_watch_kept_back_is_seen_by_the_next_one(
    operator_kubeconfig: Path, proxy: FaultProxy, api: ApiClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(operator_kubeconfig))
    sink = Names()

    def create(name: str) -> None:
        report = {"apiVersion": "rljob.dev/v1alpha1", "kind": "StepReport", "metadata": {"name": name}}
        api.create("stepreports", report, namespace)

    async def story() -> None:
        client = OperatorClient(connect(), concurrency=2)
        reflector = Reflector(client, STEP_REPORTS, sink, namespace=namespace, inactivity_seconds=INACTIVITY_SECONDS)
        watching = asyncio.create_task(reflector.run())
        try:
            await asyncio.wait_for(reflector.synced.wait(), 60)
            create("before")
            await until(sink, {"before"})
            opened = proxy.counts(namespace)["watch stepreports"]
            assert proxy.silence_watches("stepreports") >= 1
            create("in-silence")
            await until(sink, {"before", "in-silence"})
            assert proxy.counts(namespace)["watch stepreports"] > opened, "nothing comes through a silent watch"
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await client.close()

    asyncio.run(story())


async def until(sink: Names, names: set[str]) -> None:
    async with asyncio.timeout(10 * INACTIVITY_SECONDS):
        while sink.names != names:
            await asyncio.sleep(0.05)
