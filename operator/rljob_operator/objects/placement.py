"""Placement of pods: the controller on nodes without GPUs, workers with GPUs on nodes that have them, and groups of
Kueue and Volcano."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

from rljob_api.job import RLJob
from rljob_api.quantity import quantity_value
from rljob_operator import labels, names
from rljob_operator.objects.attempt import ControllerPlacement, JobAttempt, Manifest, job_object
from rljob_operator.objects.pod_template import limits_and_requests
from rljob_operator.objects.strategic_merge import InvalidTemplate

Expression = dict[str, Any]

GPU_FREE_NODE_EXPRESSIONS: list[Expression] = [
    {"key": labels.NODE_HAS_GPUS, "operator": "DoesNotExist"},  # set by this operator
    {"key": "nvidia.com/gpu.present", "operator": "NotIn", "values": ["true"]},  # NVIDIA's GPU feature discovery
    {"key": "cloud.google.com/gke-accelerator", "operator": "DoesNotExist"},  # GKE
    {"key": "eks.amazonaws.com/instance-gpu-name", "operator": "DoesNotExist"},  # EKS Auto Mode
    {"key": "k8s.amazonaws.com/accelerator", "operator": "DoesNotExist"},  # EKS, by convention of cluster-autoscaler
    {"key": "karpenter.k8s.aws/instance-gpu-name", "operator": "DoesNotExist"},  # Karpenter on AWS
    {"key": "kubernetes.azure.com/accelerator", "operator": "DoesNotExist"},  # AKS
    {"key": "karpenter.azure.com/sku-gpu-name", "operator": "DoesNotExist"},  # Karpenter on Azure, AKS
]
"""Expressions that nodes without GPUs match, with the program or cloud that sets the label."""

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_MAX_WEIGHT = 100


def place_controller(spec: dict[str, Any], placement: ControllerPlacement, gpu_resource: str) -> None:
    """Add the controller's placement to a pod's `spec`, in addition to that of the user.

    GpuFreeNodes: only nodes without GPUs. Otherwise they are preferred; AnyNode also tolerates the taint of GPU nodes,
    which GKE Autopilot refuses in pods without GPUs.
    """
    if placement == "GpuFreeNodes":
        _require(spec, "matchExpressions", GPU_FREE_NODE_EXPRESSIONS)
        return
    given = _node_affinity(spec).get(_PREFERRED) or []
    preference = {"weight": _MAX_WEIGHT, "preference": {"matchExpressions": GPU_FREE_NODE_EXPRESSIONS}}
    _set_node_affinity(spec, _PREFERRED, [*given, preference])
    if placement == "AnyNode":
        tolerate_gpu_nodes(spec, gpu_resource)


def exclude_nodes(spec: dict[str, Any], nodes: Sequence[str]) -> None:
    """Keep a pod off `nodes`, in addition to the placement of the user."""
    if nodes:
        # A field selector takes one value.
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
        _require(spec, "matchFields", fields)


def tolerate_gpu_nodes(spec: dict[str, Any], gpu_resource: str) -> None:
    """Tolerate the usual taint of GPU nodes, which has the name of the resource."""
    toleration = {"key": gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    given = spec.get("tolerations") or []
    spec["tolerations"] = given if toleration in given else [*given, toleration]


def _require(
    spec: dict[str, Any], kind: Literal["matchExpressions", "matchFields"], expressions: list[Expression]
) -> None:
    """Require `expressions` in addition to those of the user: terms are alternatives, so each gets them."""
    required = _node_affinity(spec).get(_REQUIRED) or {}
    # A term without expressions matches no node, and must stay so.
    terms = [
        {**term, kind: [*(term.get(kind) or []), *expressions]} if term else term
        for term in required.get("nodeSelectorTerms") or [{kind: []}]
    ]
    _set_node_affinity(spec, _REQUIRED, {**required, "nodeSelectorTerms": terms})


def _node_affinity(spec: dict[str, Any]) -> dict[str, Any]:
    return (spec.get("affinity") or {}).get("nodeAffinity") or {}


def _set_node_affinity(spec: dict[str, Any], field: str, value: Any) -> None:
    spec["affinity"] = {**(spec.get("affinity") or {}), "nodeAffinity": {**_node_affinity(spec), field: value}}


# --- Kueue: a plain pod group in a queue ---


KUEUE_PREFIX = "kueue.x-k8s.io/"
ADMISSION_GATE = f"{KUEUE_PREFIX}admission"
QUEUE_LABEL = f"{KUEUE_PREFIX}queue-name"
_KUEUE_GROUP = f"{KUEUE_PREFIX}pod-group-name"


def queue_of(job: RLJob) -> str | None:
    """Return the LocalQueue of Kueue that admits the job: `spec.queueName`, or Kueue's own label for the queue of any
    job."""
    return job.spec.queue_name or job.metadata.labels.get(QUEUE_LABEL) or None


def join_kueue_group(attempt: JobAttempt, pod: dict[str, Any]) -> None:
    """Put the pod into the attempt's group.

    Kueue's scheduling gate is set here too: if Kueue does not manage the pods of the namespace, a job with a queue
    waits instead of running outside the quota. The group is not retriable, because the pods of an attempt are not
    replaced one by one. Labels of the job for Kueue, such as its priority class, are copied. Raises InvalidTemplate if
    the job has the label of a queue and asks for Volcano; with `spec.queueName`, the API server refuses that.
    """
    if attempt.spec.gang == "Volcano":
        raise InvalidTemplate(
            f"spec.gang: Volcano cannot schedule jobs that Kueue admits, and the job has the label {QUEUE_LABEL}; "
            "write gang: Auto, or remove the label"
        )
    metadata, spec = pod["metadata"], pod["spec"]
    metadata["labels"] = {
        **metadata["labels"],
        **{name: value for name, value in attempt.job.metadata.labels.items() if name.startswith(KUEUE_PREFIX)},
        QUEUE_LABEL: queue_of(attempt.job),
        _KUEUE_GROUP: names.kueue_group_name(attempt.name, attempt.number),
    }
    metadata["annotations"] = {
        **(metadata.get("annotations") or {}),
        f"{KUEUE_PREFIX}pod-group-total-count": str(attempt.layout.pod_count),
        f"{KUEUE_PREFIX}retriable-in-group": "false",
    }
    gate = {"name": ADMISSION_GATE}
    spec["schedulingGates"] = [*(other for other in spec.get("schedulingGates") or [] if other != gate), gate]


# --- Volcano: a PodGroup ---


_VOLCANO_GROUP = "scheduling.k8s.io/group-name"
_VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"


def join_volcano_group(attempt: JobAttempt, pod: dict[str, Any]) -> None:
    """Let Volcano schedule the pod, as one of the group."""
    pod["spec"]["schedulerName"] = "volcano"
    annotations = pod["metadata"].get("annotations") or {}
    pod["metadata"]["annotations"] = {**annotations, _VOLCANO_GROUP: names.object_name(attempt.name)}


def build_pod_group(attempt: JobAttempt, roles: Sequence[tuple[dict[str, Any], int]]) -> Manifest:
    """Build the PodGroup: all pods or none, in the queue of the job's annotation scheduling.volcano.sh/queue-name.

    The priority class is that of the workers. `roles`: a pod of each role, and the number of its pods; workers last.
    """
    totals: defaultdict[str, Fraction] = defaultdict(Fraction)
    for pod, count in roles:
        for container in pod["spec"]["containers"]:
            limits, requests = limits_and_requests(container)
            for resource, quantity in (limits | requests).items():
                totals[resource] += quantity_value(quantity or 0) * count
    spec = {
        "minMember": sum(count for _, count in roles),
        "minResources": {resource: quantity_text(total) for resource, total in sorted(totals.items())},
        "queue": attempt.job.metadata.annotations.get(_VOLCANO_QUEUE),
        "priorityClassName": roles[-1][0]["spec"].get("priorityClassName"),
    }
    given = {name: value for name, value in spec.items() if value}
    return job_object(attempt, "scheduling.volcano.sh/v1beta1", "PodGroup", names.object_name(attempt.name), spec=given)


def quantity_text(value: Fraction) -> str:
    """Return `value` as a quantity: an integer if possible, else in thousandths, rounded up."""
    return str(value.numerator) if value.denominator == 1 else f"{math.ceil(value * 1000)}m"


def is_in_group(pod: dict[str, Any]) -> bool:
    """Return True if the pod was created in a group of Kueue or Volcano, which places all pods of the group or none."""
    metadata = pod["metadata"]
    return _KUEUE_GROUP in (metadata.get("labels") or {}) or _VOLCANO_GROUP in (metadata.get("annotations") or {})
