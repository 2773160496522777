"""Node placement: the controller on nodes without GPUs, workers with GPUs on nodes that have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rljob_operator import labels
from rljob_operator.objects.attempt import ControllerPlacement
from rljob_operator.objects.template_checks import expect_list, expect_object

Expression = dict[str, Any]
TermPart = Literal["matchExpressions", "matchFields"]
"""Labels of a node, or its name."""


@dataclass(frozen=True, slots=True)
class GpuNodeLabel:
    """A label of nodes with GPUs."""

    key: str

    set_by: str
    """Program that sets the label."""

    value: str | None = None
    """Value that means GPUs; None for any."""

    def absent(self) -> Expression:
        if self.value is None:
            return {"key": self.key, "operator": "DoesNotExist"}
        return {"key": self.key, "operator": "NotIn", "values": [self.value]}


GPU_NODE_LABELS = (
    GpuNodeLabel(labels.NODE_HAS_GPUS, "this operator, from the node's allocatable GPUs"),
    GpuNodeLabel("nvidia.com/gpu.present", "NVIDIA's GPU feature discovery and GPU Operator", value="true"),
    GpuNodeLabel("cloud.google.com/gke-accelerator", "GKE"),
    GpuNodeLabel("eks.amazonaws.com/instance-gpu-name", "EKS Auto Mode"),
    GpuNodeLabel("k8s.amazonaws.com/accelerator", "EKS node groups, by convention of the cluster autoscaler"),
    GpuNodeLabel("karpenter.k8s.aws/instance-gpu-name", "Karpenter on AWS"),
    GpuNodeLabel("kubernetes.azure.com/accelerator", "AKS"),
    GpuNodeLabel("karpenter.azure.com/sku-gpu-name", "Karpenter on Azure, AKS node auto-provisioning"),
)

_STRONGEST = 100
_TERMS = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERENCES = "preferredDuringSchedulingIgnoredDuringExecution"


def place_controller(spec: dict[str, Any], placement: ControllerPlacement, gpu_resource: str, path: str) -> None:
    """Add the controller's placement to a pod's `spec`, in addition to that of the user.

    GpuFreeNodes: only nodes without GPUs. Otherwise they are preferred; AnyNode also tolerates the taint of GPU nodes,
    which GKE Autopilot refuses in pods without GPUs. Raises InvalidTemplate if the user's affinity is malformed;
    `path`: of the spec, for the message.
    """
    expressions = [label.absent() for label in GPU_NODE_LABELS]
    if placement == "GpuFreeNodes":
        _require(spec, "matchExpressions", expressions, path)
    else:
        _prefer(spec, expressions, path)
        if placement == "AnyNode":
            tolerate_gpu_nodes(spec, gpu_resource, path)


def keep_off(spec: dict[str, Any], nodes: Sequence[str], path: str) -> None:
    """Exclude `nodes` for a pod, in addition to the placement of the user. Raises as `place_controller` does."""
    if nodes:
        # A field selector takes one value.
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
        _require(spec, "matchFields", fields, path)


def tolerate_gpu_nodes(spec: dict[str, Any], gpu_resource: str, path: str) -> None:
    """Tolerate the usual taint of GPU nodes, which has the name of the resource."""
    toleration = {"key": gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    given = expect_list(spec.get("tolerations", []), f"{path}.tolerations")
    spec["tolerations"] = given if toleration in given else [*given, toleration]


def _require(spec: dict[str, Any], kind: TermPart, expressions: list[Expression], path: str) -> None:
    """Require `expressions` in addition to those of the user: terms are alternatives, so each gets them."""
    node_affinity, path = _node_affinity(spec, path)
    required = expect_object(node_affinity.get(_TERMS, {}), f"{path}.{_TERMS}")
    terms_path = f"{path}.{_TERMS}.nodeSelectorTerms"
    given = expect_list(required.get("nodeSelectorTerms", []), terms_path)
    terms = [expect_object(term, terms_path) for term in given]
    # A term without expressions matches no node, and must stay so.
    narrowed = [_all_of(term, kind, expressions, terms_path) if term else term for term in terms]
    either = narrowed or [{kind: expressions}]
    _set_node_affinity(spec, node_affinity | {_TERMS: {**required, "nodeSelectorTerms": either}})


def _all_of(term: dict[str, Any], kind: TermPart, expressions: list[Expression], path: str) -> dict[str, Any]:
    given = expect_list(term.get(kind, []), f"{path}.{kind}")
    return term | {kind: [*given, *expressions]}


def _prefer(spec: dict[str, Any], expressions: list[Expression], path: str) -> None:
    node_affinity, path = _node_affinity(spec, path)
    preference = {"weight": _STRONGEST, "preference": {"matchExpressions": expressions}}
    given = expect_list(node_affinity.get(_PREFERENCES, []), f"{path}.{_PREFERENCES}")
    _set_node_affinity(spec, node_affinity | {_PREFERENCES: [*given, preference]})


def _node_affinity(spec: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    affinity = expect_object(spec.get("affinity", {}), f"{path}.affinity")
    path = f"{path}.affinity.nodeAffinity"
    return expect_object(affinity.get("nodeAffinity", {}), path), path


def _set_node_affinity(spec: dict[str, Any], node_affinity: dict[str, Any]) -> None:
    spec["affinity"] = {**spec.get("affinity", {}), "nodeAffinity": node_affinity}
