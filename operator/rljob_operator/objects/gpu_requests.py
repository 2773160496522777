"""Whether a pod, with the user's template over it, still asks for the GPUs that its role has."""

from __future__ import annotations

from typing import Any

from rljob_operator.objects.attempt import JobAttempt, WorkerGroup
from rljob_operator.objects.container_resources import limits_and_requests
from rljob_operator.objects.invalid_template import InvalidTemplate
from rljob_operator.objects.pod_template import own_container


def refuse_gpus(attempt: JobAttempt, pod: dict[str, Any], path: str) -> None:
    """Raise InvalidTemplate where a container of the controller pod asks for a GPU."""
    for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
        limits, requests = limits_and_requests(container, f"{path}.spec.containers[{container['name']}]")
        for resource in (*limits, *requests):
            if resource in attempt.settings.gpu_resources or resource.startswith("nvidia.com/"):
                raise InvalidTemplate(
                    f"{path}.spec: the container {container['name']} asks for {resource}, and the controller never "
                    "uses a GPU; write it under spec.policy, or remove it"
                )


def require_gpus(attempt: JobAttempt, group: WorkerGroup, pod: dict[str, Any]) -> None:
    """Raise InvalidTemplate where the container `rljob` asks for other than `gpusPerReplica` GPUs, of whatever kind."""
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
