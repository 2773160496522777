"""Resources of a pod after the merge with the user's template: GPUs are checked, planned memory is applied."""

from __future__ import annotations

from typing import Any

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.quantity import byte_quantity, quantity_bytes
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.container_resources import limits_and_requests
from rljob_operator.objects.invalid_template import InvalidTemplate
from rljob_operator.objects.pod_layout import WorkerGroup
from rljob_operator.objects.pod_template import is_controller, own_container
from rljob_operator.objects.pod_volumes import SHARED_MEMORY_VOLUME
from rljob_operator.objects.predicted_memory import predicted_limit_bytes


def refuse_gpus(attempt: JobAttempt, pod: dict[str, Any], path: str) -> None:
    """Raise InvalidTemplate if a container of the controller pod requests a GPU."""
    for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
        limits, requests = limits_and_requests(container, f"{path}.spec.containers[{container['name']}]")
        for resource in (*limits, *requests):
            if resource in attempt.settings.gpu_resources or resource.startswith("nvidia.com/"):
                raise InvalidTemplate(
                    f"{path}.spec: the container {container['name']} requests {resource}, but the controller never "
                    "uses a GPU; write it under spec.policy, or remove it"
                )


def require_gpus(attempt: JobAttempt, group: WorkerGroup, pod: dict[str, Any]) -> None:
    """Raise InvalidTemplate if the container `rljob` does not request `gpusPerReplica` GPUs of any kind."""
    container = own_container(pod)
    assert container is not None
    path = f"{group.path}.spec.containers[rljob]"
    limits, _ = limits_and_requests(container, path)
    asked = sum(
        int(count) if str(count).isdigit() else 0
        for resource, count in limits.items()
        if resource in attempt.settings.gpu_resources
    )
    if asked != group.gpus:
        raise InvalidTemplate(
            f"{path}.resources: expected {group.gpus} GPUs, found {asked}; write spec.{group.role}.gpusPerReplica, and "
            "here only another kind of GPU"
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
    """Only an emptyDir can be enlarged; a volume of another kind keeps its size."""
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
