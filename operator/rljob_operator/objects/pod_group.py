"""What makes Volcano schedule a job's pods together: a PodGroup that they belong to.

https://volcano.sh/en/docs/podgroup/
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rljob_operator import names
from rljob_operator.objects.attempt import JobAttempt
from rljob_operator.objects.container_resources import limits_and_requests
from rljob_operator.objects.invalid_template import InvalidTemplate
from rljob_operator.objects.metadata import Manifest, object_metadata
from rljob_operator.objects.quantities import total_quantity

_SCHEDULER = "volcano"
_GROUP_NAME = "scheduling.k8s.io/group-name"
_QUEUE_NAME = "scheduling.volcano.sh/queue-name"


def group_pod(attempt: JobAttempt, pod: dict[str, Any]) -> None:
    """Let Volcano schedule the pod, as one of the group."""
    pod["spec"]["schedulerName"] = _SCHEDULER
    annotations = pod["metadata"].get("annotations") or {}
    pod["metadata"]["annotations"] = {**annotations, _GROUP_NAME: names.pod_group_name(attempt.name)}


def build_pod_group(attempt: JobAttempt, pods: list[dict[str, Any]]) -> Manifest:
    """All of `pods` or none, in the queue that the job's annotation scheduling.volcano.sh/queue-name names, with the
    priority class of the workers."""
    spec: dict[str, Any] = {"minMember": len(pods), "minResources": _total_requests(pods)}
    if queue := attempt.job.metadata.annotations.get(_QUEUE_NAME):
        spec["queue"] = queue
    if priority_class := pods[-1]["spec"].get("priorityClassName"):
        spec["priorityClassName"] = priority_class
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": object_metadata(attempt, names.pod_group_name(attempt.name)),
        "spec": spec,
    }


def _total_requests(pods: list[dict[str, Any]]) -> dict[str, str]:
    asked = defaultdict(list)
    for pod in pods:
        for container in pod["spec"]["containers"]:
            limits, requests = limits_and_requests(container, f"the container {container['name']}")
            for resource, quantity in {**limits, **requests}.items():
                asked[resource].append(quantity)
    try:
        return {resource: total_quantity(quantities) for resource, quantities in sorted(asked.items())}
    except ValueError as error:
        raise InvalidTemplate(f"a template's resources: {error}") from None
