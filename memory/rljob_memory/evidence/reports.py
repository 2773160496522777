"""Reads the JSON that processes of a job write: accounts of failures, termination messages and StepReports."""

from __future__ import annotations

from io import BytesIO
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from rljob_api.exit_codes import ExitCode
from rljob_api.memory_failure import DeviceMemory, FailureKind, MemoryFailure
from rljob_api.memory_plan import MemoryPlan
from rljob_api.step_report import Evidence, RankMemory, StepReport, StepReportStatus
from rljob_api.termination_message import TerminationMessage
from rljob_memory.evidence.activity import activity_of
from rljob_memory.evidence.collected import CollectedEvidence, EvidenceBuilder
from rljob_memory.evidence.failure import Failure
from rljob_memory.evidence.log_reader import LogReader

Model = TypeVar("Model", bound=BaseModel)

_KIND_OF_EXIT = {
    ExitCode.DEVICE_OUT_OF_MEMORY: FailureKind.NO_MESSAGE,
    ExitCode.HOST_OUT_OF_MEMORY: FailureKind.HOST,
    ExitCode.SHARED_MEMORY_EXHAUSTED: FailureKind.SHARED_MEMORY,
}


_KINDS_TO_REFINE = frozenset({FailureKind.UNFAMILIAR, FailureKind.NO_MESSAGE})
"""The process knows an error without its kind: the words of the error show it."""


def read_document(builder: EvidenceBuilder, text: str, source: str) -> bool:
    """Add a MemoryFailure, a termination message or a StepReport to `builder`; False if `text` is none of them."""
    if account := _parsed(MemoryFailure, text):
        builder.add_account(account, source)
    elif message := _parsed(TerminationMessage, text):
        _add_termination(builder, message, source)
    elif report := _parsed(StepReport, text):
        _add_report(builder, report.status or StepReportStatus(), source)
    else:
        return False
    builder.is_of_rljob = True
    return True


def evidence_of_report(reported: Evidence, plan: MemoryPlan | None) -> CollectedEvidence:
    """The evidence in one failure that another trainer reports as text. `plan`: the one it failed under, if known."""
    builder = EvidenceBuilder()
    return builder.build_for(_reported_failure(builder, reported, "evidence"), plan)


def _add_termination(builder: EvidenceBuilder, message: TerminationMessage, source: str) -> None:
    if message.evidence:
        builder.add_report(_reported_failure(builder, message.evidence, source), source)
        return
    before = builder.failures
    _read_text(builder, message.message, source)
    kind = _KIND_OF_EXIT.get(ExitCode(message.exit_code)) if message.exit_code in set(ExitCode) else None
    if kind and builder.failures == before:
        builder.add_failure(Failure(kind=kind, text=message.message, step=message.step, source=source))


def _add_report(builder: EvidenceBuilder, report: StepReportStatus, source: str) -> None:
    builder.plan = report.plan or builder.plan
    if report.last_evidence:
        builder.add_report(_reported_failure(builder, report.last_evidence, source), source)


def _reported_failure(builder: EvidenceBuilder, reported: Evidence, source: str) -> Failure | MemoryFailure:
    """The account of the process; without one, its message is parsed like a log. The place comes from the report."""
    place: dict[str, object] = {
        "role": reported.role,
        "rank": reported.rank,
        "step": reported.step,
        "phase": reported.phase,
        "micro_batch": reported.micro_batch,
    }
    account = reported.failure
    if account and account.kind not in _KINDS_TO_REFINE:
        device = completed(account.device, reported.memory)
        return account.model_copy(update={**place, "time": reported.time, "device": device})
    parsed = EvidenceBuilder()
    _read_text(parsed, reported.message, source)
    builder.add_all(parsed)
    failure = parsed.build().failure
    if account:
        builder.add_circumstances(account)
        place["activity"] = account.activity or activity_of(account.stack) or (failure.activity if failure else None)
    failure = failure or Failure(kind=FailureKind.NO_MESSAGE, text=reported.message[:1_000], source=source)
    device = completed(failure.device, reported.memory)
    clock = ("epoch", reported.time.timestamp())
    return failure.changed(**place, device=device, steps_done=reported.step - 1, clock=clock)


def _read_text(builder: EvidenceBuilder, text: str, source: str) -> None:
    LogReader(builder, source).read(BytesIO(text.encode("utf-8", "backslashreplace")))


def completed(device: DeviceMemory | None, memory: RankMemory | None) -> DeviceMemory | None:
    """The numbers of a failure's message; those of a message that is cut short, with the process's last sample."""
    if device is None or device.allocated_bytes is not None or memory is None or not memory.device_total_bytes:
        return device
    sampled = {
        "total_bytes": memory.device_total_bytes,
        "free_bytes": memory.device_free_bytes,
        "allocated_bytes": memory.allocated_bytes,
        "cached_bytes": max(memory.reserved_bytes - memory.allocated_bytes, 0),
    }
    return device.model_copy(update=sampled)


def _parsed(model: type[Model], text: str) -> Model | None:
    try:
        return model.model_validate_json(text)
    except ValidationError:
        return None
