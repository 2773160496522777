"""The user's template over RLJob's pod: a strategic merge, then a check that what RLJob needs is still there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_api.quantity import shown
from rljob_api.roles import PodTemplate
from rljob_operator import labels
from rljob_operator.objects.pod_volumes import FIXED_VOLUMES
from rljob_operator.objects.pods import CONTAINER
from rljob_operator.objects.template_checks import (
    InvalidTemplate,
    expect_list,
    expect_object,
    kind_of,
    limits_and_requests,
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
    "serviceAccountName": "the controller may patch its StepReport by it",
}
_FIXED_CONTAINER_FIELDS = {
    "args": "RLJob decides what its container runs; another image with the same command can be set",
    "command": "RLJob decides what its container runs; another image with the same command can be set",
    "restartPolicy": "the operator decides whether a container restarts",
    "restartPolicyRules": "the operator decides whether a container restarts",
    "terminationMessagePath": "the operator reads the termination message",
    "terminationMessagePolicy": "the operator reads the termination message",
}
_GRACE = "terminationGracePeriodSeconds"
_LONGEST_GRACE_SECONDS = 86_400
"""A day."""
_FIXED_VARIABLES = ("RLJOB_", "RAY_AUTH_", "PET_", "POD_IP", "NODE_NAME")
"""Prefixes of variables that RLJob sets."""
_CONTROLLER_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")


def merge_template(pod: Pod, template: PodTemplate, path: str) -> Pod:
    """`pod` with `template` over it; neither is changed. `path`: of the template in the manifest, for messages.

    A container without a name, or named `rljob`, is RLJob's own; others are added. A limit that comes without a request
    is the request too, as anywhere in Kubernetes. Raises InvalidTemplate.
    """
    for name in template.metadata.keys() - {"labels", "annotations"}:
        raise InvalidTemplate(f"{path}.metadata.{name}: expected labels and annotations only; remove it")
    patch = {"metadata": template.metadata, "spec": with_container_names(template.spec)}
    merged = strategic_merge(pod, patch, POD, path)
    _let_limits_be_requests(merged, own_container(patch), path)
    _require_grace(merged["spec"], f"{path}.spec")
    _require_labels(pod, merged, path)
    _require_fields(pod, merged, path)
    _require_volumes(pod, merged, path)
    _require_container(pod, merged, path)
    return merged


def with_container_names(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A template's `spec` in which the container that has no name is `rljob`."""
    containers = spec.get("containers")
    if not isinstance(containers, list):
        return dict(spec)
    named = [
        {"name": CONTAINER, **container} if isinstance(container, dict) and _is_container(container) else container
        for container in containers
    ]
    return {**spec, "containers": named}


def own_container(pod: Pod) -> dict[str, Any] | None:
    """The container `rljob` of a pod, or of a template's part like one."""
    containers = pod["spec"].get("containers") or []
    return next((container for container in containers if container.get("name") == CONTAINER), None)


def role_of(pod: Pod) -> str:
    return str(pod["metadata"]["labels"][labels.ROLE])


def is_controller(pod: Pod) -> bool:
    return role_of(pod) == "controller"


def _is_container(element: Mapping[str, Any]) -> bool:
    """True for a container, False for a directive about the list itself."""
    return element.keys() != {"$patch"}


def _let_limits_be_requests(merged: Pod, template_container: dict[str, Any] | None, path: str) -> None:
    limits, requests = limits_and_requests(template_container or {}, f"{path}.spec.containers[{CONTAINER}]")
    container = own_container(merged)
    if container is not None and limits:
        resources = container["resources"]
        limited = {resource: limit for resource, limit in limits.items() if limit is not None}
        container["resources"] = {**resources, "requests": {**resources.get("requests", {}), **limited, **requests}}


def _require_grace(spec: Mapping[str, Any], path: str) -> None:
    """A process that ignores SIGTERM holds the job and its namespace for this time."""
    grace = spec.get(_GRACE, 0)
    if type(grace) is not int or not 0 <= grace <= _LONGEST_GRACE_SECONDS:
        raise InvalidTemplate(
            f"{path}.{_GRACE}: expected 0 to {_LONGEST_GRACE_SECONDS} seconds, found {shown(grace)}; write a number in "
            "this range, or remove it"
        )


