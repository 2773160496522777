"""What the API server says of the job at one time, and what that means. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sight:
    """The job, its StepReport and its pods; empty where they are not there."""

    job: Object = field(default_factory=dict)
    report: Object = field(default_factory=dict)
    pods: list[Object] = field(default_factory=list)

    @property
    def status(self) -> Object:
        found: Object = self.job.get("status") or {}
        return found

    @property
    def plan_changes(self) -> list[Object]:
        """As the operator knows them, or sooner: as the trainer does."""
        changes: list[Object] = self.status.get("planChanges") or self.report.get("planChanges") or []
        return changes

    @property
    def steps(self) -> int:
        """Committed."""
        return int(self.report.get("step") or 0)

    @property
    def attempts(self) -> int:
        return len(self.status.get("attempts") or ())

    @property
    def containers_run(self) -> bool:
        return bool(self.pods) and all(pod_state(pod)["container"] == "running" for pod in self.pods)


def pod_state(pod: Object) -> Object:
    """What tells one life of a pod, or of its container, from another."""
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


def _condition(name: str) -> Callable[[Sight], bool]:
    return lambda sight: any(
        condition["type"] == name and condition["status"] == "True"
        for condition in sight.status.get("conditions") or ()
    )


def _second_life(sight: Sight) -> bool:
    """All containers run again, in the same pods or in new ones."""
    restarted = any(pod_state(pod)["restarts"] for pod in sight.pods)
    return (restarted or sight.attempts > 1) and sight.containers_run


def _gone_on(sight: Sight) -> bool:
    changes = sight.plan_changes
    return bool(changes) and sight.steps >= int(changes[-1]["step"])


MOMENTS: dict[str, Callable[[Sight], bool]] = {
    "pods_made": lambda sight: bool(sight.pods),
    "containers_running": lambda sight: sight.containers_run,
    "first_step": lambda sight: sight.steps >= 1,
    "out_of_memory": lambda sight: bool(sight.report.get("lastEvidence") or sight.status.get("lastOutOfMemory")),
    "plan_changed": lambda sight: bool(sight.plan_changes),
    "containers_running_again": _second_life,
    "failed_step_committed": _gone_on,
    "complete": _condition("Complete"),
    "failed": _condition("Failed"),
}
"""What is looked for, in the order of the story."""

ENDS = frozenset({"complete", "failed"})
