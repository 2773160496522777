"""Objects that a tenant may store affect no job but their own."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_cluster.control_plane import ControlPlane
from rljob_operator.kube.lease import ElectionTimes
from rljob_operator.reconcile.status import BURST, SECONDS_PER_WRITE
from rljob_testing.hostile_tenant import HostileObject, Victim, hostile_objects
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import eventually
from tests.integration.operator.conftest import Kubectl, run_kubectl

STALLED_MESSAGE = 'jsonpath={.status.conditions[?(@.type=="Stalled")].message}'


@pytest.fixture(autouse=True)
def the_operator_survives(operator: OperatorProcess) -> Iterator[None]:
    yield
    assert not operator.crashed, operator.end_of_log()
    eventually(lambda: operator.probe("healthz") == 200, "a healthy operator")


def test_deeply_nested_jobs_stop_no_other_job(job: WatchedJob, kubectl: Kubectl, operator: OperatorProcess) -> None:
    """Neither when they are created, nor when they are listed at the start."""
    deep = {f"levels-{levels}": '{"a":' * levels + "1" + "}" * levels for levels in (400, 1_200, 5_000)}
    deep["lists"] = "[" * 1_200 + "]" * 1_200
    for name, affinity in deep.items():
        hostile = json.dumps(manifests.job(name, policy={"template": {"spec": {"affinity": "DEEP"}}}))
        kubectl("create", "--validate=false", "-f", "-", stdin=hostile.replace('"DEEP"', affinity))
    job.create().run()
    for name in deep:
        stalled = eventually(lambda: kubectl("get", "rljob", name, "-o", STALLED_MESSAGE).stdout, "a condition")  # noqa: B023
        assert "levels of nesting" in stalled
    operator.stop()
    operator.start()
    job.complete()
    kubectl("delete", "rljob", *deep, "--timeout=240s")


def variables(count: int) -> dict[str, Any]:
    """A policy template with this number of variables of 16 bytes each."""
    return {"template": {"spec": {"containers": [{"env": [{"name": f"V{number:x}"} for number in range(count)]}]}}}


LARGE_JOBS: dict[str, dict[str, Any]] = {
    "too-many-large-pods": {"replicas": 1024, **variables(3_400)},
    "one-pod-too-large": {"replicas": 16, **variables(45_000)},
    "as-large-as-allowed": {"replicas": 16, **variables(12_000)},
}


def test_large_templates_with_many_replicas_delay_neither_probes_nor_jobs(
    job: WatchedJob,
    api: ResourceClient,
    kubectl: Kubectl,
    operator: OperatorProcess,
    namespace: str,
    control_plane: ControlPlane,
) -> None:
    tenant = f"{namespace}-tenant"
    api.create("namespaces", manifests.namespace(tenant))
    eventually(lambda: api.find("serviceaccounts", "default", tenant), "the tenant's namespace")
    process, seconds, stop = operator.process.pid, list[float](), threading.Event()

    def probe() -> None:
        while not stop.wait(0.05):
            began = time.monotonic()
            assert operator.probe("healthz") == 200
            seconds.append(time.monotonic() - began)

    with ThreadPoolExecutor(1) as pool:
        probing = pool.submit(probe)
        for name, policy in LARGE_JOBS.items():
            api.create("rljobs", manifests.job(name, policy=policy), tenant)
        job.create().run()
        for name in ("too-many-large-pods", "one-pod-too-large"):
            large = WatchedJob(api, job.kubelet, tenant, name)
            assert "expected at most" in large.wait_for(ConditionType.STALLED)["message"]
        eventually(lambda: api.find("pods", "as-large-as-allowed-policy-15", tenant), "all pods of the allowed job")
        job.complete()
        stop.set()
        probing.result()
    assert operator.process.pid == process, "it has lost its Lease"
    # Through this process's proxy and on a busy machine; bench.programs.operator_large_templates has the figures.
    assert max(seconds) < ElectionTimes().renew_deadline
    assert operator.process.memory_info().rss < MEMORY_LIMIT_BYTES
    run_kubectl(control_plane, "delete", "rljobs", "--all", "--namespace", tenant, "--timeout=240s")
    api.delete("namespaces", tenant)


MEMORY_LIMIT_BYTES = 512 << 20
"""The chart's."""

KINDS = {"deep", "number", "time", "type", "large", "name", "pod", "replicated", "quantity", "annotations", "sidecars"}


