"""Failures, changes of the plan and recoveries, each as one line for people."""

from __future__ import annotations

import re

from rljob_api.plan_change import DiagnosisStatus, Phase, PlanChange, Role
from rljob_api.step_report import Evidence, MemoryPressure
from rljob_memory.diagnosis import FailureClass
from rljob_memory.evidence.sizes import human_bytes
from rljob_memory.recovery import Remedy
from rljob_memory.recovery.sentences import pressure_sentence, process_name, recovered_sentence

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
    return f"Recovered: {recovered_sentence(change)}"


def pressure_line(pressure: MemoryPressure) -> str:
    """`MemoryPressure: policy rank 0 runs out of memory in 12 steps, if it goes on like this: …`."""
    return f"MemoryPressure: {pressure_sentence(pressure)}"


def _where(role: Role, rank: int, step: int, phase: Phase | None) -> str:
    process = process_name(role, rank)
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
