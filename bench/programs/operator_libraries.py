"""The operator's watches and writes compared with kopf and the package `kubernetes`: CPU time and memory.

    python -m bench.programs.operator_libraries [--objects 2000]

Each method runs in a process of its own on one API server. A watch lists pods or RLJobs and receives five changes of
each status, into the operator's cache. A client patches each pod twice, 24 at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
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
from rljob_testing.operator.api_client import ResourceClient as TestClient
from rljob_testing.patience import eventually

CHANGES, CONCURRENCY = 5, 24
QUIET_SECONDS = 8.0
"""Time after the last change within which each watch has received it."""
WATCHES = ("operator", "kopf", "tuned kopf")
METHODS = {"pods": WATCHES, "rljobs": WATCHES, "writes": ("operator", "call_api")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=2000)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        subject, method = arguments.measure
        measure = write if subject == "writes" else watch
        figures = asyncio.run(measure(subject, method, arguments.objects))
        print(json.dumps({"subject": subject, "method": method, **figures}))
        return
    with control_plane(24700, scheduler=False) as plane:
        os.environ["KUBECONFIG"] = str(plane.kubeconfig)
        api = TestClient.from_kubeconfig(plane.kubeconfig)
        names = [f"job-{number}" for number in range(arguments.objects)]
        eventually(partial(api.find, "serviceaccounts", "default", NAMESPACE), "the namespace's ServiceAccount")
        in_parallel(lambda name: api.create("rljobs", manifests.job(name), NAMESPACE), names)
        in_parallel(lambda name: api.create("pods", pod(name), NAMESPACE), names)
        rows = [run(api, names, subject, method) for subject, methods in METHODS.items() for method in methods]
    note = f"{arguments.objects} objects; watches receive {CHANGES} changes of each, clients write each twice"
    print(record("operator_libraries", rows, note))


def pod(name: str) -> Object:
    env = [{"name": f"RLJOB_VARIABLE_{number}", "value": "a value of usual length" * 2} for number in range(25)]
    container = {"name": "rljob", "image": "trainer:1", "env": env, "resources": {"requests": {"memory": "1Gi"}}}
    metadata = {"name": name, "labels": {"rljob.dev/job-name": name, "rljob.dev/role": "policy"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


def run(api: TestClient, names: list[str], subject: str, method: str) -> Object:
    """The row of one method, measured in a new process."""
    command = [sys.executable, "-m", "bench.programs.operator_libraries", "--objects", str(len(names))]
    with subprocess.Popen([*command, "--measure", subject, method], stdin=-1, stdout=-1, text=True) as process:
        if subject != "writes" and process.stdout and process.stdout.readline():  # all objects are listed
            for number in range(CHANGES):
                in_parallel(partial(change_status, api, subject, number=number), names)
        row: Object = json.loads(process.communicate("changed")[0])
    print(row, flush=True)
    return row


def change_status(api: TestClient, plural: str, name: str, number: int) -> None:
    if plural == "rljobs":
        api.merge(plural, name, {"status": {"step": number}}, NAMESPACE, "status")
    else:
        ready = {"type": "Ready", "status": "True" if number % 2 else "False"}
        api.patch_status(plural, name, {"message": f"change {number}", "conditions": [ready]}, NAMESPACE)


async def watch(plural: str, method: str, objects: int) -> dict[str, float]:
    observer = Observer(("nvidia.com/gpu",), lambda _: None)
    resource = PODS if plural == "pods" else RLJOBS
    cache: Cache[Any] = observer.pods if plural == "pods" else observer.jobs
    client, before, rss_bytes = ApiClient(await connect(), concurrency=1), time.process_time(), resident_bytes()
    own = method == "operator"
    watching = asyncio.create_task(
        Reflector(client, resource, cache).run() if own else watch_with_kopf(resource, cache, method)
    )
    while len(cache) < objects and not watching.done():
        await asyncio.sleep(0.2)
    listed = time.process_time()
    print("listed", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await asyncio.sleep(QUIET_SECONDS)
    seconds = {"list_cpu_seconds": listed - before, "changes_cpu_seconds": time.process_time() - listed}
    watching.cancel()
    await client.close()
    return {name: round(value, 2) for name, value in seconds.items()} | {"growth_bytes": resident_bytes() - rss_bytes}


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


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


async def write(_: str, method: str, objects: int) -> dict[str, float]:
    connection, slots = await connect(), asyncio.Semaphore(CONCURRENCY)
    connection.configuration.connection_pool_maxsize = CONCURRENCY
    own, package = ApiClient(connection, concurrency=CONCURRENCY), PackageClient(connection.configuration)
    headers = {"Content-Type": "application/merge-patch+json", "Accept": "application/json"}

    async def patch(name: str, value: int) -> None:
        body = {"metadata": {"annotations": {"round": f"{method} {value}"}}}
        async with slots:
            if method == "operator":
                await own.patch(PODS, name, body, NAMESPACE)
            else:
                path, auth = PODS.path(NAMESPACE, name), ["BearerToken"]
                request = await package.param_serialize("PATCH", path, None, None, headers, body, auth_settings=auth)
                json.loads(await (await package.call_api(*request)).read())

    before = time.process_time()
    for value in range(2):
        await asyncio.gather(*(patch(f"job-{number}", value) for number in range(objects)))
    await asyncio.gather(own.close(), package.close())
    return {"writes": 2 * objects, "cpu_seconds": round(time.process_time() - before, 2)}


if __name__ == "__main__":
    main()
