"""The user's template over RLJob's pod: a strategic merge, then checks that the fields RLJob needs are unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rljob_api.quantity import shown
from rljob_api.roles import PodTemplate
from rljob_operator import labels
from rljob_operator.objects.attempt import CONTAINER
from rljob_operator.objects.pod_volumes import FIXED_VOLUMES
from rljob_operator.objects.strategic_merge import (
    InvalidTemplate,
    require_quantities,
    require_types,
    strategic_merge,
)

Pod = dict[str, Any]

_FIXED_FIELDS = {
    "activeDeadlineSeconds": "write spec.activeDeadlineSeconds of the job",
    "hostname": "the pods find each other by it",
    "restartPolicy": "the operator decides whether a terminated pod is replaced",
    "subdomain": "the pods find each other by it",
}
_FIXED_CONTROLLER_FIELDS = {
    "automountServiceAccountToken": "the controller reports its steps with the token",
    "serviceAccountName": "the controller may patch its StepReport with it",
}
_FIXED_CONTAINER_FIELDS = {
    **dict.fromkeys(
        ("args", "command"), "RLJob decides what its container runs; another image with the same command can be set"
    ),
    **dict.fromkeys(("restartPolicy", "restartPolicyRules"), "the operator decides whether a container restarts"),
    **dict.fromkeys(
        ("terminationMessagePath", "terminationMessagePolicy"), "the operator reads the termination message"
    ),
}
_FIXED_VARIABLES = ("RLJOB_", "RAY_AUTH_", "PET_", "POD_IP", "NODE_NAME")
"""Prefixes of variables that RLJob sets."""
_CONTROLLER_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_MAX_GRACE_SECONDS = 86_400
"""A process that ignores SIGTERM holds the job and its namespace for the grace period: at most a day."""


def merge_template(pod: Pod, template: PodTemplate, path: str) -> Pod:
    """Return `pod` with `template` over it; neither is changed. `path`: that of the template in the manifest, for
    messages.

    A container without a name, or named `rljob`, is RLJob's own; others are added. A limit without a request is also
    the request, as always in Kubernetes. Raises InvalidTemplate.
    """
    for name in template.metadata.keys() - {"labels", "annotations"}:
        raise InvalidTemplate(f"{path}.metadata.{name}: expected labels and annotations only; remove it")
    patch = {"metadata": template.metadata, "spec": _name_container(template.spec)}
    merged = strategic_merge(pod, patch, path)
    require_types(merged["spec"], f"{path}.spec")
    require_quantities(merged["spec"], f"{path}.spec")
    _require_grace_period(merged["spec"], f"{path}.spec")
    _require_labels(pod, merged, f"{path}.metadata.labels")
    fixed = _FIXED_FIELDS | (_FIXED_CONTROLLER_FIELDS if is_controller(pod) else {})
    _require_same(pod["spec"], merged["spec"], fixed, f"{path}.spec")
    _require_volumes(pod, merged, f"{path}.spec.volumes")
    _require_container(pod, merged, f"{path}.spec.containers")
    _set_requests_from_limits(merged, patch)
    return merged


def _name_container(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a template's `spec` in which the container that has no name is `rljob`."""
    containers = spec.get("containers")
    if not isinstance(containers, list):
        return dict(spec)
    directive = {"$patch"}  # about the list itself
    named = [
        {"name": CONTAINER, **container} if isinstance(container, dict) and container.keys() != directive else container
        for container in containers
    ]
    return {**spec, "containers": named}


def _find_container(pod: Pod) -> dict[str, Any] | None:
    containers = pod["spec"].get("containers") or []
    return next((container for container in containers if container.get("name") == CONTAINER), None)


def own_container(pod: Pod) -> dict[str, Any]:
    """Return the container `rljob` of a pod that has it, as every merged pod has."""
    container = _find_container(pod)
    assert container is not None
    return container


