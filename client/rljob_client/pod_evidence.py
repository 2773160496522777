"""Evidence of pods, read by kubectl with the user's kubeconfig: logs, earlier logs, and termination messages."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rljob_client.kubectl import Kubectl, KubectlError
from rljob_memory.evidence import KUBELETS_REPORT

_LABELS = (
    "rljob.dev/job-name",
    "batch.kubernetes.io/job-name",
    "job-name",
    "jobset.sigs.k8s.io/jobset-name",
    "ray.io/cluster",
    "training.kubeflow.org/job-name",
)
"""Labels with the name of an RLJob, a Job (of old clusters too), a JobSet, a RayCluster, a PyTorchJob. The JobSet of a
TrainJob has the TrainJob's name."""


@contextmanager
def collect_pods(*, pods: Sequence[str], job: str | None, namespace: str | None) -> Iterator[list[Path]]:
    """Directories, one for each pod, with its logs and the termination messages of its containers.

    They exist within the block. Raises `ClusterError` if kubectl is missing or refuses, or there is no such pod.
    """
    if not pods and not job:
        yield []
        return
    kubectl = Kubectl(namespace=namespace)
    found = [_pod(kubectl, name) for name in pods]
    if job:
        found += _pods_of(kubectl, job)
    with tempfile.TemporaryDirectory(prefix="rljob-diagnose-") as root:
        directories = []
        for pod in found:
            directory = Path(root, pod["metadata"]["name"])
            directory.mkdir(exist_ok=True)
            _save(kubectl, pod, directory)
            directories.append(directory)
        yield directories


def _pod(kubectl: Kubectl, name: str) -> dict[str, Any]:
    pod = kubectl.find("pod", name)
    if pod is None:
        raise KubectlError(f"expected a pod {name}, found none; check its name, and --namespace")
    return pod


def _pods_of(kubectl: Kubectl, job: str) -> list[dict[str, Any]]:
    """The pods of all workloads of that name: a RayJob has a RayCluster and a Job that submits it."""
    selectors = [f"{label}={job}" for label in _LABELS]
    if cluster := _cluster_of_ray_job(kubectl, job):
        selectors.append(f"ray.io/cluster={cluster}")
    found: dict[str, dict[str, Any]] = {}
    for selector in selectors:
        for pod in json.loads(kubectl.run("get", "pods", "--selector", selector, "-o", "json"))["items"]:
            found.setdefault(pod["metadata"]["name"], pod)
    if not found:
        raise KubectlError(f"expected pods of the job {job}, found none; check --namespace, or name a --pod")
    return list(found.values())


def _cluster_of_ray_job(kubectl: Kubectl, job: str) -> str | None:
    """Name of the RayCluster that KubeRay has made for a RayJob; None if there is no such RayJob, or no KubeRay."""
    try:
        ray_job = kubectl.find("rayjobs.ray.io", job)
    except KubectlError:
        return None
    name: str | None = (ray_job or {}).get("status", {}).get("rayClusterName")
    return name


def _save(kubectl: Kubectl, pod: dict[str, Any], directory: Path) -> None:
    """Write what is left of the pod. Logs that are gone are left out."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        for key, flags in (("lastState", ["--previous"]), ("state", [])):
            with suppress(KubectlError):
                log = kubectl.output("logs", name, "--container", container["name"], *flags)
                (directory / f"{container['name']}{'.previous' if flags else ''}.log").write_bytes(log)
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
