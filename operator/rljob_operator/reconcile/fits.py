"""The condition Fits: whether a job fits the memory of the cluster's nodes, predicted before it has pods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemorySettings
from rljob_api.roles import PodTemplate
from rljob_api.topology import worker_pods
from rljob_memory.budget import Setup, setup_of
from rljob_memory.fit import fit, machine_text
from rljob_memory.hardware import HOST_BYTES_PER_GPU, DeviceKind, Hardware
from rljob_memory.model_shape import compute_bytes, shape_in_uri
from rljob_memory.pod_memory import memory_limit_in
from rljob_memory.workload import workload_of
from rljob_operator.reconcile.observed import ObservedNode
from rljob_operator.reconcile.placement import Obstacle, allowed_nodes
from rljob_operator.reconcile.status import StatusDraft
from rljob_operator.reconcile.view import JobView

_TYPE_LABELS = "GPU feature discovery labels nodes with nvidia.com/gpu.product"


@dataclass(frozen=True, slots=True)
class Prediction:
    """Status, reason and message of the condition."""

    fits: bool | None
    """None: unknown."""
    reason: ConditionReason
    message: str


def set_fits(view: JobView, draft: StatusDraft) -> None:
    """Set the condition: by a committed step under this spec, else by the prediction. A suspended job keeps it."""
    stored = view.condition(ConditionType.FITS)
    is_known = stored is not None and stored.reason == ConditionReason.STEPS_COMMITTED
    if stored and is_known and (view.spec.suspend or stored.observed_generation == view.observed.generation):
        return
    found = _observed(view) or prediction(view.spec, view.observed.nodes, setup_of(view.spec, view.memory_facts))
    draft.condition(ConditionType.FITS, found.fits, found.reason, found.message)


def _observed(view: JobView) -> Prediction | None:
    """Return the condition of an attempt that runs and has committed a step; None for any other."""
    report, attempt = view.report_of_attempt, view.attempt
    if report is None or attempt is None or attempt.end_time or (report.step or 0) < attempt.from_step:
        return None
    return Prediction(True, ConditionReason.STEPS_COMMITTED, f"attempt {attempt.number} has committed steps with it")


def not_admitted(view: JobView, draft: StatusDraft) -> Obstacle | None:
    """Return the obstacle to pods if the job does not fit and `spec.memory.admission` is Enforce, else None.

    A job that has committed a step is never held: the steps are better evidence than a prediction.
    """
    if view.spec.memory.admission != "Enforce" or view.committed_steps:
        return None
    reason, message = draft.reason_and_message(ConditionType.FITS)
    if reason != ConditionReason.DOES_NOT_FIT:
        return None
    advice = "most of these fields cannot change: delete the job and create it again, or write admission: Warn"
    return ConditionReason.NOT_ADMITTED, f"no pods, because memory.admission is Enforce: {message}; {advice}"


@dataclass(frozen=True, slots=True)
class Objection:
    """Answer to a request to create or change a job that does not fit."""

    refused: bool
    """The request is refused; otherwise its sender is warned."""
    message: str


def objection(spec: RLJobSpec, before: RLJobSpec | None, nodes: Sequence[ObservedNode]) -> Objection | None:
    """Return the objection to a new job, or to a change of the spec `before`; None if there is none.

    A change is refused only if the job fitted before it: one that does not fit can still be suspended or made smaller.
    """
    found = prediction(spec, nodes)
    if found.fits is not False:
        return None
    refused = spec.memory.admission == "Enforce" and (before is None or prediction(before, nodes).fits is not False)
    return Objection(refused, f"spec: {found.message}")


def prediction(spec: RLJobSpec, nodes: Sequence[ObservedNode], reported: Setup | None = None) -> Prediction:
    """Return the prediction for a job. `reported`: its setup, if its trainer has reported one.

    The nodes precede the reported machine: the next attempt may run on others.
    """
    if spec.trainer is not None:
        message = "the memory of another trainer (spec.trainer) is not predicted"
        return Prediction(None, ConditionReason.OTHER_TRAINER, message)
    device: DeviceKind = "cuda" if spec.policy.gpus_per_replica else "cpu"
    machines = _machines(spec, nodes) or ([reported.hardware] if reported else [])
    if not machines:
        message = "no node is known that the job's nodeSelector allows"
        if device == "cuda":
            message += f", with {spec.policy.gpus_per_replica} GPUs of a known type: {_TYPE_LABELS}"
        return Prediction(None, ConditionReason.NODES_UNKNOWN, message)
    model = reported.model if reported else shape_in_uri(spec, compute_bytes(spec, device), exact=True)
    if model is not None:
        return _judged(spec.memory, tuple(Setup(workload_of(spec), model, machine) for machine in machines))
    message = f"the shape of {spec.model.uri} is not known until the trainer has loaded it"
    if typical := shape_in_uri(spec, compute_bytes(spec, device)):
        guess = _judged(spec.memory, (Setup(workload_of(spec), typical, machines[0]),))
        message += f"; for a typical model of the size in its name: {guess.message}"
    return Prediction(None, ConditionReason.MODEL_UNKNOWN, message)


@lru_cache(maxsize=1024)
def _judged(memory: MemorySettings, setups: tuple[Setup, ...]) -> Prediction:
    """Return the prediction for the machines that the job may get, largest first. Cached, because each reconcile asks.

    The job fits if it fits one of them, and the message names the others.
    """
    found = [(machine_text(setup), fit(memory, setup)) for setup in setups]
    fitting = [(machine, each) for machine, each in found if each.lack is None]
    if not fitting:
        machine, best = found[0]
        return Prediction(False, ConditionReason.DOES_NOT_FIT, f"on {machine}, the job {best.explanation}")
    machine, best = fitting[0]
    others = [f"; on {machine}, it {each.message}" for machine, each in found if each.lack is not None]
    message = f"on {machine}, the job {best.message}{''.join(others)}"
    return Prediction(True, ConditionReason.PREDICTED_TO_FIT, message)


# --- the machines that the job may get ---


def _machines(spec: RLJobSpec, nodes: Sequence[ObservedNode]) -> list[Hardware]:
    """Return one machine for each type of GPU that the policy may get, the largest first; empty if none is known."""
    policy, *rollout = worker_pods(spec)
    limit = memory_limit_in(spec.policy.template)  # which recovery may raise
    limit = limit and max(limit, spec.recovery.max_host_memory or 0)
    hosts: dict[tuple[int, str], int] = {}
    for memory, name, host in _kinds(nodes, spec.policy.template, policy.gpus):
        usable = host or policy.gpus * HOST_BYTES_PER_GPU
        gpu = (memory, name) if policy.gpus else (0, "")
        if usable and (memory or not policy.gpus):
            hosts[gpu] = max(hosts.get(gpu, 0), min(usable, limit or usable))
    engines = {memory for each in rollout for memory, _, _ in _kinds(nodes, spec.rollout.template, each.gpus)}
    if policy.gpus and rollout and not any(engines):
        return []
    return [
        Hardware(
            "cuda" if policy.gpus else "cpu",
            memory,
            policy.replicas * host,
            engine_device_memory_bytes=max(engines) if policy.gpus and engines else 0,
            gpu=name,
            layers_compiled=policy.gpus > 0,
        )
        for (memory, name), host in sorted(hosts.items(), reverse=True)
    ]


def _kinds(nodes: Sequence[ObservedNode], template: PodTemplate | None, gpus: int) -> set[tuple[int, str, int]]:
    """Return GPU memory, GPU type and host memory of the nodes that the template allows."""
    allowed = allowed_nodes(nodes, template, gpus)
    return {(node.gpu_memory_bytes, node.gpu, node.host_memory_bytes) for node in allowed}
