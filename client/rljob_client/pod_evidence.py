"""Evidence of pods in a cluster: logs, earlier logs, and termination messages."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rljob_api.metadata import JOB_NAME_LABEL
from rljob_client.api_errors import KubernetesError, ObjectMissing
from rljob_client.api_server import ApiServer
from rljob_memory.evidence import KUBELETS_REPORT

_LABELS = (
    JOB_NAME_LABEL,
    "batch.kubernetes.io/job-name",
    "job-name",
    "jobset.sigs.k8s.io/jobset-name",
    "ray.io/cluster",
    "training.kubeflow.org/job-name",
)
"""Labels with the name of an RLJob, a Job (of old clusters too), a JobSet, a RayCluster, a PyTorchJob. The JobSet of a
TrainJob has the TrainJob's name."""


@contextmanager
def collect_pods(api: ApiServer, *, pods: Sequence[str], job: str | None) -> Iterator[list[Path]]:
    """Directories, one for each pod, with its logs and the termination messages of its containers.

    They exist within the block. `job`: a job of any kind, all of whose pods are read. Raises KubernetesError if there
    is no such pod, or the cluster refuses.
    """
    found = [_pod(api, name) for name in pods]
    if job:
        found += _pods_of(api, job)
    with tempfile.TemporaryDirectory(prefix="rljob-diagnose-") as root:
        directories = []
        for pod in found:
            directory = Path(root, pod["metadata"]["name"])
            directory.mkdir(exist_ok=True)
            _save(api, pod, directory)
            directories.append(directory)
        yield directories


def _pod(api: ApiServer, name: str) -> dict[str, Any]:
    pod = api.find("pods", name)
    if pod is None:
        raise ObjectMissing(f"expected a pod {name}, found none; check its name, and --namespace")
    return pod


def _pods_of(api: ApiServer, job: str) -> list[dict[str, Any]]:
    """The pods of all workloads of that name: a RayJob has a RayCluster and a Job that submits it."""
    selectors = [f"{label}={job}" for label in _LABELS]
    if cluster := _cluster_of_ray_job(api, job):
        selectors.append(f"ray.io/cluster={cluster}")
    found: dict[str, dict[str, Any]] = {}
    for selector in selectors:
        for pod in api.list("pods", labelSelector=selector):
            found.setdefault(pod["metadata"]["name"], pod)
    if not found:
        raise ObjectMissing(f"expected pods of the job {job}, found none; check --namespace, or name a --pod")
    return list(found.values())


def _cluster_of_ray_job(api: ApiServer, job: str) -> str | None:
    """Name of the RayCluster that KubeRay has made for a RayJob; None if there is no such RayJob, or no KubeRay."""
    try:
        ray_job = api.find("rayjobs", job)
    except KubernetesError:
        return None
    name: str | None = (ray_job or {}).get("status", {}).get("rayClusterName")
    return name


def _save(api: ApiServer, pod: dict[str, Any], directory: Path) -> None:
    """Write what is left of the pod. Logs that are gone are left out."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        for key, previous in (("lastState", True), ("state", False)):
            with suppress(KubernetesError):
                log = b"".join(api.log(name, container=container["name"], previous=previous))
                (directory / f"{container['name']}{'.previous' if previous else ''}.log").write_bytes(log)
            if ended := container.get(key, {}).get("terminated"):
                _save_end(ended, directory / f"{container['name']}.{key}")
    if status.get("message"):
        (directory / "status.log").write_text(f"{status.get('reason', '')}: {status['message']}\n", encoding="utf-8")


def _save_end(ended: dict[str, Any], path: Path) -> None:
    """The message as it is, which may be JSON; and a line with reason and exit code."""
    if message := ended.get("message"):
        path.with_suffix(path.suffix + ".message").write_text(message, encoding="utf-8")
    end = f"{ended.get('finishedAt', '')} reason: {ended.get('reason', '')}, exit code: {ended.get('exitCode')}\n"
    path.with_suffix(path.suffix + KUBELETS_REPORT).write_text(end, encoding="utf-8")