@pytest.mark.parametrize("count", [120, pytest.param(500, marks=pytest.mark.long)])
def test_a_hostile_tenant_delays_no_honest_job(
    job: WatchedJob, api: ResourceClient, namespace: str, control_plane: ControlPlane, count: int
) -> None:
    """It stores objects in a namespace of its own, while an honest job runs to its end in another."""
    tenant = f"{namespace}-tenant"
    api.create("namespaces", manifests.namespace(tenant))
    eventually(lambda: api.find("serviceaccounts", "default", tenant), "the tenant's namespace")
    job.create().run(step=1)
    victim = Victim(job.name, job.object["metadata"]["uid"])
    stored: Counter[str] = Counter()

    def store(hostile: HostileObject) -> None:
        if api.post_text(hostile.path(tenant), hostile.text) == 201:
            stored[hostile.kind] += 1

    with ThreadPoolExecutor(4) as pool:
        storing = [pool.submit(store, hostile) for hostile in list(hostile_objects(1, count, victim))]
        job.report(5)
        eventually(lambda: job.status.get("step") == 5, "the report of the honest job")
        for done in storing:
            done.result()
    job.complete()
    assert [attempt["number"] for attempt in job.attempts] == [1]
    later = WatchedJob(api, job.kubelet, namespace, "later").create().run()
    later.complete()
    assert stored.keys() == KINDS
    assert stored.total() > count / 3, stored
    run_kubectl(control_plane, "delete", "rljobs", "--all", "--namespace", tenant, "--timeout=240s")
    api.delete("namespaces", tenant)


def test_a_flood_of_reports_delays_no_other_job(
    job: WatchedJob, api: ResourceClient, proxy: FaultProxy, namespace: str
) -> None:
    """One job reports as fast as it can: memory pressure that comes and goes, plans, and reports that are too large."""
    flooding = WatchedJob(api, job.kubelet, namespace, "flooding").create().run()
    stop, sent = threading.Event(), [0]

    def flood() -> None:
        while not stop.is_set():
            sent[0] += 1
            status = manifests.step_report("flooding", 1, 1)["status"] | CONTENTS[sent[0] % len(CONTENTS)]
            api.merge("stepreports", "flooding", {"status": status}, namespace, subresource="status")

    def status_writes() -> int:
        return sum(write.resource == "rljobs/status" for write in proxy.writes(namespace))

    thread = threading.Thread(target=flood)
    before, began = status_writes(), time.monotonic()
    thread.start()
    try:
        job.create()
        job.run()
        job.complete()
        eventually(lambda: sent[0] >= 80, "a flood", context=lambda: sent)
    finally:
        stop.set()
        thread.join()
    of_the_honest_job = 15
    bound = of_the_honest_job + BURST + (time.monotonic() - began) / SECONDS_PER_WRITE
    assert status_writes() - before <= bound, f"after {sent[0]} reports in {time.monotonic() - began:.1f} s"
    # The flood may end with a pressure, which an applied report leaves, since another manager of the field has set it.
    api.merge("stepreports", "flooding", {"status": {"memoryPressure": None}}, namespace, subresource="status")
    flooding.report(7)
    flooding.wait_for(ConditionType.MEMORY_PRESSURE, "False")
    eventually(
        lambda: flooding.status.get("step") == 7, "the last report in the status", context=lambda: flooding.status
    )


DIAGNOSIS = {"class": "Fragmentation", "confidence": 1, "message": "m" * 2048, "numbers": {}}
PRESSURE = {"role": "policy", "stepsLeft": 1, "diagnosis": DIAGNOSIS}
RANK = {"role": "policy", "phase": "update"} | {
    name: 2**53
    for name in ("allocatedBytes", "reservedBytes", "peakAllocatedBytes", "peakReservedBytes", "deviceFreeBytes")
}
EVIDENCE = {
    "time": "0001-01-01T00:00:00+14:00",
    "attempt": 1,
    "role": "policy",
    "rank": 0,
    "step": 1,
    "message": "é" * 4096,
}
CONTENTS: list[dict[str, Any]] = [
    {"memoryPressure": PRESSURE, "updateTime": "0001-01-01T00:00:00+14:00"},
    {"memoryPressure": None, "updateTime": "9999-12-31T23:59:59-14:00", "step": 2**53},
    {"memory": [RANK | {"rank": rank} for rank in range(256)], "lastEvidence": EVIDENCE},
    {"memory": [], "reward": 1e308, "plan": manifests.PLAN | {"excludedNodes": ["n" * 253] * 16}},
]
