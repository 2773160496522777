"""Objects that a hostile tenant may store in its own namespace, as JSON: some are deeper than Python can write.

They are of no use to the tenant. Each is made to be read badly: by its depth, size, numbers, types, names or labels.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]

_PLACEHOLDER = "HOSTILE"


@dataclass(frozen=True, slots=True)
class HostileObject:
    """One object, without its namespace."""

    kind: str
    """The kind of hostility."""
    collection: str
    """Path of its collection, such as `api/v1/pods`."""
    name: str
    text: str

    def path(self, namespace: str) -> str:
        """Path to post it to."""
        group, _, plural = self.collection.rpartition("/")
        return f"/{group}/namespaces/{namespace}/{plural}"


@dataclass(frozen=True, slots=True)
class Victim:
    """An honest job in another namespace, whose pods and objects the tenant claims."""

    name: str
    uid: str


_RLJOBS = "apis/rljob.dev/v1alpha1/rljobs"
_REPORTS = "apis/rljob.dev/v1alpha1/stepreports"
_LARGEST_TEXT = 900_000
"""Near etcd's limit for one object, 1.5 MiB, of which managedFields take a part."""


def hostile_objects(seed: int, number: int, victim: Victim) -> Iterator[HostileObject]:
    """`number` objects, in equal parts of each kind, but for large ones: two in a hundred."""
    chance = random.Random(seed)
    for count in range(number):
        make = _RARE.get(count % 100) or _MAKERS[count % len(_MAKERS)]
        yield make(f"hostile-{count}", chance, victim)


def _deep(name: str, chance: random.Random, _: Victim) -> HostileObject:
    levels = chance.choice((150, 450, 950, 1_200, 5_000))
    opening, closing = chance.choice((('{"a":', "}"), ("[", "]")))
    return _job("deep", name, _template({"affinity": _PLACEHOLDER}), opening * levels + "1" + closing * levels)


def _huge_number(name: str, chance: random.Random, _: Victim) -> HostileObject:
    number = chance.choice(("9223372036854775807", "1e308", "-0.0", "1" + "0" * 4_000, "1e-400"))
    field = chance.choice(
        (
            {"rollout": {"engineArgs": {"gpu_memory_utilization": _PLACEHOLDER}}},
            _template({"terminationGracePeriodSeconds": _PLACEHOLDER, "priority": _PLACEHOLDER}),
            _template({"containers": [{"resources": {"limits": {"memory": _PLACEHOLDER}}}]}),
        )
    )
    return _job("number", name, field, number)


def _odd_time(name: str, chance: random.Random, _: Victim) -> HostileObject:
    time = chance.choice(("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-02-30T00:00:00Z", ""))
    annotations = {"metadata": {"annotations": {"rljob.dev/time": time}}}
    spec = {"activeDeadlineSeconds": chance.choice((1, 2**31 - 1)), "ttlSecondsAfterFinished": 2**31 - 1}
    report = {"time": time, "updateTime": time, "attempt": 2**31 - 1, "step": 2**53}
    if chance.random() < 0.5:
        return _other("time", _REPORTS, "StepReport", name, {"status": report, "updateTime": time, "step": 2**53})
    return _job("time", name, {**spec, "controller": {"template": annotations}})


def _wrong_type(name: str, chance: random.Random, _: Victim) -> HostileObject:
    wrong: Any = chance.choice((5, "x", [[]], [None], {"$patch": "replace"}, {"a": None}, True, [{"name": {}}]))
    field = chance.choice(("containers", "volumes", "securityContext", "nodeSelector", "tolerations", "affinity"))
    return _job("type", name, _template({field: wrong}))


