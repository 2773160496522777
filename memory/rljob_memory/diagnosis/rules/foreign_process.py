"""A foreign process holds GPU memory: memory that is neither free nor the failing process's own.

The numbers do not identify the process: NVML's pids are the host's, and inside a pod the other process may be the job's
own engine or policy. If the log shows a vLLM engine next to a trainer, that is equally likely.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.gpu_holders import (
    engine_holds_little,
    foreign_bytes,
    policy_reserved_bytes,
    sleeping_engine_bytes,
)
from rljob_memory.diagnosis.rules.controller_context import context_sized
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.sizes import human_bytes

_MOST = 0.5
_MUCH = 0.2
_MUCH_AT_START = 0.1
"""Share of the device: more than the driver and the engine's own context take before it starts."""


def foreign_process(failure: Failure, evidence: CollectedEvidence) -> Diagnosis | None:
    match failure.kind:
        case FailureKind.ALLOCATOR:
            return _beside_torch(failure, evidence)
        case FailureKind.ENGINE_START:
            return _before_the_engine(failure, evidence)
        case FailureKind.ENGINE_PROFILING:
            return Diagnosis(
                FailureClass.FOREIGN_PROCESS,
                0.7,
                "Another process released GPU memory while the engine was measuring how much it needs",
            )
        case FailureKind.ENGINE_SLEEP:
            return Diagnosis(
                FailureClass.FOREIGN_PROCESS,
                0.45,
                "Another process took GPU memory while the engine was going to sleep",
            )
        case _:
            return None


def _beside_torch(failure: Failure, evidence: CollectedEvidence) -> Diagnosis | None:
    device, foreign = failure.device, foreign_bytes(failure)
    if device is None or not device.total_bytes or not foreign:
        return None
    contexts = sum(process.used_bytes for process in context_sized(device))
    if foreign - contexts < contexts:
        return None
    share = foreign / device.total_bytes
    confidence = 0.8 if share >= _MOST else 0.7 if share >= _MUCH else 0.5
    by_an_engine = evidence.engine.seen or failure.role is not None
    if by_an_engine and not (engine_holds_little(failure, evidence) and foreign > sleeping_engine_bytes(failure)):
        confidence /= 2
    return Diagnosis(
        FailureClass.FOREIGN_PROCESS,
        round(confidence, 2),
        f"{human_bytes(foreign)} of the GPU's {human_bytes(device.total_bytes)} were held by other processes; "
        f"{human_bytes(device.requested_bytes)} more did not fit",
        {"other_processes_bytes": foreign},
    )


def _before_the_engine(failure: Failure, evidence: CollectedEvidence) -> Diagnosis | None:
    sizes = failure.sizes
    free, total = sizes.get("free_bytes"), sizes.get("total_bytes")
    if not total or free is None or total - free - policy_reserved_bytes(evidence) < _MUCH_AT_START * total:
        return None
    return Diagnosis(
        FailureClass.FOREIGN_PROCESS,
        0.65,
        f"Before the engine started, {human_bytes(total - free)} of the GPU's {human_bytes(total)} were in use",
        {"other_processes_bytes": total - free},
    )
