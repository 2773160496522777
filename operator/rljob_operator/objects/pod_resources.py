"""Resources of a pod after the merge with the user's template: GPUs are checked, planned memory is applied."""

from __future__ import annotations

import re
from typing import Any

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.quantity import byte_quantity, quantity_bytes
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.pod_layout import WorkerGroup
from rljob_operator.objects.pod_template import is_controller, own_container
from rljob_operator.objects.pod_volumes import SHARED_MEMORY_VOLUME
from rljob_operator.objects.predicted_memory import predicted_limit_bytes
from rljob_operator.objects.template_checks import InvalidTemplate, limits_and_requests

_GPU = re.compile(r"nvidia\.com/mig-.*|[^/]*gpu[^/]*/.*|.*/.*gpu.*", re.IGNORECASE)
"""Resources that are GPUs by their name: amd.com/gpu, gpu.intel.com/i915, nvidia.com/mig-1g.5gb. Not network adapters
such as nvidia.com/hostdev, which workers may need."""

_COUNT = re.compile("[0-9]{1,9}")
_MAX_SHOWN = 40
"""Characters of a value in a message."""


def refuse_gpus(attempt: JobAttempt, pod: dict[str, Any], path: str) -> None:
    """Raise InvalidTemplate if a container of the controller pod requests a GPU."""
    _refuse_claims(pod, path)
    for container in _containers(pod):
        for resource in _requested_gpus(container, attempt, path):
            raise InvalidTemplate(
                f"{path}.spec: the container {container['name']} requests {resource}, but the controller never "
                "uses a GPU; write it under spec.policy, or remove it"
            )


def require_gpus(attempt: JobAttempt, group: WorkerGroup, pod: dict[str, Any]) -> None:
    """Raise InvalidTemplate if the container `rljob` does not request `gpusPerReplica` GPUs of a configured kind, or if
    another container requests any."""
    _refuse_claims(pod, group.path)
    own, kinds = own_container(pod), attempt.settings.gpu_resources
    assert own is not None
    for container in _containers(pod):
        for resource in _requested_gpus(container, attempt, group.path):
            if container is not own:
                raise InvalidTemplate(
                    f"{group.path}.spec: the container {container['name']} requests {resource}, but only the container "
                    f"{own['name']} may: it has all GPUs of the pod, spec.{group.role}.gpusPerReplica; remove it"
                )
            if resource not in kinds and _GPU.fullmatch(resource):
                raise InvalidTemplate(
                    f"{group.path}.spec.containers[{own['name']}].resources: {resource} is not among the GPUs of this "
                    f"installation ({', '.join(kinds)}); remove it, or let an administrator add it to "
                    "jobs.gpuResources of the operator's chart"
                )
    path = f"{group.path}.spec.containers[{own['name']}].resources.limits"
    limits, _ = limits_and_requests(own, group.path)
    asked = {resource: _count(limits[resource], f"{path}.{resource}") for resource in kinds if resource in limits}
    if (found := sum(asked.values())) != group.gpus:
        several = f" ({', '.join(asked)})" if len(asked) > 1 else ""
        raise InvalidTemplate(
            f"{path}: expected {group.gpus} GPUs, found {found}{several}; write spec.{group.role}.gpusPerReplica, and "
            f"here only another kind of GPU, one of {', '.join(kinds)}, with null for {attempt.gpu_resource} in limits "
            "and requests"
        )


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or [])]


def _requested_gpus(container: dict[str, Any], attempt: JobAttempt, path: str) -> list[str]:
    """Names of the GPU resources that the container requests; all of NVIDIA's count as such."""
    limits, requests = limits_and_requests(container, f"{path}.spec.containers[{container['name']}]")
    return [
        resource
        for resource, count in (*limits.items(), *requests.items())
        if count not in (None, 0, "0")
        and (
            resource in attempt.settings.gpu_resources or resource.startswith("nvidia.com/") or _GPU.fullmatch(resource)
        )
    ]


def _count(quantity: Any, path: str) -> int:
    """A number of GPUs. `int` takes more texts, such as ² and a number of any length."""
    if quantity is None:
        return 0
    if not _COUNT.fullmatch(str(quantity)):
        raise InvalidTemplate(f"{path}: expected a number of GPUs, found {str(quantity)[:_MAX_SHOWN]!r}; correct it")
    return int(quantity)


def _refuse_claims(pod: dict[str, Any], path: str) -> None:
    """Raise InvalidTemplate if the pod has claims of dynamic resource allocation.

    RLJob counts GPUs as extended resources, and hides those of containers that request none.
    """
    if pod["spec"].get("resourceClaims"):
        raise InvalidTemplate(
            f"{path}.spec.resourceClaims: not supported yet, because RLJob requests GPUs as extended resources; remove "
            "it and write gpusPerReplica, which a driver for dynamic resource allocation can serve, too (field "
            "extendedResourceName of its DeviceClass)"
        )


def give_predicted_limit(pod: dict[str, Any], spec: RLJobSpec, group: WorkerGroup) -> None:
    """Set the predicted memory limit if the template has none."""
    limit = predicted_limit_bytes(spec, group.role)
    if limit is None:
        return
    container = own_container(pod)
    assert container is not None
    limits, _ = limits_and_requests(container, f"{group.path}.spec.containers[{container['name']}]")
    limits = {**limits, "memory": byte_quantity(limit)}
    container["resources"] = {**container["resources"], "limits": limits}


def give_planned_memory(pod: dict[str, Any], plan: MemoryPlan | None, path: str) -> None:
    """Raise the pod's memory limit and request, and its /dev/shm, to the plan's; never lower them.

    `path`: of the template's spec, for the messages of InvalidTemplate.
    """
    if plan is None:
        return
    host_memory_bytes = plan.controller_host_memory_bytes if is_controller(pod) else plan.host_memory_bytes
    if host_memory_bytes is not None:
        _raise_limit(pod, host_memory_bytes, path)
    if plan.shared_memory_bytes is not None:
        _enlarge_shared_memory(pod, plan.shared_memory_bytes, path)


def _raise_limit(pod: dict[str, Any], host_memory_bytes: int, path: str) -> None:
    container = own_container(pod)
    assert container is not None
    path = f"{path}.containers[{container['name']}]"
    limits, requests = limits_and_requests(container, path)
    if _is_below(limits.get("memory"), host_memory_bytes, f"{path}.resources.limits.memory"):
        memory = {"memory": byte_quantity(host_memory_bytes)}
        container["resources"] = {**container["resources"], "limits": limits | memory, "requests": requests | memory}


def _enlarge_shared_memory(pod: dict[str, Any], size_bytes: int, path: str) -> None:
    """Enlarge /dev/shm to `size_bytes`, if it is an emptyDir; a volume of another kind keeps its size."""
    for volume in pod["spec"]["volumes"]:
        directory = volume.get("emptyDir")
        if volume["name"] != SHARED_MEMORY_VOLUME or not isinstance(directory, dict):
            continue
        if _is_below(directory.get("sizeLimit"), size_bytes, f"{path}.volumes[{SHARED_MEMORY_VOLUME}].sizeLimit"):
            volume["emptyDir"] = directory | {"sizeLimit": byte_quantity(size_bytes)}


def _is_below(limit: Any, size_bytes: int, path: str) -> bool:
    """False without a limit."""
    try:
        return limit is not None and quantity_bytes(limit) < size_bytes
    except ValueError as problem:
        raise InvalidTemplate(f"{path}: {problem}") from None
