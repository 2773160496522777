"""Reads the evidence in a file or a directory. The first bytes and the name of a file select its reader."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from rljob_api.memory_failure import FailureKind, MemoryFailure
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.budget import setup_of_facts
from rljob_memory.evidence.collected import CollectedEvidence, EvidenceBuilder
from rljob_memory.evidence.failure import Failure
from rljob_memory.evidence.log_reader import LogReader
from rljob_memory.evidence.reports import read_document
from rljob_memory.evidence.snapshot import PICKLE_START, UnreadableSnapshot, read_snapshot
from rljob_memory.sample import MemorySample, finite_seconds

_LARGEST_DOCUMENT_BYTES = 4 << 20
_MEMORY_LOG_BYTES = 4 << 20
"""Bytes that are read from the end of each memory log: about 12,000 samples. A run of 8 ranks writes 0.5 GiB in 5,000
steps."""
_LONGEST_LINE_BYTES = 1 << 16
_MOST_FILES = 10_000
_WITHOUT_EVIDENCE = frozenset({"checkpoints", "model", "journal", "plots", ".git", "__pycache__", "node_modules"})
"""Folders of a directory that hold weights, pictures or code."""
_OF_THE_RUN = frozenset({"report.html", "samples.jsonl"})
"""Files of a run that quote responses and failures."""
_LONGEST_CGROUP_FILE_BYTES = 1 << 12
_CGROUP_FILES = {
    **dict.fromkeys(("memory.max", "memory.limit_in_bytes"), "host_limit_bytes"),
    **dict.fromkeys(("memory.current", "memory.peak"), "host_used_bytes"),
    **dict.fromkeys(("memory.usage_in_bytes", "memory.max_usage_in_bytes"), "host_used_bytes"),
}
"""The number in a copy of a cgroup's file, by its name."""
_NO_LIMIT_BYTES = 1 << 50
_CONTAINER_OF_RLJOB = "rljob."
"""`rljob diagnose --pod` names files after the container: this one is of a job's pod."""
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zX": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}


class Unreadable(Exception):
    """The message has what was expected, what was found and what to do."""


def read_evidence(*paths: Path) -> CollectedEvidence:
    """Read what one failure left behind: logs, termination messages, StepReports, allocator snapshots, or directories
    of them such as a run's output. `-` is the standard input.

    Raises `Unreadable` if there is no such file, it may not be read, or it is neither text nor a snapshot.
    """
    builder = EvidenceBuilder()
    for path in paths:
        if str(path) == "-":
            with open(0, "rb", closefd=False) as stream:
                LogReader(builder, "the standard input").read(stream)
            builder.names.append("-")
        elif path.is_dir():
            _read_directory(builder, path)
        else:
            _read_file(builder, path, path.name)
    return builder.build()


def evidence_of_run(account: MemoryFailure, directory: Path, plan: MemoryPlan | None) -> CollectedEvidence:
    """Evidence of a failure whose process gave its account, with the memory logs and the ledger of its run.

    `plan`: the memory plan that it failed under, if known.
    """
    builder = EvidenceBuilder()
    for path in sorted(directory.glob("memory/*.jsonl")):
        with suppress(Unreadable):
            _read_file(builder, path, str(path.relative_to(directory)))
    with suppress(OSError), (directory / "ledger.jsonl").open("rb") as ledger:
        read_ledger(builder, ledger)
    return builder.build_for(account, plan)


def _read_directory(builder: EvidenceBuilder, directory: Path) -> None:
    """Read every file that can be read; files without evidence add nothing. Raises `Unreadable` if none can be read."""
    problems: list[str] = []
    for path in _files(directory):
        try:
            _read_file(builder, path, str(path.relative_to(directory)))
        except Unreadable as problem:
            problems.append(str(problem))
    if not builder.names and problems:
        raise Unreadable(f"{directory}: none of its files can be read. The first: {problems[0]}")


