"""JSON that the project's own pods write: termination messages and StepReports."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from rljob_api.exit_codes import ExitCode
from rljob_api.memory_plan import MemoryPlan
from rljob_api.step_report import Evidence as ReportedEvidence
from rljob_api.step_report import RankMemory, StepReport
from rljob_api.termination_message import TerminationMessage
from rljob_memory.evidence.collection import Collection
from rljob_memory.evidence.device_memory import DeviceMemory
from rljob_memory.evidence.evidence import Evidence
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.log_reader import LogReader

Model = TypeVar("Model", bound=BaseModel)

_KIND_OF_EXIT = {
    ExitCode.DEVICE_OUT_OF_MEMORY: FailureKind.UNSAID,
    ExitCode.HOST_OUT_OF_MEMORY: FailureKind.HOST,
    ExitCode.SHARED_MEMORY_EXHAUSTED: FailureKind.SHARED_MEMORY,
}


def read_document(collection: Collection, text: str, source: str) -> bool:
    """Whether `text` is one of the project's documents. What it tells is then in `collection`."""
    if message := _parsed(TerminationMessage, text):
        _add_ending(collection, message, source)
        return True
    if report := _parsed(StepReport, text):
        _add_report(collection, report, source)
        return True
    return False


def evidence_of_report(reported: ReportedEvidence, plan: MemoryPlan | None = None) -> Evidence:
    """What one reported failure tells. `plan`: the one it failed under, where that is known."""
    collection = Collection(plan=plan)
    _add_reported(collection, reported, "evidence")
    return collection.evidence()


def _add_ending(collection: Collection, message: TerminationMessage, source: str) -> None:
    if message.evidence:
        _add_reported(collection, message.evidence, source)
        return
    before = collection.failure_count
    _read_text(collection, message.message, source)
    kind = _KIND_OF_EXIT.get(ExitCode(message.exit_code)) if message.exit_code in set(ExitCode) else None
    if kind and collection.failure_count == before:
        collection.add_failure(Failure(kind, text=message.message, step=message.step, source=source))


def _add_report(collection: Collection, report: StepReport, source: str) -> None:
    collection.plan = report.plan or collection.plan
    if report.last_evidence:
        _add_reported(collection, report.last_evidence, source)


def _add_reported(collection: Collection, reported: ReportedEvidence, source: str) -> None:
    """The message is parsed like a log's; where it happened is known better here."""
    parsed = Collection()
    _read_text(parsed, reported.message, source)
    failure = parsed.evidence().failure or Failure(FailureKind.UNSAID, text=reported.message[:1_000], source=source)
    if failure.device and reported.memory:
        failure = replace(failure, device=_completed(failure.device, reported.memory))
    collection.add_failure(
        replace(
            failure,
            role=reported.role,
            rank=reported.rank,
            step=reported.step,
            phase=reported.phase,
            micro_batch=reported.micro_batch,
            clock=("epoch", reported.time.timestamp()),
        )
    )


def _read_text(collection: Collection, text: str, source: str) -> None:
    LogReader(collection, source).read(BytesIO(text.encode()))


def _completed(device: DeviceMemory, memory: RankMemory) -> DeviceMemory:
    if device.allocated_bytes is not None or not memory.device_total_bytes:
        return device
    return replace(
        device,
        total_bytes=memory.device_total_bytes,
        free_bytes=memory.device_free_bytes,
        allocated_bytes=memory.allocated_bytes,
        cached_bytes=max(memory.reserved_bytes - memory.allocated_bytes, 0),
    )


def _parsed(model: type[Model], text: str) -> Model | None:
    try:
        return model.model_validate_json(text)
    except ValidationError:
        return None
