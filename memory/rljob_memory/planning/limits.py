"""Memory requests, limits and claims that follow from a prediction, and warnings about those that the user has set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rljob_api.job import RLJobSpec
from rljob_api.quantity import byte_quantity, quantity_bytes
from rljob_api.roles import PodTemplate
from rljob_api.status import Role
from rljob_memory.planning.prediction import Prediction
from rljob_memory.sizes import GIB, MIB, human_bytes

_LIMIT_FACTOR = 2
"""The limit protects the node's other pods; only a wrong prediction or a leak reaches it."""
_STEP_BYTES = 256 * MIB
_DISK_FACTOR = 1.1
"""File systems keep a part for themselves, and the journal comes on top."""


def request_bytes(predicted_bytes: int) -> int:
    """Memory request of a pod: the prediction, in multiples of 256 MiB."""
    return -(-predicted_bytes // _STEP_BYTES) * _STEP_BYTES


def limit_bytes(predicted_bytes: int, requested_bytes: int) -> int:
    """Memory limit of a pod whose template has none; never below its request."""
    return max(_LIMIT_FACTOR * request_bytes(predicted_bytes), requested_bytes)


def claim_bytes(predicted_bytes: int, default_bytes: int) -> int:
    """Size of a claim for checkpoints: the default, or what the job is predicted to need, in whole GiB."""
    return max(-(-int(predicted_bytes * _DISK_FACTOR) // GIB) * GIB, default_bytes)


def small_claim(spec: RLJobSpec, prediction: Prediction) -> str | None:
    """The message about a `checkpoint.size` that is too small for the checkpoints; None if it is not."""
    needed, size = prediction.disk.total_bytes, spec.checkpoint.size
    if size is None or size >= needed:
        return None
    disk = prediction.disk
    return (
        f"expected at least {human_bytes(needed)} for {disk.checkpoints} checkpoints of "
        f"{human_bytes(disk.checkpoint_bytes)}, the model and caches, found {human_bytes(size)}; "
        f"write {byte_quantity(claim_bytes(needed, 0))}, or lower checkpoint.keep"
    )


def memory_limit_in(template: PodTemplate | None) -> int | None:
    """Memory limit that a template sets for the container `rljob`; None if it sets none, or no valid quantity."""
    limits = resources_in(template).get("limits")
    quantity = limits.get("memory") if isinstance(limits, Mapping) else None
    try:
        return None if quantity is None else quantity_bytes(quantity)
    except ValueError:
        return None


def resources_in(template: PodTemplate | None) -> Mapping[str, Any]:
    """Resources that a template sets for the container `rljob`, which may be the one without a name."""
    containers = (template.spec if template else {}).get("containers")
    for container in containers if isinstance(containers, list) else []:
        if isinstance(container, Mapping) and container.get("name", "rljob") == "rljob":
            resources = container.get("resources")
            return resources if isinstance(resources, Mapping) else {}
    return {}


def low_limits(spec: RLJobSpec, prediction: Prediction) -> Iterator[tuple[Role, str]]:
    """Role and message for each template whose memory limit is below the prediction."""
    pods: tuple[tuple[Role, PodTemplate | None, int], ...] = (
        ("policy", spec.policy.template, prediction.worker.peak_bytes),
        ("rollout", spec.rollout.template, prediction.rollout.peak_bytes if prediction.rollout else 0),
    )
    for role, template, predicted in pods:
        limit = memory_limit_in(template)
        if limit is not None and limit < predicted:
            yield (
                role,
                f"expected a memory limit of at least {human_bytes(predicted)} in spec.{role}.template, the host "
                f"memory that the job is predicted to need, found {human_bytes(limit)}; "
                f"write {byte_quantity(request_bytes(predicted))}, or set recovery.maxHostMemory",
            )
