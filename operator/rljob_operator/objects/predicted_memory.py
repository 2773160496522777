"""Host memory, /dev/shm and disk that a job's pods are predicted to need, from its spec alone.

The spec does not change during an attempt, so neither do the pods that follow from it.
"""

from __future__ import annotations

from rljob_api.job import RLJobSpec
from rljob_api.pod_template import PodTemplate
from rljob_api.quantity import byte_quantity
from rljob_api.status import Role
from rljob_memory.planning.host_memory import DeviceKind, HostMemory
from rljob_memory.planning.limits import low_limits, memory_limit_in, request_bytes, resources_in
from rljob_memory.planning.model_size import compute_bytes, shape_in_uri
from rljob_memory.planning.prediction import Prediction, predict_before_plan
from rljob_operator.objects.pod_layout import WorkerGroup


def predicted_memory(spec: RLJobSpec) -> Prediction | None:
    """The prediction; None for another trainer, and for a model whose URI does not have its size."""
    if spec.trainer is not None:
        return None
    device: DeviceKind = "cuda" if spec.policy.gpus_per_replica else "cpu"
    shape = shape_in_uri(spec, compute_bytes(spec, device))
    return None if shape is None else predict_before_plan(spec, shape, device)


def memory_request(spec: RLJobSpec, group: WorkerGroup) -> str | None:
    """Memory request of a worker whose template has none; None if nothing is predicted."""
    host = host_memory_of(predicted_memory(spec), group)
    return None if host is None else byte_quantity(request_bytes(host.peak_bytes))


def low_memory_limit(spec: RLJobSpec) -> str | None:
    """The message about memory limits of the user's that are below the prediction; None if there are none."""
    if all(memory_limit_in(template) is None for template in (spec.policy.template, spec.rollout.template)):
        return None
    prediction = predicted_memory(spec)
    return None if prediction is None else "; ".join(message for _, message in low_limits(spec, prediction)) or None


def sets_no_limit(template: PodTemplate | None) -> bool:
    """True if the memory limit of the template's pods is not the user's."""
    return "memory" not in (resources_in(template).get("limits") or {})


def limit_is_predicted(spec: RLJobSpec, role: Role) -> bool:
    """True if the memory limit of the role's pods follows from the prediction, rather than from the user or a
    LimitRange."""
    if role == "controller" or predicted_memory(spec) is None:
        return False
    return sets_no_limit(spec.rollout.template if role == "rollout" else spec.policy.template)


def host_memory_of(prediction: Prediction | None, group: WorkerGroup) -> HostMemory | None:
    """The part of the prediction for one pod of `group`."""
    if prediction is None:
        return None
    return prediction.rollout if group.role == "rollout" else prediction.worker
