"""The sentences of the Events about memory: what ran out, what was changed, what that brought."""

from __future__ import annotations

from rljob_api.plan_change import DiagnosisStatus, Phase, PlanChange, Role
from rljob_api.step_report import MemoryPressure
from rljob_memory.evidence.sizes import human_bytes


def out_of_memory_sentence(role: Role, rank: int, phase: Phase | None, step: int, diagnosis: DiagnosisStatus) -> str:
    """`policy rank 3 in update, step 41: Fragmentation: 6.1 GiB are reserved but unusable, 2.4 GiB were asked for`."""
    where = f"in {phase}, step {step}" if phase else f"while starting, before step {step}"
    return f"{_process(role, rank)} {where}: {diagnosis.class_name}: {diagnosis.message}"


def plan_changed_sentence(change: PlanChange) -> str:
    """`expandable_segments: false → true (generation 2, expected to free 6.00 GiB)`."""
    remedy = change.remedy
    expected = f", expected to free {human_bytes(remedy.expected_bytes)}" if remedy.expected_bytes else ""
    early = ", before anything failed" if change.preventive else ""
    return f"{remedy.setting}: {remedy.before} → {remedy.after} (generation {change.generation}{expected}{early})"


def recovered_sentence(change: PlanChange) -> str:
    """`resumed at step 41 after 38 s; freed 5.70 GiB`."""
    freed = f"; freed {human_bytes(change.remedy.observed_bytes)}" if change.remedy.observed_bytes else ""
    return f"resumed at step {change.step} after {change.seconds_to_recover or 0.0:.0f} s{freed}"


def pressure_sentence(pressure: MemoryPressure) -> str:
    """`policy rank 0 runs out of memory in 12 steps: RetainedGraph: …`."""
    steps = f"in {pressure.steps_left} step{'' if pressure.steps_left == 1 else 's'}"
    diagnosis = pressure.diagnosis
    return (
        f"{_process(pressure.role, pressure.rank)} runs out of memory {steps}, if it goes on like this: "
        f"{diagnosis.class_name}: {diagnosis.message}"
    )


def _process(role: Role, rank: int) -> str:
    return "the controller" if role == "controller" else f"{role} rank {rank}"
