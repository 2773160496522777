"""What makes Kueue admit a job's pods together: they are a plain pod group in a queue.

https://kueue.sigs.k8s.io/docs/tasks/run/plain_pods/
"""

from __future__ import annotations

from typing import Any

from rljob_operator import names
from rljob_operator.objects.attempt import JobAttempt

PREFIX = "kueue.x-k8s.io/"
ADMISSION_GATE = f"{PREFIX}admission"


def queue_pod(attempt: JobAttempt, pod: dict[str, Any]) -> None:
    """Put the pod into the attempt's group.

    The gate is Kueue's own, and set here too: where Kueue does not look after the namespace's pods, a job that names a
    queue waits rather than runs beside the quota. The group is not retriable: an attempt's pods are not replaced one by
    one, and Kueue lets them go when all have ended. Labels of the job for Kueue, such as its priority class, go along.
    """
    metadata, spec = pod["metadata"], pod["spec"]
    job_labels = attempt.job.metadata.labels
    metadata["labels"] = {
        **metadata["labels"],
        **{label: value for label, value in job_labels.items() if label.startswith(PREFIX)},
        f"{PREFIX}queue-name": attempt.spec.queue_name,
        f"{PREFIX}pod-group-name": names.kueue_group_name(attempt.name, attempt.number),
    }
    metadata["annotations"] = {
        **(metadata.get("annotations") or {}),
        f"{PREFIX}pod-group-total-count": str(attempt.pods),
        f"{PREFIX}retriable-in-group": "false",
    }
    gates = spec.get("schedulingGates") or []
    spec["schedulingGates"] = [*(gate for gate in gates if gate != {"name": ADMISSION_GATE}), {"name": ADMISSION_GATE}]
