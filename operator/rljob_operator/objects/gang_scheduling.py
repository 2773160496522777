"""Gang scheduling by Kueue (a plain pod group in a queue) and by Volcano (a PodGroup)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from rljob_api.job import RLJob
from rljob_api.quantity import quantity_value
from rljob_operator import names
from rljob_operator.objects.attempt import JobAttempt, Manifest, object_metadata
from rljob_operator.objects.template_checks import InvalidTemplate, limits_and_requests, quantity_text

PREFIX = "kueue.x-k8s.io/"
ADMISSION_GATE = f"{PREFIX}admission"
QUEUE_LABEL = f"{PREFIX}queue-name"
_POD_GROUP = f"{PREFIX}pod-group-name"


def queue_of(job: RLJob) -> str | None:
    """LocalQueue of Kueue that admits the job: `spec.queueName`, or the label by which Kueue's users name the queue of
    any job."""
    return job.spec.queue_name or job.metadata.labels.get(QUEUE_LABEL) or None


def queue_pod(attempt: JobAttempt, pod: dict[str, Any]) -> None:
    """Put the pod into the attempt's group.

    Kueue's scheduling gate is set here too: if Kueue does not manage the pods of the namespace, a job with a queue
    waits instead of running outside the quota. The group is not retriable, because the pods of an attempt are not
    replaced one by one. Labels of the job for Kueue, such as its priority class, are copied. Raises InvalidTemplate if
    the job asks for Volcano, which the API server refuses beside `spec.queueName` only.
    """
    if attempt.spec.gang == "Volcano":
        raise InvalidTemplate(
            f"spec.gang: Volcano cannot schedule jobs that Kueue admits, and the job has the label {QUEUE_LABEL}; "
            "write gang: Auto, or remove the label"
        )
    metadata, spec = pod["metadata"], pod["spec"]
    job_labels = attempt.job.metadata.labels
    metadata["labels"] = {
        **metadata["labels"],
        **{label: value for label, value in job_labels.items() if label.startswith(PREFIX)},
        QUEUE_LABEL: queue_of(attempt.job),
        _POD_GROUP: names.kueue_group_name(attempt.name, attempt.number),
    }
    metadata["annotations"] = {
        **(metadata.get("annotations") or {}),
        f"{PREFIX}pod-group-total-count": str(attempt.layout.pod_count),
        f"{PREFIX}retriable-in-group": "false",
    }
    gates = spec.get("schedulingGates") or []
    spec["schedulingGates"] = [*(gate for gate in gates if gate != {"name": ADMISSION_GATE}), {"name": ADMISSION_GATE}]


_SCHEDULER = "volcano"
_GROUP_NAME = "scheduling.k8s.io/group-name"
_VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"


def group_pod(attempt: JobAttempt, pod: dict[str, Any]) -> None:
    """Let Volcano schedule the pod, as one of the group."""
    pod["spec"]["schedulerName"] = _SCHEDULER
    annotations = pod["metadata"].get("annotations") or {}
    pod["metadata"]["annotations"] = {**annotations, _GROUP_NAME: names.pod_group_name(attempt.name)}


def is_in_group(pod: dict[str, Any]) -> bool:
    """The pod was created in a group of Kueue or Volcano, which places all pods of the group or none."""
    metadata = pod["metadata"]
    return _POD_GROUP in (metadata.get("labels") or {}) or _GROUP_NAME in (metadata.get("annotations") or {})


def build_pod_group(attempt: JobAttempt, roles: Sequence[tuple[dict[str, Any], int]]) -> Manifest:
    """All pods or none, in the queue that the job's annotation scheduling.volcano.sh/queue-name names.

    The priority class is that of the workers. `roles`: a pod of each role, and the number of its pods; workers last.
    """
    spec: dict[str, Any] = {"minMember": sum(count for _, count in roles), "minResources": _total_requests(roles)}
    if queue := attempt.job.metadata.annotations.get(_VOLCANO_QUEUE):
        spec["queue"] = queue
    if priority_class := roles[-1][0]["spec"].get("priorityClassName"):
        spec["priorityClassName"] = priority_class
    return {
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "kind": "PodGroup",
        "metadata": object_metadata(attempt, names.pod_group_name(attempt.name)),
        "spec": spec,
    }


def _total_requests(roles: Sequence[tuple[dict[str, Any], int]]) -> dict[str, str]:
    totals: defaultdict[str, Fraction] = defaultdict(Fraction)
    for pod, count in roles:
        for container in pod["spec"]["containers"]:
            limits, requests = limits_and_requests(container, f"the container {container['name']}")
            for resource, quantity in {**limits, **requests}.items():
                totals[resource] += quantity_value(quantity or 0) * count
    return {resource: quantity_text(total) for resource, total in sorted(totals.items())}
