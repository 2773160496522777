"""The operator's watches and writes compared with kopf and the package `kubernetes`: CPU time and memory.

    python -m bench.programs.operator_libraries [--objects 2000] [--rounds 5]

Each method runs in a process of its own on one API server. A watch lists `--objects` pods or RLJobs and receives
`--rounds` changes of each status, into the operator's cache. A client patches each pod twice, 24 at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import kopf
import psutil
from kubernetes.aio.client import ApiClient as PackageClient

from bench.harness.operator_cluster import NAMESPACE, control_plane, in_parallel
from bench.harness.record import record
from rljob_operator.kube.client import ApiClient, connect
from rljob_operator.kube.resources import PODS, RLJOBS, Object, Resource
from rljob_operator.kube.watch import Reflector
from rljob_operator.observe.cache import Cache
from rljob_operator.observe.observer import Observer
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ApiClient as TestClient
from rljob_testing.patience import eventually

CONCURRENCY = 24
QUIET_SECONDS = 8.0
"""Time after the last change within which each watch has received it."""
WATCHES = ("operator", "kopf", "tuned kopf")
METHODS = {"pods": WATCHES, "rljobs": WATCHES, "writes": ("operator", "call_api")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        subject, method = arguments.measure
        measure = measure_writes if subject == "writes" else measure_watch
        figures = asyncio.run(measure(subject, method, arguments.objects))
        print(json.dumps({"subject": subject, "method": method, **figures}))
        return
    with control_plane(24700, scheduler=False) as plane:
        api = TestClient.from_kubeconfig(plane.kubeconfig)
        names = [f"job-{number}" for number in range(arguments.objects)]
        eventually(partial(api.find, "serviceaccounts", "default", NAMESPACE), "the namespace's ServiceAccount")
        in_parallel(lambda name: api.create("rljobs", manifests.job(name), NAMESPACE), names)
        in_parallel(lambda name: api.create("pods", pod(name), NAMESPACE), names)
        os.environ["KUBECONFIG"] = str(plane.kubeconfig)
        rows = [
            run(subject, method, arguments.objects, partial(change, api, subject, names, arguments.rounds))
            for subject, methods in METHODS.items()
            for method in methods
        ]
    note = f"{arguments.objects} objects; watches receive {arguments.rounds} changes of each, clients write each twice"
    print(record("operator_libraries", rows, note))


def pod(name: str) -> Object:
    env = [{"name": f"RLJOB_VARIABLE_{number}", "value": "a value of usual length" * 2} for number in range(25)]
    labels = {"rljob.dev/job-name": name, "rljob.dev/role": "policy"}
    container = {"name": "rljob", "image": "trainer:1", "env": env, "resources": {"requests": {"memory": "1Gi"}}}
    metadata, spec = {"name": name, "labels": labels}, {"containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def run(subject: str, method: str, objects: int, change: Callable[[], None]) -> dict[str, Any]:
    """The row of one method, measured in a new process; `change` is called when its watch has listed all objects."""
    command = [sys.executable, "-m", "bench.programs.operator_libraries", "--measure", subject, method]
    with subprocess.Popen([*command, "--objects", str(objects)], stdin=-1, stdout=-1, text=True) as process:
        if subject != "writes" and process.stdout and process.stdout.readline():
            change()
        row: dict[str, Any] = json.loads(process.communicate("changed")[0])
    print(row, flush=True)
    return row


def change(api: TestClient, plural: str, names: list[str], rounds: int) -> None:
    for number in range(rounds):
        ready = {"type": "Ready", "status": "True" if number % 2 else "False"}
        if plural == "pods":
            change = partial(api.patch_status, status={"message": f"round {number}", "conditions": [ready]})
        else:
            change = partial(api.merge, patch={"status": {"step": number}}, subresource="status")
        in_parallel(partial(change, plural, namespace=NAMESPACE), names)


async def measure_watch(plural: str, method: str, objects: int) -> dict[str, float]:
    observer = Observer(("nvidia.com/gpu",), lambda _: None)
    resource = PODS if plural == "pods" else RLJOBS
    cache: Cache[Any] = observer.pods if plural == "pods" else observer.jobs
    client = ApiClient(await connect(), concurrency=1)
    usage = Usage()
    own = method == "operator"
    watch = Reflector(client, resource, cache).run() if own else watch_with_kopf(resource, cache, method)
    watching = asyncio.create_task(watch)
    while len(cache) < objects and not watching.done():
        await asyncio.sleep(0.2)
    listed = usage.cpu_seconds()
    print("listed", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.sleep(QUIET_SECONDS)
    figures = {"list_cpu_seconds": listed, "changes_cpu_seconds": round(usage.cpu_seconds() - listed, 2)}
    watching.cancel()
    await client.close()
    return figures | {"memory_growth_bytes": usage.memory_growth_bytes()}


class Usage:
    """CPU time and memory of this process since the object was made."""

    def __init__(self) -> None:
        self._cpu_seconds = time.process_time()
        self._rss_bytes = psutil.Process().memory_info().rss

    def cpu_seconds(self) -> float:
        return round(time.process_time() - self._cpu_seconds, 2)

    def memory_growth_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss - self._rss_bytes)


async def watch_with_kopf(resource: Resource, cache: Any, method: str) -> None:
    """Feed the cache by `@kopf.on.event`; tuned: without the storages and delays that only other handlers need."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled, settings.posting.enabled = True, False
    if method == "tuned kopf":
        settings.persistence.diffbase_storage, settings.persistence.progress_storage = NoDiffBase([]), NoProgress([])
        settings.persistence.consistency_timeout, settings.queueing.idle_timeout = 0.0, 0.05

    @kopf.on.event(resource.group, resource.version, resource.plural)
    def changed(event: kopf.RawEvent, **_: Any) -> None:
        (cache.remove if event["type"] == "DELETED" else cache.put)(event["object"])

    await kopf.operator(settings=settings, standalone=True, clusterwide=True)


class NoDiffBase(kopf.MultiDiffBaseStorage):
    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()


class NoProgress(kopf.MultiProgressStorage):
    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


async def measure_writes(_: str, method: str, objects: int) -> dict[str, float]:
    connection = await connect()
    connection.configuration.connection_pool_maxsize = CONCURRENCY
    own, package = ApiClient(connection, concurrency=CONCURRENCY), PackageClient(connection.configuration)
    headers = {"Content-Type": "application/merge-patch+json", "Accept": "application/json"}
    slots, usage = asyncio.Semaphore(CONCURRENCY), Usage()

    async def patch(name: str, value: int) -> None:
        body = {"metadata": {"annotations": {"round": f"{method} {value}"}}}
        async with slots:
            if method == "operator":
                await own.patch(PODS, name, body, NAMESPACE)
            else:
                path, auth = PODS.path(NAMESPACE, name), ["BearerToken"]
                request = await package.param_serialize("PATCH", path, None, None, headers, body, auth_settings=auth)
                json.loads(await (await package.call_api(*request)).read())

    for value in range(2):
        await asyncio.gather(*(patch(f"job-{number}", value) for number in range(objects)))
    figures = {"writes": 2 * objects, "cpu_seconds": usage.cpu_seconds()}
    await asyncio.gather(own.close(), package.close())
    return figures | {"memory_growth_bytes": usage.memory_growth_bytes()}


if __name__ == "__main__":
    main()
