"""Reads the files of a run's directory: memory logs, ledger, snapshots of failures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, BinaryIO

from pydantic import ValidationError

from rljob_api.memory_plan import MemoryPlan
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.oom_snapshot import OomSnapshot
from rljob_memory.evidence.plain_lines import LONGEST_LINE_BYTES
from rljob_memory.sample import MemorySample, finite_seconds


def read_memory_log(builder: EvidenceBuilder, stream: BinaryIO, name: str) -> None:
    """Read a process's `memory/<role>-<rank>.jsonl`. A line that is torn, or is not a sample, is skipped.

    A process begins with a sample of its phase `load`; the process of an earlier attempt ended there.
    """
    before: MemorySample | None = None
    for value in _json_lines(stream):
        sample = MemorySample.from_line(value)
        if sample is None:
            continue
        builder.is_of_rljob = True
        if sample.phase == "load":
            builder.begin_series(name)
        # On a machine without a GPU every sample of the allocator is 0 and has no meaning.
        if sample.device_total_bytes:
            builder.add_sample(name, sample)
        if sample.host_limit_bytes:
            builder.add_host(sample)
            if before is not None:
                _look_for_kills(builder, before, sample, name)
            before = sample


def read_ledger(builder: EvidenceBuilder, stream: BinaryIO) -> None:
    """Read a run's `ledger.jsonl`: its attempts, the changes of its plan, the plan and versions of the last attempt."""
    for value in _json_lines(stream):
        match value.get("kind"):
            case "attempt":
                builder.is_of_rljob = True
                _add_plan(builder, value)
                if isinstance(facts := value.get("plan_facts"), Mapping):
                    builder.engines_apart = facts.get("topology") == "Disaggregated"
                if (started := finite_seconds(value.get("started_at"))) is not None:
                    builder.add_restart(started)
                if isinstance(versions := value.get("versions"), Mapping):
                    builder.versions.update({str(name): str(version) for name, version in versions.items()})
            case "plan_change":
                _add_plan(builder, value)
                change = value.get("change")
                if isinstance(change, Mapping) and (decided := _date_seconds(change.get("time"))) is not None:
                    builder.add_restart(decided)


def read_oom_snapshot(builder: EvidenceBuilder, text: str, source: str) -> bool:
    """Add an `OomSnapshot` to `builder`; False if `text` is not one."""
    try:
        snapshot = OomSnapshot.model_validate_json(text)
    except ValidationError:
        return False
    builder.is_of_rljob = True
    builder.add_snapshot(snapshot.failure(source))
    return True


def _look_for_kills(builder: EvidenceBuilder, before: MemorySample, after: MemorySample, source: str) -> None:
    """The kernel's count grows only by a kill; a new container begins at 0."""
    if after.oom_kills <= before.oom_kills or after.host_limit_bytes != before.host_limit_bytes:
        return
    builder.add_failure(
        Failure(
            FailureKind.HOST,
            text=f"oom_kill increased from {before.oom_kills} to {after.oom_kills}",
            sizes={"used_bytes": before.host_used_bytes, "limit_bytes": before.host_limit_bytes},
            # It was after this sample, and before the start of the process that replaced the killed one.
            clock=None if before.time is None else ("epoch", before.time),
            source=source,
        )
    )


def _add_plan(builder: EvidenceBuilder, value: Mapping[str, Any]) -> None:
    if plan := value.get("plan"):
        try:
            builder.plan = MemoryPlan.model_validate_json(json.dumps(plan))
        except ValidationError:
            return


def _json_lines(stream: BinaryIO) -> Iterator[dict[str, Any]]:
    while raw := stream.readline(LONGEST_LINE_BYTES):
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _date_seconds(value: Any) -> float | None:
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None
