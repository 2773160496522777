"""The soak: streams of jobs, faults at their times, then a search for leaks."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from rljob_testing.hostile_tenant import HostileObject, Victim, hostile_objects
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_testing.soak import processes
from rljob_testing.soak.cluster import ApiServerAway, Object, SoakCluster
from rljob_testing.soak.faults import InjectedSoakFault, PlannedFault, inject, planned_faults
from rljob_testing.soak.jobs import JobStream
from rljob_testing.soak.leaks import find_leaks, used_bytes
from rljob_testing.soak.report import Footprint, Soak

TENANT_NAMESPACE = "soak-tenant"
_BATCH = 50
_BATCHES_KEPT = 10
_PAUSE_SECONDS = 5.0
_BATCH_SECONDS = 30.0
"""Between batches. At a higher rate, the API server alone takes one of two cores, and no job gets ahead."""
_TENANT = f"""
apiVersion: v1
kind: Namespace
metadata: {{name: {TENANT_NAMESPACE}}}
---
apiVersion: v1
kind: ResourceQuota
metadata: {{name: pods, namespace: {TENANT_NAMESPACE}}}
spec: {{hard: {{pods: "6"}}}}
"""
"""The tenant may not take the machine from the others: that is what quotas are for."""
_OF_JOBS = ("rljobs", "stepreports", "pods")
_PLURALS = (*_OF_JOBS, "services", "configmaps")


@dataclass(slots=True)
class HostileTenant:
    """Stores batches of objects; after some batches it deletes them all and begins again."""

    cluster: SoakCluster
    seed: int
    ends: float
    """By `time.monotonic()`."""
    log: Callable[[str], None]
    stored: Counter[str] = field(default_factory=Counter)
    """Objects that the API server took, by kind of hostility."""

    def run(self) -> Counter[str]:
        """Returns `stored` when the namespace is empty and being deleted. Raises ApiServerAway."""
        self.cluster.kubectl("apply", "-f", "-", manifest=_TENANT, namespace=TENANT_NAMESPACE)
        api = ResourceClient.from_kubeconfig(self.cluster.layout.kubeconfig)
        for batch in itertools.count():
            if time.monotonic() > self.ends:
                break
            for hostile in hostile_objects(self.seed + batch, _BATCH, self._victim()):
                self._store(api, hostile, batch)
            self.log(f"hostile tenant: {self.stored.total()} objects stored")
            if batch % _BATCHES_KEPT == _BATCHES_KEPT - 1:
                self._delete_all()
            time.sleep(_BATCH_SECONDS)
        self._delete_all()
        self.cluster.kubectl("delete", "namespace", TENANT_NAMESPACE, "--ignore-not-found", "--wait=false")
        self._wait_until_empty()
        return self.stored

    def _wait_until_empty(self) -> None:
        """Kubernetes may take minutes more to remove the namespace itself."""
        deadline = Deadline(PATIENCE_SECONDS)
        listing = ("get", ",".join(_OF_JOBS), "--ignore-not-found", "--output=name")
        while left := self.cluster.kubectl(*listing, namespace=TENANT_NAMESPACE):
            assert not deadline.passed, f"hostile objects are left: {left}"
            time.sleep(_PAUSE_SECONDS)

    def _victim(self) -> Victim:
        """The latest honest job, or one that does not exist."""
        metadata: list[Object] = [job["metadata"] for job in self.cluster.jobs()]
        latest = max(metadata, key=lambda found: found["creationTimestamp"], default={"name": "none", "uid": "none"})
        return Victim(latest["name"], latest["uid"])

    def _store(self, api: ResourceClient, hostile: HostileObject, batch: int) -> None:
        text = hostile.text.replace('"hostile-', f'"hostile-{batch}-', 1)
        with suppress(httpx.HTTPError):  # the API server is away, as faults have it
            if api.post_text(hostile.path(TENANT_NAMESPACE), text) == 201:
                self.stored[hostile.kind] += 1

    def _delete_all(self) -> None:
        """Best effort: a busy API server takes long for many large objects, and the namespace goes at the end."""
        for plural in _PLURALS:
            with suppress(ApiServerAway):
                self.cluster.delete(plural, "--all", "--request-timeout=60s", namespace=TENANT_NAMESPACE)


_LAST_START_SECONDS = 60.0
"""No job starts in the last minute of the faults."""
_TO_END_SECONDS = 900.0
"""Time for jobs to end after the last fault: the longest delay between two attempts, and a long job."""
_TO_SETTLE_SECONDS = PATIENCE_SECONDS
"""The kubelet cleans up after a pod about once a minute."""
_LOOK_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class SoakSettings:
    """Size and seed of a soak."""

    seed: int
    minutes: float
    """Minutes of faults; jobs that run then are followed to their end."""
    streams: int
    """Jobs at a time."""
    folder: Path
    """Folder for the status and ledger of each job."""
    hostile_tenant: bool = False
    """Let a tenant store hostile objects in another namespace during the block."""


def run_soak(settings: SoakSettings, cluster: SoakCluster, log: Callable[[str], None]) -> Soak:
    """Run a soak. Raises ApiServerAway or ClusterError if the cluster does not recover from a fault."""
    cluster.delete_namespace()
    cluster.create_namespace()
    before, leaked_before = _footprint(cluster), find_leaks(cluster)
    began = time.monotonic()
    ends = began + 60 * settings.minutes
    with ThreadPoolExecutor(settings.streams + 1) as threads:
        tenant = (
            threads.submit(HostileTenant(cluster, settings.seed, ends, log).run) if settings.hostile_tenant else None
        )
        streams = [threads.submit(stream.run) for stream in _streams(settings, cluster, ends, log)]
        faults = _inject_all(planned_faults(settings.seed, 60 * settings.minutes), began, cluster, log)
        log("no more faults")
        outcomes = [outcome for stream in streams for outcome in stream.result()]
        hostile = dict(tenant.result()) if tenant else {}
    left = _settled_leaks(leaked_before, cluster)
    soak = Soak(
        seed=settings.seed,
        minutes=settings.minutes,
        streams=settings.streams,
        seconds=time.monotonic() - began,
        outcomes=outcomes,
        faults=faults,
        before=before,
        after=_footprint(cluster),
        leaks=left,
        kubernetes=cluster.version(),
        hostile_objects=hostile,
    )
    cluster.delete_namespace()
    return soak


def _streams(settings: SoakSettings, cluster: SoakCluster, ends: float, log: Callable[[str], None]) -> list[JobStream]:
    settings.folder.mkdir(parents=True, exist_ok=True)
    last_start, deadline = ends - _LAST_START_SECONDS, ends + _TO_END_SECONDS
    return [
        JobStream(number, settings.seed, cluster, last_start, deadline, settings.folder, log)
        for number in range(settings.streams)
    ]


def _inject_all(
    planned: Sequence[PlannedFault], began: float, cluster: SoakCluster, log: Callable[[str], None]
) -> list[InjectedSoakFault]:
    faults = []
    for fault in planned:
        time.sleep(max(0.0, began + fault.at_seconds - time.monotonic()))
        done = inject(fault, cluster)
        log(f"{fault.kind}: {done.target if done else 'no target'}")
        faults += [done] if done else []
    return faults


def _settled_leaks(leaked_before: set[str], cluster: SoakCluster) -> list[str]:
    deadline = Deadline(_TO_SETTLE_SECONDS)
    while (left := find_leaks(cluster) - leaked_before) and not deadline.passed:
        time.sleep(_LOOK_SECONDS)
    return sorted(left)


def _footprint(cluster: SoakCluster) -> Footprint:
    uids = [pod["metadata"]["uid"] for pod in cluster.operator_pods()]
    running = [found for uid in uids for found in processes.processes_of_pod(uid)]
    return Footprint(used_bytes(cluster), max((found.resident_bytes() for found in running), default=0))
