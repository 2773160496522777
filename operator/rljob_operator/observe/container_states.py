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
    """The init container that failed. One with a restart policy of its own is a sidecar, and is restarted."""
    sidecars = {c["name"] for c in spec.get("initContainers") or () if c.get("restartPolicy") == "Always"}
    ended = (c for c in status.get("initContainerStatuses") or () if c["name"] not in sidecars)
    return next(filter(None, map(_failure, ended)), None)


def failed_sidecar(status: Object) -> ContainerFailure | None:
    """The container beside `rljob` that failed."""
    others = (c for c in status.get("containerStatuses") or () if c["name"] != CONTAINER)
    return next(filter(None, map(_failure, others)), None)


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
