"""Reduced form of a pod and of its containers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, cast

from rljob_api.quantity import quantity_bytes
from rljob_api.status import Role
from rljob_api.termination_message import read_termination_message
from rljob_operator import labels
from rljob_operator.kube.resources import Object
from rljob_operator.objects.attempt import CONTAINER
from rljob_operator.objects.placement import is_in_group
from rljob_operator.objects.pod_volumes import SHARED_MEMORY_VOLUME
from rljob_operator.objects.pods import RESTART_ALL_CONTAINERS
from rljob_operator.reconcile.observed import ContainerFailure, ContainerTermination, ObservedPod, PodPhase

_ROLES = ("controller", "policy", "rollout")
_MAX_TEXT = 1024
_MAX_DIGITS = 7
"""Length of the numbers in labels."""


@dataclass(frozen=True, slots=True)
class PodFact:
    """One pod with the operator's labels. `pod` is None if its labels do not identify a pod of a job."""

    name: str
    job_name: str
    owner_uid: str | None
    """uid of the RLJob that controls it."""
    pod: ObservedPod | None


def pod_fact(obj: Object) -> PodFact:
    metadata = obj["metadata"]
    owner = next((ref for ref in metadata.get("ownerReferences") or () if ref.get("controller")), None)
    return PodFact(
        name=metadata["name"],
        job_name=(metadata.get("labels") or {}).get(labels.JOB_NAME, ""),
        owner_uid=owner["uid"] if owner else None,
        pod=observed_pod(obj),
    )


