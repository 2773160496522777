"""JSON that the project's own processes write: termination messages, StepReports, and a run's lines of memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from io import BytesIO
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel, ValidationError

from rljob_api.exit_codes import ExitCode
from rljob_api.memory_plan import MemoryPlan
from rljob_api.step_report import Evidence as ReportedEvidence
from rljob_api.step_report import RankMemory, StepReport
from rljob_api.termination_message import TerminationMessage
from rljob_memory.evidence.collection import Collection
from rljob_memory.evidence.device_memory import DeviceMemory
from rljob_memory.evidence.evidence import MemorySample
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.log_lines import LONGEST_LINE_BYTES
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


def read_memory_log(collection: Collection, stream: BinaryIO, name: str) -> None:
    """A process's `memory/<role>-<rank>.jsonl`. A line that is torn, or none of these, is passed over."""
    for value in _json_lines(stream):
        allocated = _whole_number(value, "allocated")
        if allocated is None:
            continue
        sample = MemorySample(
            allocated,
            _whole_number(value, "reserved"),
            step=_whole_number(value, "step"),
            phase=value["phase"] if isinstance(value.get("phase"), str) else None,
            micro_batch=_whole_number(value, "micro_batch"),
        )
        # On a machine without a GPU every sample of the allocator is 0 and says nothing.
        if _whole_number(value, "device_total"):
            collection.add_sample(name, sample)


def read_ledger(collection: Collection, stream: BinaryIO) -> None:
    """A run's `ledger.jsonl`: the plan and the versions of its last attempt."""
    for value in _json_lines(stream):
        if value.get("kind") != "attempt":
            continue
        if (plan := value.get("plan")) and (parsed := _parsed(MemoryPlan, json.dumps(plan))):
            collection.plan = parsed
        versions = value.get("versions")
        if isinstance(versions, Mapping):
            collection.versions.update({str(name): str(version) for name, version in versions.items()})


def _add_ending(collection: Collection, message: TerminationMessage, source: str) -> None:
    if message.evidence:
        _add_reported(collection, message.evidence, source)
        return
    before = collection.failure_count
    _read_text(collection, message.sentence, source)
    kind = _KIND_OF_EXIT.get(ExitCode(message.exit_code)) if message.exit_code in set(ExitCode) else None
    if kind and collection.failure_count == before:
        collection.add_failure(Failure(kind, text=message.sentence, step=message.step, source=source))


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


def _json_lines(stream: BinaryIO) -> Iterator[dict[str, Any]]:
    while raw := stream.readline(LONGEST_LINE_BYTES):
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _whole_number(value: Mapping[str, Any], name: str) -> int | None:
    number = value.get(name)
    return number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else None
