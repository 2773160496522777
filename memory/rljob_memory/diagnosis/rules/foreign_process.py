"""A foreign process holds GPU memory: memory that is neither free nor the failing process's own.

The numbers do not identify the process: NVML's pids are the host's, and inside a pod the other process may be the job's
own engine or policy. If the log shows a vLLM engine next to a trainer, that is equally likely.
"""

from __future__ import annotations

from rljob_memory.diagnosis.classes import FailureClass
from rljob_memory.diagnosis.diagnosis import Diagnosis
from rljob_memory.diagnosis.ledger import ORDINARY_CACHE_SHARE, Ledger
from rljob_memory.diagnosis.rules.controller_context import LARGEST_CONTEXT_BYTES, context_sized, started_together
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_memory.evidence.failure import DeviceMemory, Failure, FailureKind
from rljob_memory.sizes import GIB, human_bytes

_MOST = 0.5
_MUCH = 0.2
_FULL = 0.9
_OF_RANKS = 0.4
_BESIDE_A_CACHE = 0.35
_LARGE_PROCESS_BYTES = 4 * GIB
_MUCH_AT_START = 0.1
"""Share of the device: more than the driver and the engine's own context take before it starts."""


def foreign_process(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    match failure.kind:
        case FailureKind.ALLOCATOR:
            return _beside_torch(failure, evidence, ledger)
        case FailureKind.ENGINE_START:
            return _before_the_engine(failure, evidence, ledger)
        case FailureKind.DRIVER | FailureKind.MATH_LIBRARY:
            return _in_the_table(failure, evidence)
        case FailureKind.ENGINE_UNBALANCED:
            return Diagnosis(
                FailureClass.FOREIGN_PROCESS,
                0.7,
                "Before the engine loaded anything, one of its GPUs had much less free memory than the others",
            )
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


def _in_the_table(failure: Failure, evidence: CollectedEvidence) -> Diagnosis | None:
    """A message without numbers, and a table in which a GPU is full: it may also show the failing process itself."""
    if failure.activity or failure.in_engine or evidence.shows_a_trainer:
        return None
    if not evidence.gpu_use:
        return _beside_its_own_context(evidence)
    used, total = max(evidence.gpu_use, key=lambda gpu: gpu[0] / gpu[1])
    if used < _FULL * total:
        return None
    return Diagnosis(
        FailureClass.FOREIGN_PROCESS,
        0.5,
        f"The log shows a GPU with {human_bytes(used)} of {human_bytes(total)} in use",
    )


def _beside_its_own_context(evidence: CollectedEvidence) -> Diagnosis | None:
    """A list of processes in which one has much of a GPU, and another one no more than its context."""
    for gpu, processes in evidence.gpu_processes.items():
        sizes = sorted(process.used_bytes for process in processes)
        if len(sizes) > 1 and sizes[-1] >= _LARGE_PROCESS_BYTES and sizes[0] <= LARGEST_CONTEXT_BYTES:
            return Diagnosis(
                FailureClass.FOREIGN_PROCESS,
                0.4,
                f"A process holds {human_bytes(sizes[-1])} of GPU {gpu}, beside one with {human_bytes(sizes[0])}",
            )
    return None


def _beside_torch(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    if evidence.siblings:
        return None  # Other processes of the job use GPUs: they are no strangers.
    policy = ledger.policy_beside_the_engine_bytes
    engine = 0 if ledger.engine_is_in_the_process else ledger.engine_bytes
    device, foreign = failure.device, ledger.foreign_bytes(known_bytes=policy + engine)
    if device is None or not device.total_bytes or not foreign:
        return None
    contexts = sum(process.used_bytes for process in context_sized(device))
    if foreign - contexts < contexts:
        return None
    share = foreign / device.total_bytes
    confidence = 0.8 if share >= _MOST else 0.7 if share >= _MUCH else 0.5
    by_an_engine = not evidence.engines_apart and (evidence.engine.seen or failure.role is not None)
    if started_together(device):
        confidence = min(confidence, _OF_RANKS)
    if share < _MUCH and _has_a_cache_instead(device):
        confidence = min(confidence, _BESIDE_A_CACHE)
    if failure.in_engine and not evidence.shows_a_trainer and evidence.plan is None:
        by_an_engine = False  # It is the engine, and nothing shows a trainer beside it.
    if evidence.siblings is not None:
        by_an_engine = False  # The process knows that no other process of its container uses a GPU.
    if by_an_engine and not (ledger.engine_holds_little and foreign > ledger.sleeping_engine_bytes):
        confidence /= 2
    beside = f", besides {human_bytes(policy)} of the policy" if policy else ""
    return Diagnosis(
        FailureClass.FOREIGN_PROCESS,
        round(confidence, 2),
        f"{human_bytes(foreign)} of the GPU's {human_bytes(device.total_bytes)} were held by other processes"
        f"{beside}; {human_bytes(device.requested_bytes)} more did not fit",
        {"other_processes_bytes": foreign},
    )


def _has_a_cache_instead(device: DeviceMemory) -> bool:
    """True if the message lists no other process, and torch's cache in its own has enough memory for the request."""
    lists_none = device.process_bytes is not None and not device.others
    ordinary_bytes = round(ORDINARY_CACHE_SHARE * (device.reserved_bytes or 0))
    return lists_none and device.own_cache_bytes >= max(device.requested_bytes, ordinary_bytes)


def _before_the_engine(failure: Failure, evidence: CollectedEvidence, ledger: Ledger) -> Diagnosis | None:
    if evidence.shows_a_trainer or evidence.siblings:
        return None  # its own model is what fills the card before its engine starts
    sizes = failure.sizes
    free, total = sizes.get("free_bytes"), sizes.get("total_bytes")
    if not total or free is None or total - free - ledger.policy_reserved_bytes < _MUCH_AT_START * total:
        return None
    return Diagnosis(
        FailureClass.FOREIGN_PROCESS,
        0.65,
        f"Before the engine started, {human_bytes(total - free)} of the GPU's {human_bytes(total)} were in use",
        {"other_processes_bytes": total - free},
    )
