"""Reduced form of a node: its GPUs, and whether it accepts pods."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from rljob_api.quantity import quantity_bytes
from rljob_operator import labels
from rljob_operator.kube.resources import Object
from rljob_operator.observe.pod_facts import moment
from rljob_operator.reconcile.observed import ObservedNode

RESTARTS_IN_PLACE = "RestartAllContainersOnContainerExits"
"""Among the features that a kubelet declares, from Kubernetes 1.36 on. Pods that ask for it go to no other node."""

_KEEPS_OFF = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True)
class NodeFact:
    node: ObservedNode
    labelled: bool
    """It has the label for nodes with GPUs."""


def node_fact(obj: Object, gpu_resources: tuple[str, ...]) -> NodeFact:
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    allocatable = status.get("allocatable") or {}
    ready: Object = next((c for c in status.get("conditions") or () if c["type"] == "Ready"), {})
    return NodeFact(
        node=ObservedNode(
            name=obj["metadata"]["name"],
            gpus=sum(_count(allocatable.get(resource)) for resource in gpu_resources),
            usable=ready.get("status") == "True" and not spec.get("unschedulable", False),
            tainted=any(taint.get("effect") in _KEEPS_OFF for taint in spec.get("taints") or ()),
            restarts_in_place=RESTARTS_IN_PLACE in (status.get("declaredFeatures") or ()),
            unreachable_since=_unreachable_since(ready),
        ),
        labelled=(obj["metadata"].get("labels") or {}).get(labels.NODE_HAS_GPUS) == "true",
    )


def _unreachable_since(ready: Object) -> datetime | None:
    """The node controller sets the condition Ready to Unknown if the kubelet has not reported for some time."""
    time = ready.get("lastTransitionTime")
    return moment(time) if time and ready.get("status") == "Unknown" else None


def _count(quantity: str | None) -> int:
    """Extended resources are whole numbers, which the API server may write as 1k or 1e3."""
    try:
        return quantity_bytes(quantity) if quantity else 0
    except ValueError:
        return _whole_number(quantity)


def _whole_number(quantity: str | None) -> int:
    try:
        return int(Decimal(quantity or "0"))
    except (ArithmeticError, ValueError):
        return 0
