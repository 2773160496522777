"""Host memory and /dev/shm of a pod as the memory plan says, where that is more than its template gives."""

from __future__ import annotations

from typing import Any

from rljob_api.memory_plan import MemoryPlan
from rljob_api.quantity import byte_quantity, quantity_bytes
from rljob_operator.objects.container_resources import limits_and_requests
from rljob_operator.objects.invalid_template import InvalidTemplate
from rljob_operator.objects.pod_template import is_controller, own_container
from rljob_operator.objects.pod_volumes import SHARED_MEMORY_VOLUME


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
    """A volume of another kind, which the template may name, has the size that it has."""
    for volume in pod["spec"]["volumes"]:
        directory = volume.get("emptyDir")
        if volume["name"] != SHARED_MEMORY_VOLUME or not isinstance(directory, dict):
            continue
        if _is_below(directory.get("sizeLimit"), size_bytes, f"{path}.volumes[{SHARED_MEMORY_VOLUME}].sizeLimit"):
            volume["emptyDir"] = directory | {"sizeLimit": byte_quantity(size_bytes)}


def _is_below(limit: Any, size_bytes: int, path: str) -> bool:
    """Nothing is more than no limit."""
    try:
        return limit is not None and quantity_bytes(limit) < size_bytes
    except ValueError as problem:
        raise InvalidTemplate(f"{path}: {problem}") from None