def _require_labels(pod: Pod, merged: Pod, path: str) -> None:
    own, found = pod["metadata"]["labels"], merged["metadata"].get("labels") or {}
    for label, value in own.items():
        if found.get(label) != value:
            raise InvalidTemplate(f"{path}.metadata.labels: {label} is set by the operator; remove it")
    for label in found.keys() - own.keys():
        if label.startswith("rljob.dev/"):
            raise InvalidTemplate(f"{path}.metadata.labels: rljob.dev/ is for RLJob's own labels; rename {label}")


def _require_fields(pod: Pod, merged: Pod, path: str) -> None:
    fixed = _FIXED_FIELDS | (_FIXED_CONTROLLER_FIELDS if is_controller(pod) else {})
    _require_same(pod["spec"], merged["spec"], fixed, f"{path}.spec")


def _require_volumes(pod: Pod, merged: Pod, path: str) -> None:
    found = {volume["name"]: volume for volume in merged["spec"].get("volumes") or []}
    for volume in pod["spec"]["volumes"]:
        name = volume["name"]
        if name not in found:
            raise InvalidTemplate(f"{path}.spec.volumes: the volume {name} is needed; do not delete it")
        if name in FIXED_VOLUMES and found[name] != volume:
            raise InvalidTemplate(
                f"{path}.spec.volumes: {name} is RLJob's own: {FIXED_VOLUMES[name]}, or name yours differently"
            )


def _require_container(pod: Pod, merged: Pod, path: str) -> None:
    own, found = own_container(pod), own_container(merged)
    path = f"{path}.spec.containers"
    assert own is not None
    if found is None:
        raise InvalidTemplate(f"{path}: the container {CONTAINER} is needed; do not delete or replace it")
    path = f"{path}[{CONTAINER}]"
    _require_same(own, found, _FIXED_CONTAINER_FIELDS, path)
    _require_mounts(own, found, path)
    _require_variables(own, found, path, is_controller(pod))


def _require_mounts(own: dict[str, Any], found: dict[str, Any], path: str) -> None:
    mounts = {mount["mountPath"]: mount for mount in found.get("volumeMounts") or []}
    for mount in own["volumeMounts"]:
        if mounts.get(mount["mountPath"]) != mount:
            raise InvalidTemplate(
                f"{path}.volumeMounts: RLJob mounts its volume {mount['name']} at {mount['mountPath']}; mount yours "
                f"elsewhere, or override the volume {mount['name']} in spec.volumes"
            )


def _require_variables(own: dict[str, Any], found: dict[str, Any], path: str, controller: bool) -> None:
    fixed = _FIXED_VARIABLES + (_CONTROLLER_GPU_VARIABLES if controller else ())
    before = {entry["name"]: entry for entry in own["env"]}
    after = {entry["name"]: entry for entry in found.get("env") or []}
    for variable in sorted(before.keys() | after.keys()):
        if variable.startswith(fixed) and before.get(variable) != after.get(variable):
            raise InvalidTemplate(f"{path}.env: {variable} is set by RLJob; remove it")


def _require_same(own: dict[str, Any], found: dict[str, Any], fixed: Mapping[str, str], path: str) -> None:
    for name, reason in fixed.items():
        if own.get(name) != found.get(name):
            raise InvalidTemplate(f"{path}.{name}: cannot be set here: {reason}; remove it")


# --- Strategic merge ---
# Rules: https://github.com/kubernetes/community/blob/master/contributors/devel/sig-api-machinery/strategic-merge-patch.md


@dataclass(frozen=True, slots=True)
class KeyedList:
    """A list whose elements are identified by `keys`; all other lists are replaced as a whole.

    `one_of`: an element is a choice between its other fields, so a patch that makes another choice drops the first one.
    `fields`: the keyed lists within an element.
    """

    keys: tuple[str, ...]
    one_of: bool = False
    fields: Fields = field(default_factory=dict)


Fields = Mapping[str, "KeyedList | Fields"]

_CONTAINER: Fields = {
    "env": KeyedList(("name",), one_of=True),
    "ports": KeyedList(("containerPort", "protocol")),
    "resources": {"claims": KeyedList(("name",))},
    "volumeDevices": KeyedList(("devicePath",)),
    "volumeMounts": KeyedList(("mountPath",)),
}

