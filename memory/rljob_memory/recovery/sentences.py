"""What a recovery brought, and what is about to run out, as sentences for people: the same wherever a job runs."""

from __future__ import annotations

from rljob_api.plan_change import PlanChange, Role
from rljob_api.step_report import MemoryPressure
from rljob_memory.evidence.sizes import human_bytes


def process_name(role: Role, rank: int) -> str:
    return "the controller" if role == "controller" else f"{role} rank {rank}"


def recovered_sentence(change: PlanChange) -> str:
    """`resumed at step 41 after 38 s; freed 5.70 GiB`."""
    observed = change.remedy.observed_bytes
    freed = f"; freed {human_bytes(observed)}" if observed is not None and observed > 0 else ""
    return f"resumed at step {change.step} after {change.seconds_to_recover or 0.0:.0f} s{freed}"


def pressure_sentence(pressure: MemoryPressure) -> str:
    """`policy rank 0 runs out of memory in 12 steps, if it goes on like this: RetainedGraph: …`."""
    steps = f"in {pressure.steps_left} step{'' if pressure.steps_left == 1 else 's'}"
    diagnosis = pressure.diagnosis
    return (
        f"{process_name(pressure.role, pressure.rank)} runs out of memory {steps}, if it goes on like this: "
        f"{diagnosis.class_name}: {diagnosis.message}"
    )