def limits_and_requests(container: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the limits and the requests of a container of a merged pod."""
    resources = container.get("resources") or {}
    return resources.get("limits") or {}, resources.get("requests") or {}


def role_of(pod: Pod) -> str:
    """Return the role of a pod that the operator has built."""
    return str(pod["metadata"]["labels"][labels.ROLE])


def is_controller(pod: Pod) -> bool:
    return role_of(pod) == "controller"


def _set_requests_from_limits(merged: Pod, patch: Pod) -> None:
    limits, requests = limits_and_requests(_find_container(patch) or {})
    limited = {name: limit for name, limit in limits.items() if limit is not None and name not in requests}
    if limited:
        resources = own_container(merged)["resources"]
        own_container(merged)["resources"] = {**resources, "requests": {**resources.get("requests", {}), **limited}}


def _require_grace_period(spec: Mapping[str, Any], path: str) -> None:
    grace = spec.get("terminationGracePeriodSeconds", 0)
    if type(grace) is not int or not 0 <= grace <= _MAX_GRACE_SECONDS:
        raise InvalidTemplate(
            f"{path}.terminationGracePeriodSeconds: expected 0 to {_MAX_GRACE_SECONDS} seconds, found {shown(grace)}; "
            "write a number in this range, or remove it"
        )


def _require_labels(pod: Pod, merged: Pod, path: str) -> None:
    own, found = pod["metadata"]["labels"], merged["metadata"].get("labels") or {}
    for label, value in own.items():
        if found.get(label) != value:
            raise InvalidTemplate(f"{path}: {label} is set by the operator; remove it")
    for label in found.keys() - own.keys():
        if label.startswith("rljob.dev/"):
            raise InvalidTemplate(f"{path}: rljob.dev/ is for RLJob's own labels; rename {label}")


def _require_volumes(pod: Pod, merged: Pod, path: str) -> None:
    found = {volume["name"]: volume for volume in merged["spec"].get("volumes") or []}
    for volume in pod["spec"]["volumes"]:
        name = volume["name"]
        if name not in found:
            raise InvalidTemplate(f"{path}: the volume {name} is needed; do not delete it")
        if name in FIXED_VOLUMES and found[name] != volume:
            raise InvalidTemplate(f"{path}: {name} is RLJob's own: {FIXED_VOLUMES[name]}, or name yours differently")


def _require_container(pod: Pod, merged: Pod, path: str) -> None:
    own, found = own_container(pod), _find_container(merged)
    if found is None:
        raise InvalidTemplate(f"{path}: the container {CONTAINER} is needed; do not delete or replace it")
    path = f"{path}[{CONTAINER}]"
    _require_same(own, found, _FIXED_CONTAINER_FIELDS, path)
    mounts = {mount["mountPath"]: mount for mount in found.get("volumeMounts") or []}
    for mount in own["volumeMounts"]:
        if mounts.get(mount["mountPath"]) != mount:
            raise InvalidTemplate(
                f"{path}.volumeMounts: RLJob mounts its volume {mount['name']} at {mount['mountPath']}; mount yours "
                f"elsewhere, or override the volume {mount['name']} in spec.volumes"
            )
    fixed = _FIXED_VARIABLES + (_CONTROLLER_GPU_VARIABLES if is_controller(pod) else ())
    before = {entry["name"]: entry for entry in own["env"]}
    after = {entry["name"]: entry for entry in found.get("env") or []}
    for variable in sorted(before.keys() | after.keys()):
        if variable.startswith(fixed) and before.get(variable) != after.get(variable):
            raise InvalidTemplate(f"{path}.env: {variable} is set by RLJob; remove it")


def _require_same(own: dict[str, Any], found: dict[str, Any], fixed: Mapping[str, str], path: str) -> None:
    for name, reason in fixed.items():
        if own.get(name) != found.get(name):
            raise InvalidTemplate(f"{path}.{name}: cannot be set here: {reason}; remove it")
