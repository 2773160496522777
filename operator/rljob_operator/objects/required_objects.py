"""Objects of the user that must exist before the pods of a job are created."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_operator.objects.attempt import JobAttempt


@dataclass(frozen=True, slots=True)
class RequiredObject:
    """A ConfigMap that pods mount. While it does not exist, the kubelet waits without a word in the pod's status."""

    name: str
    namespace: str
    field: str
    """Field of the job that names it."""


def required_objects(attempt: JobAttempt) -> tuple[RequiredObject, ...]:
    files = attempt.spec.task.files
    if files is None or files.config_map is None:
        return ()
    return (RequiredObject(files.config_map, attempt.namespace, "spec.task.files.configMap"),)
