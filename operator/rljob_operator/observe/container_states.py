"""Containers of a pod that cannot start, and those other than `rljob` that failed."""

from __future__ import annotations

from rljob_operator.kube.resources import Object
from rljob_operator.objects.pod_parts import CONTAINER
from rljob_operator.reconcile.observed import ContainerFailure

_STILL_STARTING = ("ContainerCreating", "PodInitializing")
_LOST = "ContainerStatusUnknown"
"""Reason of a container that was lost with its node."""
_MAX_TEXT = 1024


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
    """The container beside `rljob` that failed."""
    others = (c for c in status.get("containerStatuses") or () if c["name"] != CONTAINER)
    return next(filter(None, map(_failure, others)), None)


def running_sidecars(status: Object) -> tuple[str, ...]:
    """Names of the containers beside `rljob` that run. Ephemeral containers do not keep a pod."""
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
