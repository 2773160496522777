"""A hostile tenant beside the jobs of a soak: it stores and deletes objects in a namespace of its own."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from rljob_testing.hostile_tenant import HostileObject, Victim, hostile_objects
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.patience import PATIENCE_SECONDS, Deadline
from rljob_testing.soak.cluster import ApiServerAway, Object, SoakCluster

NAMESPACE = "soak-tenant"
_BATCH = 50
_BATCHES_KEPT = 10
_PAUSE_SECONDS = 5.0
_BATCH_SECONDS = 30.0
"""Between batches. At a higher rate, the API server alone takes one of two cores, and no job gets ahead."""
_MAX_PODS = 6
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
        for manifest in (_namespace(), _quota()):
            self.cluster.kubectl("apply", "-f", "-", manifest=json.dumps(manifest), namespace=NAMESPACE)
        api = ApiClient.from_kubeconfig(self.cluster.layout.kubeconfig)
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
        self.cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--wait=false")
        self._wait_until_empty()
        return self.stored

    def _wait_until_empty(self) -> None:
        """Kubernetes may take minutes more to remove the namespace itself."""
        deadline = Deadline(PATIENCE_SECONDS)
        listing = ("get", ",".join(_OF_JOBS), "--ignore-not-found", "--output=name")
        while left := self.cluster.kubectl(*listing, namespace=NAMESPACE):
            assert not deadline.passed, f"hostile objects are left: {left}"
            time.sleep(_PAUSE_SECONDS)

    def _victim(self) -> Victim:
        """The latest honest job, or one that does not exist."""
        metadata: list[Object] = [job["metadata"] for job in self.cluster.jobs()]
        latest = max(metadata, key=lambda found: found["creationTimestamp"], default={"name": "none", "uid": "none"})
        return Victim(latest["name"], latest["uid"])

    def _store(self, api: ApiClient, hostile: HostileObject, batch: int) -> None:
        text = hostile.text.replace('"hostile-', f'"hostile-{batch}-', 1)
        with suppress(httpx.HTTPError):  # the API server is away, as faults have it
            if api.post_text(hostile.path(NAMESPACE), text) == 201:
                self.stored[hostile.kind] += 1

    def _delete_all(self) -> None:
        """Best effort: a busy API server takes long for so many large objects, and the namespace goes at the end."""
        for plural in _PLURALS:
            with suppress(ApiServerAway):
                self.cluster.delete(plural, "--all", "--request-timeout=60s", namespace=NAMESPACE)


def _namespace() -> Object:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}


def _quota() -> Object:
    metadata = {"name": "pods", "namespace": NAMESPACE}
    return {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": metadata,
        "spec": {"hard": {"pods": str(_MAX_PODS)}},
    }
