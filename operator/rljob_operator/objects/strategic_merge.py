"""Kubernetes' strategic merge patch, for pods: objects merge field by field, and so do lists whose elements have a key.

Rules: https://github.com/kubernetes/community/blob/master/contributors/devel/sig-api-machinery/strategic-merge-patch.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_api.quantity import shown
from rljob_operator.objects.invalid_template import InvalidTemplate, expect_list, expect_object, kind_of

Object = dict[str, Any]


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


def strategic_merge(base: Object, patch: Object, fields: Fields, path: str) -> Object:
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


def _merged_element(base: Object, patch: Object, shape: KeyedList, path: str) -> Object:
    merged = strategic_merge(base, patch, shape.fields, path)
    chooses = any(name not in shape.keys for name in patch)
    if shape.one_of and chooses:
        return {name: value for name, value in merged.items() if name in patch}
    return merged


def _key(element: Object, shape: KeyedList, path: str) -> tuple[Any, ...]:
    key = tuple(element.get(name, _KEY_DEFAULTS.get(name)) for name in shape.keys)
    for name, part in zip(shape.keys, key, strict=True):
        if type(part) is not (int if name == "containerPort" else str):
            raise InvalidTemplate(f"{path}.{name}: expected the {name} of the element to merge, found {shown(part)}")
    return key


def _key_text(key: tuple[Any, ...], shape: KeyedList) -> str:
    return ", ".join(f"{name} {part}" for name, part in zip(shape.keys, key, strict=True))
