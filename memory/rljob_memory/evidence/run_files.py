"""The files of a run's directory that say what went on around a failure: memory logs, ledger, snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, BinaryIO

from pydantic import ValidationError

from rljob_api.memory_plan import MemoryPlan
from rljob_memory.evidence.collection import Collection
from rljob_memory.evidence.evidence import MemorySample
from rljob_memory.evidence.failure import Failure, FailureKind
from rljob_memory.evidence.host import HostRecord
from rljob_memory.evidence.log_lines import LONGEST_LINE_BYTES
from rljob_memory.evidence.oom_snapshot import OomSnapshot


def read_memory_log(collection: Collection, stream: BinaryIO, name: str) -> None:
    """A process's `memory/<role>-<rank>.jsonl`. A line that is torn, or none of these, is passed over.

    A process begins with a sample of its phase `load`; that of an earlier attempt ended there.
    """
    host_before: tuple[float | None, HostRecord] | None = None
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
            time=_seconds(value.get("time")),
        )
        if sample.phase == "load":
            collection.begin_series(name)
        # On a machine without a GPU every sample of the allocator is 0 and says nothing.
        if _whole_number(value, "device_total"):
            collection.add_sample(name, sample)
        if (host := _host_record(value)) is not None:
            collection.add_host(host)
            if host_before is not None:
                _look_for_kills(collection, host_before, host, name)
            host_before = sample.time, host


def read_ledger(collection: Collection, stream: BinaryIO) -> None:
    """A run's `ledger.jsonl`: its attempts, the changes of its plan, the plan and the versions of the last attempt."""
    for value in _json_lines(stream):
        match value.get("kind"):
            case "attempt":
                _add_plan(collection, value)
                if (started := _seconds(value.get("started_at"))) is not None:
                    collection.add_restart(started)
                if isinstance(versions := value.get("versions"), Mapping):
                    collection.versions.update({str(name): str(version) for name, version in versions.items()})
            case "plan_change":
                _add_plan(collection, value)
                change = value.get("change")
                if isinstance(change, Mapping) and (decided := _date_seconds(change.get("time"))) is not None:
                    collection.add_restart(decided)


def read_oom_snapshot(collection: Collection, text: str, source: str) -> bool:
    """Whether `text` is an `OomSnapshot`. What it tells is then in `collection`."""
    try:
        snapshot = OomSnapshot.model_validate_json(text)
    except ValidationError:
        return False
    collection.add_snapshot(snapshot.failure(source))
    return True


def _look_for_kills(
    collection: Collection, before: tuple[float | None, HostRecord], after: HostRecord, source: str
) -> None:
    """The kernel's count rises only by a kill; a new container begins from 0."""
    time, host = before
    if after.oom_kills <= host.oom_kills or after.limit_bytes != host.limit_bytes:
        return
    sizes = {"used_bytes": host.used_bytes, "limit_bytes": host.limit_bytes}
    collection.add_failure(
        Failure(
            FailureKind.HOST,
            text=f"oom_kill rose from {host.oom_kills} to {after.oom_kills}",
            sizes={name: size for name, size in sizes.items() if size is not None},
            # It was after this sample, and before whatever was started in the killed process's place.
            clock=None if time is None else ("epoch", time),
            source=source,
        )
    )


def _host_record(value: Mapping[str, Any]) -> HostRecord | None:
    limit = _whole_number(value, "host_limit")
    if limit is None:
        return None
    return HostRecord(
        used_bytes=_whole_number(value, "host_used") or 0,
        limit_bytes=limit,
        oom_kills=_whole_number(value, "oom_kills") or 0,
        shm_used_bytes=_whole_number(value, "shm_used") or 0,
        shm_size_bytes=_whole_number(value, "shm_size"),
    )


def _add_plan(collection: Collection, value: Mapping[str, Any]) -> None:
    if plan := value.get("plan"):
        try:
            collection.plan = MemoryPlan.model_validate_json(json.dumps(plan))
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


def _whole_number(value: Mapping[str, Any], name: str) -> int | None:
    number = value.get(name)
    return number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else None


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _date_seconds(value: Any) -> float | None:
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError, OverflowError, OSError):
        return None
