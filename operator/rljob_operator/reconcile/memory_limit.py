"""What a user can do about a pod that ran out of host memory."""

from __future__ import annotations

from typing import Any

from rljob_api.job import RLJobSpec
from rljob_api.pod_template import PodTemplate
from rljob_api.status import Role

_OUR_CONTAINER = "rljob"


def host_memory_advice(spec: RLJobSpec, role: Role) -> str:
    template: PodTemplate | None = {
        "controller": spec.controller.template,
        "policy": spec.policy.template,
        "rollout": spec.rollout.template,
    }[role]
    limit = _memory_limit(template.spec if template else {})
    where = f"resources.limits.memory of container {_OUR_CONTAINER} in spec.{role}.template"
    if limit is None:
        return f"it has no limit of its own, so its node ran out: give it room by {where}"
    return f"its limit is {limit}: raise {where}"


def _memory_limit(pod_spec: dict[str, Any]) -> str | None:
    """The limit in a template that its user wrote; whatever is not as Kubernetes wants it has none."""
    containers = pod_spec.get("containers")
    for container in containers if isinstance(containers, list) else []:
        if isinstance(container, dict) and container.get("name", _OUR_CONTAINER) == _OUR_CONTAINER:
            resources = container.get("resources")
            limits = resources.get("limits") if isinstance(resources, dict) else None
            memory = limits.get("memory") if isinstance(limits, dict) else None
            return str(memory) if memory is not None else None
    return None
