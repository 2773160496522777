"""Evidence of an out-of-memory failure: its exception, the last memory sample, the directory of the run."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from rljob_api.bounds import storable
from rljob_api.memory_failure import MAX_FAILURE_TEXT_LENGTH, DeviceMemory, MemoryFailure
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import Phase, Role
from rljob_api.step_report import Evidence, RankMemory
from rljob_client.errors import RunError
from rljob_client.run_directory.memory_logs import latest_samples
from rljob_memory.diagnosis import diagnose, diagnosis_statuses
from rljob_memory.evidence import evidence_of_run
from rljob_memory.evidence.reports import completed
from rljob_memory.sample import MemorySample
from rljob_trainer.errors import OutOfMemory
from rljob_trainer.roles.faults import INJECTED
from rljob_trainer.step_report.reporter import rank_memory, role_and_rank

_LONGEST_MESSAGE = 4_096
_PHASES: dict[str, Phase] = {phase: phase for phase in get_args(Phase)}


def gather_evidence(
    error: RunError | None,
    directory: Path,
    *,
    attempt: int,
    step: int,
    phase: Phase | None,
    plan: MemoryPlan | None,
) -> Evidence | None:
    """The evidence of a failure, with its diagnoses; None if `error` is not an out-of-memory failure.

    `directory`: that of the run. `step`, `phase`: those of the loop; phase None: the roles were starting.
    """
    if not isinstance(error, OutOfMemory):
        return None
    now = datetime.now(UTC)
    role, rank = role_and_rank(error.actor)
    latest = next(latest_samples(_log(directory, role, rank)), MemorySample())
    micro_batch = _micro_batch(latest, step, phase)
    memory = latest_memory(directory, role, rank)
    account = error.out_of_memory or MemoryFailure(
        kind=error.failure_kind, text=storable(str(error))[:MAX_FAILURE_TEXT_LENGTH]
    )
    place = {"time": now, "role": role, "rank": rank, "step": step, "phase": phase, "micro_batch": micro_batch}
    account = account.model_copy(update={**place, "device": completed(account.device, memory)})
    return Evidence(
        time=now,
        attempt=attempt,
        role=role,
        rank=rank,
        step=step,
        phase=phase,
        micro_batch=micro_batch,
        message=str(error)[:_LONGEST_MESSAGE],
        memory=_memory_at_failure(memory, account.device, role, rank),
        failure=account,
        diagnoses=diagnosis_statuses(diagnose(evidence_of_run(account, directory, plan))),
    )


def gpu_memory_at_failure(evidence: Evidence | None) -> RankMemory | None:
    """Memory of the process that failed, to measure what a change frees.

    None without GPUs, where no failure reports the size of its request, and after an injected failure: most of the
    memory in use was allocated by the fault itself.
    """
    if evidence is None or evidence.memory is None or INJECTED in evidence.message:
        return None
    return evidence.memory if evidence.memory.device_total_bytes else None


def latest_memory(directory: Path, role: Role, rank: int) -> RankMemory | None:
    """The last sample in the memory log of a process, in any phase of a step; None if there is none."""
    for sample in latest_samples(_log(directory, role, rank)):
        if (phase := _PHASES.get(sample.phase or "")) is not None:
            return rank_memory(role, rank, phase, sample)
    return None


def _log(directory: Path, role: Role, rank: int) -> Path:
    return directory / "memory" / f"{role}-{rank}.jsonl"


def _micro_batch(latest: MemorySample, step: int, phase: Phase | None) -> int | None:
    """The micro-batch after the last one that was done, if the failure was in an update."""
    if phase != "update" or latest.step != step or latest.micro_batch is None:
        return None
    return latest.micro_batch + 1


def _memory_at_failure(
    sampled: RankMemory | None, device: DeviceMemory | None, role: Role, rank: int
) -> RankMemory | None:
    """Memory at the moment of the failure if its message has it, else the last sample.

    An engine that never came up has no sample, only the message.
    """
    if sampled is not None and not sampled.device_total_bytes:
        return sampled
    if device is None or device.allocated_bytes is None or device.reserved_bytes is None:
        return sampled
    at_failure = {
        "allocated_bytes": device.allocated_bytes,
        "reserved_bytes": device.reserved_bytes,
        "peak_allocated_bytes": device.allocated_bytes,
        "peak_reserved_bytes": device.reserved_bytes,
        "device_free_bytes": device.free_bytes or 0,
        "device_total_bytes": device.total_bytes or 0,
    }
    before = sampled or RankMemory(role=role, rank=rank)
    return before.model_copy(update=at_failure)
