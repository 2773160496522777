"""Failures, changes of the plan and recoveries, each as one line for people."""

from __future__ import annotations

import re

from rljob_api.plan_change import DiagnosisStatus, Phase, PlanChange
from rljob_api.step_report import Evidence, MemoryPressure
from rljob_memory.diagnosis import FailureClass
from rljob_memory.evidence.sizes import human_bytes
from rljob_memory.remedies import Remedy

_TOLD = {
    "policy_cache_bytes": "in the policy's cache",
    "requested_bytes": "asked",
    "wanted_bytes": "asked",
    "needed_bytes": "needed",
    "available_bytes": "left",
    "free_bytes": "free",
    "limit_bytes": "allowed",
}
"""Numbers of a diagnosis that the line names, in this order."""
_MOST_TOLD = 2
_HELD_BY_OTHERS = {"other_processes_bytes": "held by others"}
_OF_ITS_CAUSE: dict[str, dict[str, str]] = {
    FailureClass.FRAGMENTATION: {"reserved_but_unallocated_bytes": "reserved but unusable"},
    FailureClass.FOREIGN_PROCESS: _HELD_BY_OTHERS,
    FailureClass.CONTROLLER_CONTEXT: _HELD_BY_OTHERS,
    FailureClass.ENGINE_NOT_ASLEEP: _HELD_BY_OTHERS,
}
"""Told first where it is the cause, and nowhere else."""


def out_of_memory_line(evidence: Evidence) -> str:
    """`OutOfMemory: policy rank 0 in update, step 41: fragmentation (6.1 GiB reserved but unusable, 2.4 GiB asked)`."""
    where = _where(evidence.role, evidence.rank, evidence.step, evidence.phase)
    return f"OutOfMemory: {where}: {_cause(evidence.diagnoses[0])}"


def plan_changed_line(remedy: Remedy) -> str:
    """`PlanChanged: expandable segments on for the policy (generation 2, expected to free 6 GiB)`."""
    return f"PlanChanged: {remedy.sentence}"


def recovered_line(change: PlanChange) -> str:
    """`Recovered: resumed at step 41 after 38 s; freed 5.7 GiB`."""
    observed = change.remedy.observed_bytes
    freed = f"; freed {human_bytes(observed)}" if observed is not None and observed > 0 else ""
    return f"Recovered: resumed at step {change.step} after {change.seconds_to_recover or 0:.0f} s{freed}"


def pressure_line(pressure: MemoryPressure) -> str:
    """`MemoryPressure: policy rank 0: retained graph, in about 12 steps: …`."""
    cause = f"{_in_words(pressure.diagnosis.class_name)}, in about {pressure.steps_left} steps"
    return f"MemoryPressure: {pressure.role} rank {pressure.rank}: {cause}: {pressure.diagnosis.message}"


def _where(role: str, rank: int, step: int, phase: Phase | None) -> str:
    process = role if role == "controller" else f"{role} rank {rank}"
    return f"{process} in {phase}, step {step}" if phase else f"{process} at its start, step {step}"


def _cause(diagnosis: DiagnosisStatus) -> str:
    names = _OF_ITS_CAUSE.get(diagnosis.class_name, {}) | _TOLD
    told = [
        f"{human_bytes(diagnosis.numbers[name])} {words}" for name, words in names.items() if name in diagnosis.numbers
    ]
    numbers = f" ({', '.join(told[:_MOST_TOLD])})" if told else ""
    return f"{_in_words(diagnosis.class_name)}{numbers}"


def _in_words(class_name: str) -> str:
    """`weight sync spike` for WeightSyncSpike, `KV cache oversized` for KVCacheOversized."""
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z][a-z]+", class_name)
    return " ".join(word if word.isupper() else word.lower() for word in words) or class_name