def _files(directory: Path) -> Iterator[Path]:
    count = 0
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if name not in _WITHOUT_EVIDENCE)
        for name in sorted(names):
            path = Path(folder, name)
            if name not in _OF_THE_RUN and path.is_file() and count < _MOST_FILES:
                count += 1
                yield path


def _read_file(builder: EvidenceBuilder, path: Path, name: str) -> None:
    try:
        with path.open("rb") as stream:
            start = stream.peek(4)[:4]
            if start[:2] in PICKLE_START:
                _add_snapshot(builder, path, name)
            elif kind := next((kind for mark, kind in _COMPRESSED.items() if start.startswith(mark)), None):
                raise Unreadable(f"{path}: expected text or a snapshot, found a {kind} archive. Unpack it first.")
            else:
                _read_text(builder, stream, path, name)
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read: {error.strerror or error}. Name a log or a directory.") from error
    builder.names.append(name)
    if path.name.startswith(_CONTAINER_OF_RLJOB):
        builder.is_of_rljob = True


def _read_text(builder: EvidenceBuilder, stream: BinaryIO, path: Path, name: str) -> None:
    if path.suffix == ".jsonl" and path.parent.name == "memory":
        _skip_to_the_last(_MEMORY_LOG_BYTES, stream)
        read_memory_log(builder, stream, path.stem)
    elif path.name.endswith(".jsonl.old"):
        return  # the rotated part of a memory log
    elif path.name == "ledger.jsonl":
        read_ledger(builder, stream)
    elif number := _CGROUP_FILES.get(path.name):
        text = stream.read(_LONGEST_CGROUP_FILE_BYTES).strip()
        if text.isdigit() and int(text) < _NO_LIMIT_BYTES:  # a limit can be `max`
            values: dict[str, Any] = {number: int(text)}
            builder.add_host(MemorySample(**values))
    elif not _is_document(builder, path, name):
        LogReader(builder, name).read(stream)


def _skip_to_the_last(size_bytes: int, stream: BinaryIO) -> None:
    """Skip to the first whole line of the last `size_bytes`."""
    if stream.seek(0, os.SEEK_END) > size_bytes:
        stream.seek(-size_bytes, os.SEEK_END)
        stream.readline()
    else:
        stream.seek(0)


def _is_document(builder: EvidenceBuilder, path: Path, name: str) -> bool:
    if not path.is_file() or path.stat().st_size > _LARGEST_DOCUMENT_BYTES:
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    return text.lstrip().startswith("{") and read_document(builder, text, name)


def _add_snapshot(builder: EvidenceBuilder, path: Path, name: str) -> None:
    try:
        requests = read_snapshot(path)
    except UnreadableSnapshot as problem:
        raise Unreadable(str(problem)) from None
    for device in requests:
        builder.add_failure(Failure(kind=FailureKind.ALLOCATOR, device=device, source=name, is_structured=True))


# Reads the files of a run's directory: memory logs and ledger.


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
                    builder.setup = setup_of_facts(facts)
                    builder.engines_apart = facts.get("topology") == "Disaggregated"
                if (started := finite_seconds(value.get("started_at"))) is not None:
                    builder.restarts.append(started)
                if isinstance(versions := value.get("versions"), Mapping):
                    builder.versions.update({str(name): str(version) for name, version in versions.items()})
            case "plan_change":
                _add_plan(builder, value)
                change = value.get("change")
                if isinstance(change, Mapping) and (decided := _date_seconds(change.get("time"))) is not None:
                    builder.restarts.append(decided)


def _look_for_kills(builder: EvidenceBuilder, before: MemorySample, after: MemorySample, source: str) -> None:
    """The kernel's count grows only by a kill; a new container begins at 0."""
    if after.oom_kills <= before.oom_kills or after.host_limit_bytes != before.host_limit_bytes:
        return
    builder.add_failure(
        Failure(
            kind=FailureKind.HOST,
            is_structured=True,
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
    while raw := stream.readline(_LONGEST_LINE_BYTES):
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