POD: Fields = {
    "spec": {
        "containers": KeyedList(("name",), fields=_CONTAINER),
        "hostAliases": KeyedList(("ip",)),
        "imagePullSecrets": KeyedList(("name",)),
        "initContainers": KeyedList(("name",), fields=_CONTAINER),
        "resourceClaims": KeyedList(("name",), one_of=True),
        "resources": {"claims": KeyedList(("name",))},
        "schedulingGates": KeyedList(("name",)),
        "topologySpreadConstraints": KeyedList(("topologyKey", "whenUnsatisfiable")),
        "volumes": KeyedList(("name",), one_of=True),
    }
}
"""The keyed lists of a pod, as the API server's OpenAPI document has them (x-kubernetes-list-map-keys)."""

_KEY_DEFAULTS = {"protocol": "TCP"}


def strategic_merge(base: dict[str, Any], patch: dict[str, Any], fields: Fields, path: str) -> dict[str, Any]:
    """`base` with `patch` over it; neither is changed. null deletes a field, `$patch: delete` or `replace` an object.

    `path`: of the patch, for messages. Raises InvalidTemplate if the patch does not fit.
    """
    match patch.get("$patch", "merge"):
        case "delete":
            return {}
        case "replace":
            base = {}
        case "merge":
            pass
        case other:
            raise InvalidTemplate(f"{path}.$patch: expected merge, replace or delete, found {shown(other)}")
    merged = dict(base)
    for name, value in patch.items():
        if name.startswith("$"):
            _refuse_directive(name, path)
        elif value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merged_value(base.get(name), value, fields.get(name, {}), f"{path}.{name}")
    return merged


def _refuse_directive(name: str, path: str) -> None:
    if name != "$patch":
        raise InvalidTemplate(f"{path}.{name}: expected no directive but $patch; remove it")


def _merged_value(base: Any, patch: Any, fields: KeyedList | Fields, path: str) -> Any:
    if isinstance(fields, KeyedList):
        return _merged_list(expect_list(base or [], path), expect_list(patch, path), fields, path)
    if isinstance(patch, dict) and (base is None or isinstance(base, dict)):
        return strategic_merge(base or {}, patch, fields, path)
    if base is not None and kind_of(base) != kind_of(patch):
        raise InvalidTemplate(f"{path}: expected {kind_of(base)}, found {kind_of(patch)}")
    return patch


def _merged_list(base: list[Any], patch: list[Any], shape: KeyedList, path: str) -> list[Any]:
    elements = [expect_object(element, f"{path}[{i}]") for i, element in enumerate(patch)]
    replaced = any(element.get("$patch") == "replace" for element in elements)
    merged = {} if replaced else {_key(element, shape, path): element for element in base}
    given = set()
    for i, element in enumerate(elements):
        if element == {"$patch": "replace"}:
            continue
        key = _key(element, shape, f"{path}[{i}]")
        if key in given:
            raise InvalidTemplate(f"{path}[{i}]: {_key_text(key, shape)} appears twice; remove one")
        given.add(key)
        if element.get("$patch") == "delete":
            merged.pop(key, None)
        else:
            merged[key] = _merged_element(merged.get(key, {}), element, shape, f"{path}[{i}]")
    return list(merged.values())


def _merged_element(base: dict[str, Any], patch: dict[str, Any], shape: KeyedList, path: str) -> dict[str, Any]:
    merged = strategic_merge(base, patch, shape.fields, path)
    chooses = any(name not in shape.keys for name in patch)
    if shape.one_of and chooses:
        return {name: value for name, value in merged.items() if name in patch}
    return merged


def _key(element: dict[str, Any], shape: KeyedList, path: str) -> tuple[Any, ...]:
    key = tuple(element.get(name, _KEY_DEFAULTS.get(name)) for name in shape.keys)
    for name, part in zip(shape.keys, key, strict=True):
        if type(part) is not (int if name == "containerPort" else str):
            raise InvalidTemplate(f"{path}.{name}: expected the {name} of the element to merge, found {shown(part)}")
    return key


def _key_text(key: tuple[Any, ...], shape: KeyedList) -> str:
    return ", ".join(f"{name} {part}" for name, part in zip(shape.keys, key, strict=True))
