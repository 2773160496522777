"""Kinds of objects that the operator reads and writes, and their paths in the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rljob_api.metadata import GROUP, VERSION

Object = dict[str, Any]
"""An object as plain data."""


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object. `group` is empty for the core API."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Path of the collection, of one object in it, or of a part of that object."""
        parts = ["/apis" if self.group else "/api", self.api_version]
        if namespace is not None and self.namespaced:
            parts += ["namespaces", namespace]
        return "/".join([*parts, self.plural, *(part for part in (name, subresource) if part)])


RLJOBS = Resource(GROUP, VERSION, "RLJob", "rljobs")
STEP_REPORTS = Resource(GROUP, VERSION, "StepReport", "stepreports")
MEMORY_PROFILES = Resource(GROUP, VERSION, "MemoryProfile", "memoryprofiles")
PODS = Resource("", "v1", "Pod", "pods")
WORKLOADS = Resource("kueue.x-k8s.io", "v1beta2", "Workload", "workloads")
NODES = Resource("", "v1", "Node", "nodes", namespaced=False)
LEASES = Resource("coordination.k8s.io", "v1", "Lease", "leases")
EVENTS = Resource("events.k8s.io", "v1", "Event", "events")
TOKEN_REVIEWS = Resource("authentication.k8s.io", "v1", "TokenReview", "tokenreviews", namespaced=False)
SUBJECT_ACCESS_REVIEWS = Resource(
    "authorization.k8s.io", "v1", "SubjectAccessReview", "subjectaccessreviews", namespaced=False
)
ENDPOINT_SLICES = Resource("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices")
SECRETS = Resource("", "v1", "Secret", "secrets")
CONFIG_MAPS = Resource("", "v1", "ConfigMap", "configmaps")

WORKLOAD_OWNERS = {
    ("batch", "Job"): "jobs",
    ("jobset.x-k8s.io", "JobSet"): "jobsets",
    ("ray.io", "RayCluster"): "rayclusters",
    ("ray.io", "RayJob"): "rayjobs",
    ("trainer.kubeflow.org", "TrainJob"): "trainjobs",
}
"""Resources, by group and kind, that own labelled pods. Their version is that of the owner reference."""

_WRITTEN_FOR_JOBS = (
    RLJOBS,
    STEP_REPORTS,
    MEMORY_PROFILES,
    PODS,
    CONFIG_MAPS,
    Resource("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    SECRETS,
    Resource("", "v1", "Service", "services"),
    Resource("", "v1", "ServiceAccount", "serviceaccounts"),
    Resource("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies"),
    Resource("rbac.authorization.k8s.io", "v1", "Role", "roles"),
    Resource("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings"),
    Resource("scheduling.volcano.sh", "v1beta1", "PodGroup", "podgroups"),
)
_RESOURCES_BY_KIND = {(resource.api_version, resource.kind): resource for resource in _WRITTEN_FOR_JOBS}


def workloads_served(groups: Mapping[str, str]) -> Resource:
    """Kueue's Workloads in the version that the API server prefers: v1beta1 before Kueue 0.15.

    `groups`: API groups with their preferred versions.
    """
    return replace(WORKLOADS, version=groups.get(WORKLOADS.group) or WORKLOADS.version)


def resource_of(manifest: Object) -> Resource:
    """The resource that a manifest belongs to. Raises KeyError for kinds that the operator does not make."""
    return _RESOURCES_BY_KIND[(manifest["apiVersion"], manifest["kind"])]


def micro_time() -> str:
    """The present time, as a MicroTime of Kubernetes."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def revision(resource_version: str) -> int:
    """A resourceVersion as a number: within one resource the greater is the newer.

    Kubernetes promises this order from 1.35 on (KEP-5504) and has kept it since 1.0.
    """
    return int(resource_version)