def _large(name: str, chance: random.Random, _: Victim) -> HostileObject:
    if chance.random() < 0.5:
        variables = [{"name": f"V{number}", "value": "x" * 80} for number in range(_LARGEST_TEXT // 110)]
        return _job("large", name, _template({"containers": [{"env": variables}]}))
    return _job("large", name, {"rollout": {"engineArgs": {"hf_overrides": {"text": "é" * (_LARGEST_TEXT // 2)}}}})


def _replicated(name: str, chance: random.Random, _: Victim) -> HostileObject:
    """A template that is large, and replicas of it that are many: all pods together have more than 32 MiB."""
    replicas, count = chance.choice(((1024, 3_400), (256, 9_000)))
    variables = [{"name": f"V{number:x}"} for number in range(count)]
    return _job(
        "replicated", name, {"policy": {"replicas": replicas, **_template_of({"containers": [{"env": variables}]})}}
    )


def _quantity(name: str, chance: random.Random, _: Victim) -> HostileObject:
    """Texts that parsers of numbers accept and cannot handle, or handle for minutes."""
    text = chance.choice(("1e999999", "1e9999999", "\u00b2", "9" * 5_000, "1" + "0" * 200_000, "1e-400", "0x10"))
    field: Any = chance.choice(
        (
            {"containers": [{"resources": {"requests": {"memory": text, "cpu": text}}}]},
            {"containers": [{"resources": {"limits": {"nvidia.com/gpu": text}}}]},
            {"containers": [{"env": [{"name": "PYTORCH_CUDA_ALLOC_CONF", "value": f"max_split_size_mb:{text}"}]}]},
            {"volumes": [{"name": "shm", "emptyDir": {"sizeLimit": text}}]},
        )
    )
    role = chance.choice(("controller", "policy"))
    return _job("quantity", name, {role: _template_of(field)})


def _annotated(name: str, chance: random.Random, _: Victim) -> HostileObject:
    annotations: Any = chance.choice(
        ({"a": "x" * 250_000}, {f"a{number}": "" for number in range(10_000)}, {"a": 5}, {"": "x"}, [], "x", None)
    )
    return _job("annotations", name, {"policy": {"template": {"metadata": {"annotations": annotations}}}})


def _sidecars(name: str, chance: random.Random, _: Victim) -> HostileObject:
    """Many containers, or one that is none, and a grace period of 10^11 years."""
    sidecars: Any = chance.choice(
        (
            [{"name": f"s{number}", "resources": {"limits": {"cpu": "1"}}} for number in range(2_000)],
            [{"env": [{"name": chance.choice((5, True, None, [])), "value": "x"}]}],
            [{"name": "s", "resources": {"limits": {"cpu": {}}}}],
            [{"name": 5}],
        )
    )
    where = chance.choice(("containers", "initContainers"))
    return _job("sidecars", name, _template({where: sidecars, "terminationGracePeriodSeconds": 2**62}))


def _name_collision(name: str, chance: random.Random, victim: Victim) -> HostileObject:
    """Names that the objects of a job of the victim's name would have in this namespace."""
    path, kind, content = chance.choice(
        (
            ("api/v1/configmaps", "ConfigMap", {"data": {"job.yaml": "x"}}),
            ("api/v1/services", "Service", {"spec": {"clusterIP": "None", "selector": _labels(victim)}}),
            ("api/v1/serviceaccounts", "ServiceAccount", {}),
            (_REPORTS, "StepReport", {"status": {"attempt": 1, "step": 10**6}}),
        )
    )
    return _other("name", path, kind, f"{victim.name}-{name}", content, labels=_labels(victim), owner=victim)


def _claimed_pod(name: str, chance: random.Random, victim: Victim) -> HostileObject:
    """A pod with the labels of the victim's, that names the victim as its owner."""
    context = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    container = {
        "name": "rljob",
        "image": "localhost/none",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    spec = {"containers": [container], "securityContext": context, "schedulerName": "none"}
    owner = victim if chance.random() < 0.5 else None
    return _other("pod", "api/v1/pods", "Pod", name, {"spec": spec}, labels=_labels(victim), owner=owner)


_MAKERS: tuple[Callable[[str, random.Random, Victim], HostileObject], ...] = (
    _deep,
    _huge_number,
    _odd_time,
    _wrong_type,
    _quantity,
    _annotated,
    _sidecars,
    _name_collision,
    _claimed_pod,
)


_RARE = {25: _replicated, 50: _large}
"""By the last two digits of the number."""


def _template(spec: Object) -> Object:
    return {"policy": _template_of(spec)}


def _template_of(spec: Object) -> Object:
    return {"template": {"spec": spec}}


def _labels(victim: Victim) -> dict[str, str]:
    return {
        "app.kubernetes.io/managed-by": "rljob-operator",
        "rljob.dev/job-name": victim.name,
        "rljob.dev/job-uid": victim.uid,
        "rljob.dev/role": "policy",
        "rljob.dev/index": "0",
        "rljob.dev/attempt": "1",
    }


def _job(kind: str, name: str, spec: Object, inserted: str = "") -> HostileObject:
    manifest = {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": "random://qwen3"},
            "task": {"name": "digits"},
            "algorithm": {"steps": 3},
            "checkpoint": {"volume": {"emptyDir": {}}},
            **spec,
        },
    }
    return HostileObject(
        kind, _RLJOBS, name, json.dumps(manifest, ensure_ascii=False).replace(f'"{_PLACEHOLDER}"', inserted)
    )


def _other(
    kind: str,
    path: str,
    api_kind: str,
    name: str,
    content: Object,
    *,
    labels: dict[str, str] | None = None,
    owner: Victim | None = None,
) -> HostileObject:
    metadata: Object = {"name": name, "labels": labels or {"app.kubernetes.io/managed-by": "rljob-operator"}}
    if owner:
        reference = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "name": owner.name, "uid": owner.uid}
        metadata["ownerReferences"] = [{**reference, "controller": True}]
    version = path.removeprefix("apis/").removeprefix("api/").rpartition("/")[0]
    manifest = {"apiVersion": version, "kind": api_kind, "metadata": metadata, **content}
    return HostileObject(kind, path, name, json.dumps(manifest, ensure_ascii=False))
