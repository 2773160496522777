"""What was seen around a failure of memory: what the process said, and what lies in the run's directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import MAX_DIAGNOSES_KEPT, DiagnosisStatus, Phase, Role
from rljob_api.step_report import Evidence, RankMemory
from rljob_memory.diagnosis import diagnose
from rljob_memory.evidence import Evidence as FoundEvidence
from rljob_memory.evidence import Unreadable, read_evidence
from rljob_memory.evidence.documents import evidence_of_report
from rljob_memory.recovery import diagnosed, diagnosis_status
from rljob_memory.sample import MemorySample
from rljob_trainer.errors import TrainerError
from rljob_trainer.step_report.content import evidence_of, rank_memory

_LAST_LINES_BYTES = 64 << 10
_PHASES: frozenset[str] = frozenset(get_args(Phase))


def gather_evidence(
    failure: TrainerError | None,
    directory: Path,
    *,
    attempt: int,
    step: int,
    phase: Phase | None,
    plan: MemoryPlan | None,
) -> Evidence | None:
    """The evidence of a failure, with its diagnoses; None where `failure` is none of memory.

    `directory`: of the run. `step`, `phase`: where the loop was; phase None: the roles were starting.
    """
    evidence = evidence_of(failure, attempt=attempt, step=step, phase=phase, time=datetime.now(UTC))
    if evidence is None or failure is None:
        return None
    log = directory / "memory" / f"{failure.actor}.jsonl"
    last = next(_last_lines(log), {})
    memory = latest_memory(directory, evidence.role, evidence.rank)
    evidence = evidence.model_copy(update={"memory": memory, "micro_batch": _micro_batch(last, step, phase)})
    # The traceback says what was going on, and ends with the message.
    told = evidence_of_report(evidence.model_copy(update={"message": failure.trace or evidence.message}), plan)
    evidence = evidence.model_copy(update={"diagnoses": _diagnoses(directory, told)})
    return diagnosed(_with_numbers_of(told, evidence), plan)


def latest_memory(directory: Path, role: Role, rank: int) -> RankMemory | None:
    """The last sample in the memory log of a process, of whatever phase of a step; None where there is none."""
    log = directory / "memory" / f"{role}-{rank}.jsonl"
    for line in _last_lines(log):
        sample = MemorySample.from_line(line)
        if sample is not None and (phase := line.get("phase")) in _PHASES:
            return rank_memory(role, rank, phase, sample)
    return None


def _diagnoses(directory: Path, told: FoundEvidence) -> list[DiagnosisStatus]:
    """The causes that fit what the process told and what lies in the run's directory beside."""
    try:
        around = read_evidence(directory)
    except Unreadable:
        around = told
    found = diagnose(replace(around, failure=told.failure, failures=1, plan=told.plan))
    return [diagnosis_status(diagnosis) for diagnosis in found[:MAX_DIAGNOSES_KEPT]]


def _with_numbers_of(told: FoundEvidence, evidence: Evidence) -> Evidence:
    """With the memory of the moment of the failure, where the message had it; of an engine that never came up there is
    nothing else."""
    device = told.failure.device if told.failure else None
    if evidence.memory is not None and not evidence.memory.device_total_bytes:
        return evidence
    if device is None or device.allocated_bytes is None or device.reserved_bytes is None:
        return evidence
    at_failure = {
        "allocated_bytes": device.allocated_bytes,
        "reserved_bytes": device.reserved_bytes,
        "peak_allocated_bytes": device.allocated_bytes,
        "peak_reserved_bytes": device.reserved_bytes,
        "device_free_bytes": device.free_bytes or 0,
        "device_total_bytes": device.total_bytes or 0,
    }
    before = evidence.memory or RankMemory(role=evidence.role, rank=evidence.rank)
    return evidence.model_copy(update={"memory": before.model_copy(update=at_failure)})


def _micro_batch(line: dict[str, Any], step: int, phase: Phase | None) -> int | None:
    """The micro-batch after the last one that was done, where the failure was in an update."""
    done = line.get("micro_batch")
    if phase != "update" or line.get("step") != step or not isinstance(done, int):
        return None
    return done + 1


def _last_lines(log: Path) -> Iterator[dict[str, Any]]:
    """The last lines of a memory log, the latest first; what is torn is passed over."""
    with suppress(OSError):
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _LAST_LINES_BYTES, 0))
            lines = file.read().splitlines()
        for line in reversed(lines):
            with suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value
