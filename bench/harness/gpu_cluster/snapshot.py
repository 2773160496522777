"""The job, the status of its StepReport and its pods at one time. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """Objects of the API server; empty if they do not exist."""

    job: Object = field(default_factory=dict)
    report: Object = field(default_factory=dict)
    pods: list[Object] = field(default_factory=list)

    @property
    def status(self) -> Object:
        found: Object = self.job.get("status") or {}
        return found

    @property
    def plan_changes(self) -> list[Object]:
        """Known to the operator, or, sooner, to the trainer."""
        changes: list[Object] = self.status.get("planChanges") or self.report.get("planChanges") or []
        return changes

    @property
    def steps(self) -> int:
        """Committed steps."""
        return int(self.report.get("step") or 0)

    @property
    def attempts(self) -> int:
        return len(self.status.get("attempts") or ())

    @property
    def containers_run(self) -> bool:
        return bool(self.pods) and all(pod_state(pod)["container"] == "running" for pod in self.pods)


def pod_state(pod: Object) -> Object:
    """Fields that change when a pod or its container is restarted."""
    status = pod.get("status", {})
    container = (status.get("containerStatuses") or [{}])[0]
    return {
        "pod": pod["metadata"]["name"],
        "uid": pod["metadata"]["uid"],
        "node": pod["spec"].get("nodeName"),
        "ip": status.get("podIP"),
        "container": next(iter(container.get("state") or {}), None),
        "restarts": container.get("restartCount", 0),
    }


def _condition(name: str) -> Callable[[JobSnapshot], bool]:
    return lambda snapshot: any(
        condition["type"] == name and condition["status"] == "True"
        for condition in snapshot.status.get("conditions") or ()
    )


def _containers_restarted(snapshot: JobSnapshot) -> bool:
    """All containers run again, in the same pods or in new ones."""
    restarted = any(pod_state(pod)["restarts"] for pod in snapshot.pods)
    return (restarted or snapshot.attempts > 1) and snapshot.containers_run


def _failed_step_committed(snapshot: JobSnapshot) -> bool:
    changes = snapshot.plan_changes
    return bool(changes) and snapshot.steps >= int(changes[-1]["step"])


MOMENTS: dict[str, Callable[[JobSnapshot], bool]] = {
    "pods_made": lambda snapshot: bool(snapshot.pods),
    "containers_running": lambda snapshot: snapshot.containers_run,
    "first_step": lambda snapshot: snapshot.steps >= 1,
    "out_of_memory": lambda snapshot: bool(
        snapshot.report.get("lastEvidence") or snapshot.status.get("lastOutOfMemory")
    ),
    "plan_changed": lambda snapshot: bool(snapshot.plan_changes),
    "containers_running_again": _containers_restarted,
    "failed_step_committed": _failed_step_committed,
    "complete": _condition("Complete"),
    "failed": _condition("Failed"),
}
"""Conditions to observe, in the order in which they are expected."""

FINAL_MOMENTS = frozenset({"complete", "failed"})