def observed_pod(obj: Object) -> ObservedPod | None:
    """The pod, or None if its labels lack role, index or attempt, as in a foreign pod."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    marks = metadata.get("labels") or {}
    role, index, attempt = (marks.get(label, "") for label in (labels.ROLE, labels.INDEX, labels.ATTEMPT))
    if role not in _ROLES or not _is_number(index) or not _is_number(attempt):
        return None
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    ours: Object = next((c for c in status.get("containerStatuses") or () if c["name"] == CONTAINER), {})
    container: Object = next((c for c in spec.get("containers") or () if c["name"] == CONTAINER), {})
    end = _end(ours)
    return ObservedPod(
        name=metadata["name"],
        uid=metadata["uid"],
        role=cast(Role, role),
        index=int(index),
        attempt=int(attempt),
        phase=cast(PodPhase, status.get("phase", "Pending")),
        created_at=moment(metadata["creationTimestamp"]),
        node=spec.get("nodeName"),
        scheduled_at=_scheduled_at(scheduled),
        ready=_is_ready(conditions.get("Ready") or {}, ours),
        started=end is not None or bool(ours.get("restartCount")) or "running" in (ours.get("state") or {}),
        deleting="deletionTimestamp" in metadata,
        deletion_grace_seconds=metadata.get("deletionGracePeriodSeconds"),
        deletion_due_at=moment(due) if (due := metadata.get("deletionTimestamp")) else None,
        gated=bool(spec.get("schedulingGates")),
        in_group=is_in_group(obj),
        unschedulable=scheduled.get("message") if scheduled.get("reason") == "Unschedulable" else None,
        waiting=waiting(status),
        end=end,
        failed_init_container=failed_init_container(spec, status),
        failed_sidecar=failed_sidecar(status),
        running_sidecars=running_sidecars(status),
        evicted=_evicted(status, conditions.get("DisruptionTarget") or {}),
        disruption=_disruption(status, conditions.get("DisruptionTarget") or {}, end),
        restart_count=int(ours.get("restartCount") or 0),
        memory_limit_bytes=memory_bytes(container, "limits"),
        memory_request_bytes=memory_bytes(container, "requests"),
        resize_pending=str((conditions.get("PodResizePending") or {}).get("message") or "")[:_MAX_TEXT],
        shared_memory_bytes=_shared_memory_bytes(spec),
        restarts_in_place=any(r["action"] == RESTART_ALL_CONTAINERS for r in container.get("restartPolicyRules") or ()),
        spec_digest=(metadata.get("annotations") or {}).get(labels.SPEC_DIGEST, ""),
    )


def _is_number(label: str) -> bool:
    return label.isdecimal() and len(label) <= _MAX_DIGITS


def memory_bytes(container: Object, kind: Literal["limits", "requests"]) -> int | None:
    """Host memory limit or request of a container; None without one."""
    return _bytes(((container.get("resources") or {}).get(kind) or {}).get("memory"))


def _shared_memory_bytes(spec: Object) -> int | None:
    volume: Object = next((v for v in spec.get("volumes") or () if v["name"] == SHARED_MEMORY_VOLUME), {})
    return _bytes((volume.get("emptyDir") or {}).get("sizeLimit"))


def _bytes(quantity: str | None) -> int | None:
    """Bytes of a quantity; None also if the quantity is not a whole number of bytes, such as 1500m."""
    try:
        return quantity_bytes(quantity) if quantity else None
    except ValueError:
        return None


def _scheduled_at(condition: Object) -> datetime | None:
    """None also without a time, which virtual kubelets may leave out."""
    time = condition.get("lastTransitionTime")
    return moment(time) if time and _is_true(condition) else None


def _is_ready(condition: Object, container: Object) -> bool:
    """The pod is ready, or the kubelet finds only others unready: a sidecar that has ended, or a readiness gate that a
    webhook added.

    The node controller clears the condition of pods on lost nodes, and leaves their containers ready.
    """
    others_unready = condition.get("reason") in ("ContainersNotReady", "ReadinessGatesNotReady")
    return _is_true(condition) or (others_unready and bool(container.get("ready")))


def _is_true(condition: Object) -> bool:
    return bool(condition.get("status") == "True")


def _end(container: Object) -> ContainerTermination | None:
    """Termination of the container; None if it runs, even after a restart."""
    terminated = (container.get("state") or {}).get("terminated")
    if not terminated:
        return None
    text = str(terminated.get("message") or "")
    message = read_termination_message(text) if text else None
    finished_at = terminated.get("finishedAt")
    return ContainerTermination(
        exit_code=int(terminated.get("exitCode", 0)),
        reason=str(terminated.get("reason") or ""),
        finished_at=moment(finished_at) if finished_at else None,
        message=message,
        text="" if message else text[:_MAX_TEXT],
    )


def _evicted(status: Object, condition: Object) -> str | None:
    """The kubelet's message if it evicted the pod for exceeding its own limits.

    The kubelet adds the condition DisruptionTarget if its node runs short. It leaves it out if the pod exceeds the size
    of an emptyDir or its limit of ephemeral storage (pkg/kubelet/eviction/eviction_manager.go).
    """
    if status.get("reason") != "Evicted" or _is_true(condition):
        return None
    return str(status.get("message") or "").strip()[:_MAX_TEXT]


def _disruption(status: Object, condition: Object, end: ContainerTermination | None) -> str | None:
    """Reason why the cluster removed the pod: of the condition DisruptionTarget, or of a pod that failed as a whole.

    Such reasons are NodeLost, Shutdown, and the kubelet's refusals, as UnexpectedAdmissionError or OutOfcpu.
    """
    if _is_true(condition):
        return str(condition.get("reason") or "DisruptionTarget")
    reason = str(status.get("reason") or "")
    return reason if reason == "NodeLost" or (reason not in ("", "Evicted") and end is None) else None


def moment(text: str) -> datetime:
    """Parse a time in the format of Kubernetes."""
    return datetime.fromisoformat(text)


# --- Containers ---


_STILL_STARTING = ("ContainerCreating", "PodInitializing")
_LOST = "ContainerStatusUnknown"
"""Reason of a container that was lost with its node."""


def waiting(status: Object) -> str | None:
    """Reason why a container cannot start, as `reason: message`; init containers first."""
    for kind, container in _containers(status):
        state = (container.get("state") or {}).get("waiting") or {}
        reason = state.get("reason")
        if reason and reason not in _STILL_STARTING:
            parts = [f"{kind} {container['name']}"] if container["name"] != CONTAINER else []
            last = _failure(container, "lastState")
            if last and parts:
                parts = [f"{parts[0]} exited with code {last.exit_code}", last.text]
            text = ": ".join(part for part in (reason, *parts, state.get("message")) if part)
            return text[:_MAX_TEXT]
    return None


def failed_init_container(spec: Object, status: Object) -> ContainerFailure | None:
    """The init container that failed and is not restarted, so that the pod cannot start.

    One with restart policy Always is a sidecar. Another restart policy, or restart rules, of its own may restart it
    until the phase is Failed. For other init containers the phase is no criterion: a sidecar delays it.
    """
    given = {c["name"]: c for c in spec.get("initContainers") or ()}
    ended = (
        c
        for c in status.get("initContainerStatuses") or ()
        if not _is_restarted(given.get(c["name"]) or {}, status.get("phase"))
    )
    return next(filter(None, map(_failure, ended)), None)


def _is_restarted(init_container: Object, phase: str | None) -> bool:
    policy = init_container.get("restartPolicy")
    if policy == "Always":
        return True
    return phase != "Failed" and (policy == "OnFailure" or bool(init_container.get("restartPolicyRules")))


def failed_sidecar(status: Object) -> ContainerFailure | None:
    """The container other than `rljob` that failed."""
    others = (c for c in status.get("containerStatuses") or () if c["name"] != CONTAINER)
    return next(filter(None, map(_failure, others)), None)


def running_sidecars(status: Object) -> tuple[str, ...]:
    """Names of the containers other than `rljob` that run. Ephemeral containers do not keep a pod."""
    others = (c for _, c in _containers(status) if c["name"] != CONTAINER)
    return tuple(c["name"] for c in others if (c.get("state") or {}).get("running"))


def _containers(status: Object) -> list[tuple[str, Object]]:
    init = [("init container", container) for container in status.get("initContainerStatuses") or ()]
    return [*init, *(("container", container) for container in status.get("containerStatuses") or ())]


def _failure(container: Object, state: str = "state") -> ContainerFailure | None:
    terminated = (container.get(state) or {}).get("terminated") or {}
    if not terminated.get("exitCode") or terminated.get("reason") == _LOST:
        return None
    return ContainerFailure(
        name=container["name"],
        exit_code=int(terminated["exitCode"]),
        reason=str(terminated.get("reason") or ""),
        text=str(terminated.get("message") or "").strip()[:_MAX_TEXT],
    )
