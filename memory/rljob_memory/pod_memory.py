"""Memory requests, limits and claims of a job's pods, before its machine is known, and warnings about the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemorySettings
from rljob_api.quantity import byte_quantity, quantity_bytes
from rljob_api.roles import PodTemplate
from rljob_memory.budget import Budget, Copies, Line, Pod, Setup, budget
from rljob_memory.budget.host import checkpoint_bytes
from rljob_memory.hardware import ASSUMED, DeviceKind
from rljob_memory.model_shape import ModelShape
from rljob_memory.plan import first_plan
from rljob_memory.sizes import GIB, MIB, human_bytes
from rljob_memory.workload import Workload, workload_of

_LIMIT_FACTOR = 2
"""The limit protects the node's other pods; only a wrong prediction or a leak reaches it."""
_STEP_BYTES = 256 * MIB
_DISK_FACTOR = 1.1
"""File systems keep a part for themselves, and the journal comes on top."""


def predicted_budget(spec: RLJobSpec, model: ModelShape, device: DeviceKind) -> Budget:
    """The budget on a machine that is not known yet, with room for all copies: with or without `optimizerOffload`, the
    larger, if it is `Auto`."""
    return _on_assumed_machine(spec.memory, workload_of(spec), model, device)


@lru_cache(maxsize=1024)
def _on_assumed_machine(settings: MemorySettings, work: Workload, model: ModelShape, device: DeviceKind) -> Budget:
    """Cached, because each reconcile of a job asks several times."""
    setup = Setup(work, model, ASSUMED[device])
    plan = first_plan(settings, setup)
    plans = [plan]
    if settings.optimizer_offload == "Auto" and device == "cuda":
        plans = [plan.model_copy(update={"optimizer_offload": offload}) for offload in (0.0, 1.0)]
    budgets = [budget(setup, each, Copies()) for each in plans]
    return max(budgets, key=lambda predicted: predicted.peak("host"))


def summary(predicted: Budget, spec: RLJobSpec, model: ModelShape) -> str:
    """One line: `host memory 15.2 GiB a worker (…), /dev/shm 128 MiB, disk 21.0 GiB (…)`."""
    lines = sorted(predicted.of("host").lines, key=lambda line: line.bytes)
    shown = ", ".join(f"{_named(line)} {human_bytes(line.bytes)}" for line in lines[-1:-5:-1])
    return (
        f"host memory {human_bytes(predicted.peak('host'))} a worker (largest: {shown}), "
        f"/dev/shm {human_bytes(shared_memory_bytes(predicted))}, disk {human_bytes(predicted.peak('disk'))} "
        f"({_checkpoints(spec, model)})"
    )


def _named(line: Line) -> str:
    return line.use if line.use.startswith(line.owner) else f"{line.owner} {line.use}"


def _checkpoints(spec: RLJobSpec, model: ModelShape) -> str:
    one = checkpoint_bytes(workload_of(spec), model)
    return f"{spec.checkpoint.keep + 1} checkpoints of {human_bytes(one)}"


def shared_memory_bytes(predicted: Budget) -> int:
    """/dev/shm of each pod, the same for all. What is used of it counts as host memory, too."""
    return max(predicted.peak("shm", pod=pod) for pod in predicted.pods())


def request_bytes(predicted_bytes: int) -> int:
    """Memory request of a pod: the prediction, in multiples of 256 MiB."""
    return -(-predicted_bytes // _STEP_BYTES) * _STEP_BYTES


def limit_bytes(predicted_bytes: int, requested_bytes: int) -> int:
    """Memory limit of a pod whose template has none; never below its request."""
    return max(_LIMIT_FACTOR * request_bytes(predicted_bytes), requested_bytes)


def claim_bytes(predicted_bytes: int, default_bytes: int) -> int:
    """Size of a claim for checkpoints: the default, or what the job is predicted to need, in whole GiB."""
    return max(-(-int(predicted_bytes * _DISK_FACTOR) // GIB) * GIB, default_bytes)


def small_claim(spec: RLJobSpec, model: ModelShape, predicted: Budget) -> str | None:
    """The message about a `checkpoint.size` that is too small for the checkpoints; None if it is not."""
    needed, size = predicted.peak("disk"), spec.checkpoint.size
    if size is None or size >= needed:
        return None
    return (
        f"expected at least {human_bytes(needed)} for {_checkpoints(spec, model)}, the model and caches, found "
        f"{human_bytes(size)}; write {byte_quantity(claim_bytes(needed, 0))}, or lower checkpoint.keep"
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


def low_limits(spec: RLJobSpec, predicted: Budget) -> Iterator[tuple[Pod, str]]:
    """Role and message for each template whose memory limit is below the prediction."""
    templates: dict[Pod, PodTemplate | None] = {"policy": spec.policy.template, "rollout": spec.rollout.template}
    for role, template in templates.items():
        limit, needed = memory_limit_in(template), predicted.peak("host", pod=role)
        if limit is not None and limit < needed:
            yield (
                role,
                f"expected a memory limit of at least {human_bytes(needed)} in spec.{role}.template, the host "
                f"memory that the job is predicted to need, found {human_bytes(limit)}; "
                f"write {byte_quantity(request_bytes(needed))}, or set recovery.maxHostMemory",
            )
