"""Resources of a pod after the merge with the user's template: GPUs are checked, planned memory is applied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rljob_api.quantity import byte_quantity, quantity_value, shown
from rljob_api.topology import WorkerPods
from rljob_operator.objects.attempt import JobAttempt, template_path
from rljob_operator.objects.pod_layout import predicted_limit_bytes
from rljob_operator.objects.pod_template import Pod, is_controller, limits_and_requests, own_container
from rljob_operator.objects.pod_volumes import SHARED_MEMORY_VOLUME
from rljob_operator.objects.strategic_merge import InvalidTemplate

_GPU = re.compile(r"nvidia\.com/mig-.*|[^/]*gpu[^/]*/.*|.*/.*gpu.*", re.IGNORECASE)
"""Resources that are GPUs by their name: amd.com/gpu, gpu.intel.com/i915, nvidia.com/mig-1g.5gb. Not network adapters
such as nvidia.com/hostdev, which workers may need."""

_COUNT = re.compile("[0-9]{1,9}")
"""A number of GPUs. `int` takes more texts, such as ² and a number of any length."""


def refuse_gpus(attempt: JobAttempt, pod: Pod, path: str) -> None:
    """Raise InvalidTemplate if a container of the controller pod requests a GPU."""
    for container, resource in _requested_gpus(attempt, pod, path):
        raise InvalidTemplate(
            f"{path}.spec: the container {container['name']} requests {resource}, but the controller never "
            "uses a GPU; write it under spec.policy, or remove it"
        )


def require_gpus(attempt: JobAttempt, group: WorkerPods, pod: Pod) -> None:
    """Raise InvalidTemplate if the container `rljob` does not request `gpusPerReplica` GPUs of a configured kind, or if
    another container requests any."""
    own, kinds = own_container(pod), attempt.settings.gpu_resources
    template = template_path(group.role)
    path = f"{template}.spec.containers[{own['name']}].resources"
    for container, resource in _requested_gpus(attempt, pod, template):
        if container is not own:
            raise InvalidTemplate(
                f"{template}.spec: the container {container['name']} requests {resource}, but only the container "
                f"{own['name']} may: it has all GPUs of the pod, spec.{group.role}.gpusPerReplica; remove it"
            )
        if resource not in kinds and _GPU.fullmatch(resource):
            raise InvalidTemplate(
                f"{path}: {resource} is not among the GPUs of this installation ({', '.join(kinds)}); remove it, or "
                "let an administrator add it to jobs.gpuResources of the operator's chart"
            )
    counts = {kind: count for kind, count in limits_and_requests(own)[0].items() if kind in kinds}
    for kind, count in counts.items():
        if not _COUNT.fullmatch(str(count)):
            raise InvalidTemplate(f"{path}.limits.{kind}: expected a number of GPUs, found {shown(count)}; correct it")
    if (found := sum(map(int, counts.values()))) != group.gpus:
        several = f" ({', '.join(counts)})" if len(counts) > 1 else ""
        raise InvalidTemplate(
            f"{path}.limits: expected {group.gpus} GPUs, found {found}{several}; write "
            f"spec.{group.role}.gpusPerReplica, and here only another kind of GPU, one of {', '.join(kinds)}, with "
            f"null for {attempt.gpu_resource} in limits and requests"
        )


def _requested_gpus(attempt: JobAttempt, pod: Pod, path: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each container that requests GPUs, with the name of the resource; all of NVIDIA's count as such.

    Raises InvalidTemplate if the pod has claims of dynamic resource allocation: RLJob counts GPUs as extended
    resources, and hides those of containers that request none.
    """
    if pod["spec"].get("resourceClaims"):
        raise InvalidTemplate(
            f"{path}.spec.resourceClaims: not supported yet, because RLJob requests GPUs as extended resources; remove "
            "it and write gpusPerReplica, which a driver for dynamic resource allocation can serve, too (field "
            "extendedResourceName of its DeviceClass)"
        )
    for container in [*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or [])]:
        for requested in limits_and_requests(container):
            for resource, count in requested.items():
                is_gpu = resource.startswith("nvidia.com/") or _GPU.fullmatch(resource)
                if count not in (None, 0, "0") and (is_gpu or resource in attempt.settings.gpu_resources):
                    yield container, resource


def set_predicted_limit(pod: Pod, attempt: JobAttempt, group: WorkerPods) -> None:
    """Set the predicted memory limit if the template has none."""
    limit = predicted_limit_bytes(attempt.spec, group.role)
    if limit is not None:
        container = own_container(pod)
        limits, _ = limits_and_requests(container)
        container["resources"] = {**container["resources"], "limits": {**limits, "memory": byte_quantity(limit)}}


def raise_memory_limit(pod: Pod, attempt: JobAttempt) -> None:
    """Raise the pod's memory limit and request to those of the plan; never lower them."""
    plan = attempt.plan
    if plan is None:
        return
    host_memory_bytes = plan.controller_host_memory_bytes if is_controller(pod) else plan.host_memory_bytes
    container = own_container(pod)
    limits, requests = limits_and_requests(container)
    if larger := _larger(host_memory_bytes, limits.get("memory")):
        memory = {"memory": larger}
        container["resources"] = {**container["resources"], "limits": limits | memory, "requests": requests | memory}


def enlarge_shared_memory(pod: Pod, attempt: JobAttempt) -> None:
    """Enlarge the pod's /dev/shm, if it is an emptyDir, to that of the plan; never reduce it."""
    size_bytes = attempt.plan.shared_memory_bytes if attempt.plan else None
    for volume in pod["spec"]["volumes"]:
        directory = volume.get("emptyDir") if volume["name"] == SHARED_MEMORY_VOLUME else None
        if isinstance(directory, dict) and (larger := _larger(size_bytes, directory.get("sizeLimit"))):
            volume["emptyDir"] = directory | {"sizeLimit": larger}


def _larger(size_bytes: int | None, limit: Any) -> str | None:
    """Return the size as a quantity if it is larger than `limit`; None if it is not, or one of the two is absent."""
    if size_bytes is None or limit is None or quantity_value(limit) >= size_bytes:
        return None
    return byte_quantity(size_bytes)
