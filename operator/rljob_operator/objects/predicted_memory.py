"""Host memory, /dev/shm and disk that a job's pods are predicted to need, from its spec alone.

The spec does not change during an attempt, so neither do the pods that follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob_api.job import RLJobSpec
from rljob_api.quantity import byte_quantity, quantity_bytes
from rljob_api.roles import PodTemplate
from rljob_api.status import Role
from rljob_memory.budget import Budget
from rljob_memory.hardware import DeviceKind
from rljob_memory.model_shape import compute_bytes, shape_in_uri
from rljob_memory.pod_memory import (
    limit_bytes,
    low_limits,
    memory_limit_in,
    predicted_budget,
    request_bytes,
    resources_in,
)
from rljob_operator.objects.pod_layout import WorkerGroup


def predicted_memory(spec: RLJobSpec) -> Budget | None:
    """The prediction; None for another trainer, and for a model whose URI does not have its size."""
    if spec.trainer is not None:
        return None
    device: DeviceKind = "cuda" if spec.policy.gpus_per_replica else "cpu"
    shape = shape_in_uri(spec, compute_bytes(spec, device))
    return None if shape is None else predicted_budget(spec, shape, device)


def memory_request(spec: RLJobSpec, group: WorkerGroup) -> str | None:
    """Memory request of a worker whose template has none; None if nothing is predicted."""
    prediction = predicted_memory(spec)
    return (
        None
        if prediction is None
        else byte_quantity(request_bytes(prediction.peak("host", pod=prediction.pod_of(group.role))))
    )


def low_memory_limit(spec: RLJobSpec) -> str | None:
    """The message about memory limits of the user's that are below the prediction; None if there are none."""
    if all(memory_limit_in(template) is None for template in (spec.policy.template, spec.rollout.template)):
        return None
    prediction = predicted_memory(spec)
    return None if prediction is None else "; ".join(message for _, message in low_limits(spec, prediction)) or None


def predicted_limit_bytes(spec: RLJobSpec, role: Role) -> int | None:
    """Memory limit of the role's pods that follows from the prediction; None if it is the user's, or a LimitRange's, or
    if nothing is predicted. `limits: {memory: null}` in the template keeps a pod without a limit."""
    prediction = None if role == "controller" else predicted_memory(spec)
    if prediction is None:
        return None
    template, pod = spec.policy.template, prediction.pod_of(role)
    if pod == "rollout":
        template = spec.rollout.template or PodTemplate()
    resources = resources_in(template)
    limits, requests = resources.get("limits"), resources.get("requests")
    if isinstance(limits, Mapping) and "memory" in limits:
        return None
    requested = requests.get("memory") if isinstance(requests, Mapping) else None
    try:
        return limit_bytes(prediction.peak("host", pod=pod), quantity_bytes(requested) if requested else 0)
    except ValueError:
        return None  # a quantity that only the API server understands, such as 4e9
