"""The sentences of the Events about memory: what ran out, and what was changed."""

from __future__ import annotations

from rljob_api.plan_change import DiagnosisStatus, Phase, PlanChange, Role
from rljob_memory.evidence.sizes import human_bytes
from rljob_memory.recovery.sentences import process_name


def out_of_memory_sentence(role: Role, rank: int, phase: Phase | None, step: int, diagnosis: DiagnosisStatus) -> str:
    """`policy rank 3 in update, step 41: Fragmentation: 6.1 GiB are reserved but unusable, 2.4 GiB were asked for`."""
    where = f"in {phase}, step {step}" if phase else f"while starting, before step {step}"
    return f"{process_name(role, rank)} {where}: {diagnosis.class_name}: {diagnosis.message}"


def plan_changed_sentence(change: PlanChange) -> str:
    """`expandable_segments: false → true (generation 2, expected to free 6.00 GiB)`."""
    remedy = change.remedy
    expected = f", expected to free {human_bytes(remedy.expected_bytes)}" if remedy.expected_bytes else ""
    early = ", before anything failed" if change.preventive else ""
    return f"{remedy.setting}: {remedy.before} → {remedy.after} (generation {change.generation}{expected}{early})"
