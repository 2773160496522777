"""Strategic merge of the user's template over a pod, and checks of the types and quantities in the result.

Rules: https://github.com/kubernetes/community/blob/master/contributors/devel/sig-api-machinery/strategic-merge-patch.md
"""

from __future__ import annotations

from typing import Any

from rljob_api.quantity import quantity_value, shown


class InvalidTemplate(ValueError):
    """A manifest that cannot be turned into pods. The message names the field, the error and the fix."""


_CONTAINER_LISTS = {
    "env": ("name",),
    "ports": ("containerPort", "protocol"),
    "resources.claims": ("name",),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
}
LIST_KEYS: dict[str, tuple[str, ...]] = {
    "spec.containers": ("name",),
    "spec.hostAliases": ("ip",),
    "spec.imagePullSecrets": ("name",),
    "spec.initContainers": ("name",),
    "spec.resourceClaims": ("name",),
    "spec.resources.claims": ("name",),
    "spec.schedulingGates": ("name",),
    "spec.topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "spec.volumes": ("name",),
    **{
        f"spec.{kind}.{name}": keys
        for kind in ("containers", "initContainers")
        for name, keys in _CONTAINER_LISTS.items()
    },
}
"""Lists of a pod whose elements are merged by these keys, as in the API server's OpenAPI document
(x-kubernetes-list-map-keys). All other lists are replaced as a whole."""

_CHOICES = ("env", "resourceClaims", "volumes")
"""Lists whose elements are a choice between fields: a patch that makes another choice drops the first one."""
_KEY_DEFAULTS = {"protocol": "TCP"}


def strategic_merge(base: dict[str, Any], patch: dict[str, Any], path: str, field: str = "") -> dict[str, Any]:
    """Return `base` with `patch` over it; neither is changed. null deletes a field, `$patch: delete` or `replace` an
    object.

    `path`: that of the patch in the manifest, for messages. `field`: name in a pod, see LIST_KEYS. Raises
    InvalidTemplate if the patch does not fit.
    """
    directive = patch.get("$patch", "merge")
    if directive == "delete":
        return {}
    if directive not in ("merge", "replace"):
        raise InvalidTemplate(f"{path}.$patch: expected merge, replace or delete, found {shown(directive)}")
    merged = dict(base) if directive == "merge" else {}
    for name, value in patch.items():
        if name.startswith("$"):
            if name != "$patch":
                raise InvalidTemplate(f"{path}.{name}: expected no directive but $patch; remove it")
        elif value is None:
            merged.pop(name, None)
        else:
            merged[name] = _merge_value(merged.get(name), value, f"{path}.{name}", f"{field}.{name}".lstrip("."))
    return merged


def _merge_value(base: Any, patch: Any, path: str, field: str) -> Any:
    if field in LIST_KEYS:
        _require_kind(base or [], [], path)
        _require_kind(patch, [], path)
        return _merge_list(base or [], patch, path, field)
    if isinstance(patch, dict) and (base is None or isinstance(base, dict)):
        return strategic_merge(base or {}, patch, path, field)
    if base is not None:
        _require_kind(patch, base, path)
    return patch


def _merge_list(base: list[Any], patch: list[Any], path: str, field: str) -> list[Any]:
    for i, element in enumerate(patch):
        _require_kind(element, {}, f"{path}[{i}]")
    replaced = any(element.get("$patch") == "replace" for element in patch)
    merged = {} if replaced else {_key(element, path, field): element for element in base}
    seen = set()
    for i, element in enumerate(patch):
        if element == {"$patch": "replace"}:
            continue
        place = f"{path}[{i}]"
        key = _key(element, place, field)
        if key in seen:
            pairs = ", ".join(f"{name} {part}" for name, part in zip(LIST_KEYS[field], key, strict=True))
            raise InvalidTemplate(f"{place}: {pairs} appears twice; remove one")
        seen.add(key)
        if element.get("$patch") == "delete":
            merged.pop(key, None)
            continue
        combined = strategic_merge(merged.get(key, {}), element, place, field)
        chooses = field.endswith(_CHOICES) and not element.keys() <= set(LIST_KEYS[field])
        merged[key] = {name: value for name, value in combined.items() if name in element} if chooses else combined
    return list(merged.values())


def _key(element: dict[str, Any], path: str, field: str) -> tuple[Any, ...]:
    key = tuple(element.get(name, _KEY_DEFAULTS.get(name)) for name in LIST_KEYS[field])
    for name, part in zip(LIST_KEYS[field], key, strict=True):
        if type(part) is not (int if name == "containerPort" else str):
            raise InvalidTemplate(f"{path}.{name}: expected the {name} of the element to merge, found {shown(part)}")
    return key


# --- Types and quantities ---


_TERM: dict[str, Any] = {"matchExpressions": [], "matchFields": []}
_TYPES: dict[str, Any] = {
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_TERM]},
            "preferredDuringSchedulingIgnoredDuringExecution": [],
        }
    },
    "schedulingGates": [],
    "tolerations": [],
}
"""Fields of a pod's spec that RLJob adds to, with their types."""


def require_types(value: Any, path: str, types: Any = _TYPES) -> None:
    """Raise InvalidTemplate if a field in a pod's spec has another type than in `types`. null counts as absent."""
    if value is None:
        return
    _require_kind(value, types, path)
    if isinstance(types, dict):
        for name, type_ in types.items():
            require_types(value.get(name), f"{path}.{name}", type_)
    elif types:
        for i, element in enumerate(value):
            require_types(element, f"{path}[{i}]", types[0])


def _require_kind(value: Any, example: Any, path: str) -> None:
    if _kind_of(value) != _kind_of(example):
        raise InvalidTemplate(f"{path}: expected {_kind_of(example)}, found {_kind_of(value)}")


def _kind_of(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else "a value"


_QUANTITIES = ("divisor", "sizeLimit")
_MAPS_OF_QUANTITIES = ("limits", "overhead", "requests")
_FREE_MAPS = ("annotations", "labels", "matchLabels", "nodeSelector", "options", "volumeAttributes")
"""Fields whose keys are the user's."""


def require_quantities(part: Any, path: str) -> None:
    """Raise InvalidTemplate if a quantity in a part of a pod's spec is malformed or out of range; null is absent.

    The API server would refuse it too, but takes minutes of CPU time to read one such as 1e9999999.
    """
    if isinstance(part, list):
        for i, element in enumerate(part):
            require_quantities(element, f"{path}[{i}]")
    elif isinstance(part, dict):
        for name, value in part.items():
            if name in _QUANTITIES:
                _require_quantity(value, f"{path}.{name}")
                continue
            if name in (*_MAPS_OF_QUANTITIES, "resources"):
                _require_kind(value or {}, {}, f"{path}.{name}")
            if name in _MAPS_OF_QUANTITIES:
                for resource, quantity in (value or {}).items():
                    _require_quantity(quantity, f"{path}.{name}[{shown(resource)}]")
            elif name not in _FREE_MAPS:
                require_quantities(value, f"{path}.{name}")


def _require_quantity(quantity: Any, path: str) -> None:
    try:
        if quantity is not None:
            quantity_value(quantity)
    except ValueError as error:
        raise InvalidTemplate(f"{path}: {error}") from None
