"""The ledger of committed steps: one line per step, made durable before the next step starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.durable_files import sync_directory, writing
from rljob_client.run_directory.records import (
    AttemptRecord,
    EvaluationRecord,
    FaultRecord,
    LedgerRecord,
    PlanChangeRecord,
    ReadyRecord,
    RestoreRecord,
    StepRecord,
    attempt_records,
    parse_record,
    step_records,
)


@dataclass(frozen=True, slots=True)
class LedgerContents:
    """The complete lines of a ledger."""

    records: list[LedgerRecord]

    whole_bytes: int
    """Length of these lines."""


def read_ledger(path: Path) -> LedgerContents:
    """Read a ledger without changing it, even while a run writes it.

    A last line without newline was cut off by a crash, or is being written: it is not committed, and is left out.
    Raises `OutputUnavailable` for any other damage, with the number of the line.
    """
    data = path.read_bytes() if path.exists() else b""
    whole_bytes = data.rfind(b"\n") + 1
    records: list[LedgerRecord] = []
    last_step = 0
    for number, line in enumerate(data[:whole_bytes].split(b"\n")[:-1], start=1):
        record = _parse_line(path, number, line)
        if isinstance(record, StepRecord):
            if record.step != last_step + 1:
                raise _corrupt(path, number, f"step {last_step + 1}", f"step {record.step}")
            last_step = record.step
        records.append(record)
    return LedgerContents(records, whole_bytes)


class Ledger:
    """An append-only file. Once `commit` has returned, the record is on disk."""

    def __init__(self, path: Path) -> None:
        """Open or create the ledger at `path`. An incomplete last line is removed.

        Only one process may open it: `OutputDirectory.open` ensures that.
        """
        self.path = path
        contents = read_ledger(path)
        self.records = contents.records
        self.steps = step_records(self.records)
        self.attempts = attempt_records(self.records)
        with writing(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.ftruncate(self._descriptor, contents.whole_bytes)
            os.lseek(self._descriptor, 0, os.SEEK_END)
            sync_directory(path.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    # --- read ---

    @property
    def last_step(self) -> int:
        """The last committed step, 0 before the first."""
        return len(self.steps)

    @property
    def next_step(self) -> int:
        return self.last_step + 1

    def remaining(self, total: int) -> range:
        """The uncommitted steps of a job with `total` steps."""
        return range(self.next_step, total + 1)

    # --- append ---

    def begin_attempt(
        self,
        started_at: float,
        versions: Mapping[str, str],
        plan: Mapping[str, Any],
        processes: Mapping[str, int],
        skipped_prompts: int = 0,
        inputs: Mapping[str, dict[str, Any]] | None = None,
        plan_facts: Mapping[str, Any] | None = None,
    ) -> AttemptRecord:
        """Write the record of a new attempt, and return it. `started_at`: seconds since the epoch."""
        record = AttemptRecord(
            attempt=len(self.attempts) + 1,
            started_at=started_at,
            resumed_from=self.last_step,
            versions=dict(versions),
            plan=dict(plan),
            processes=dict(processes),
            skipped_prompts=skipped_prompts,
            inputs=dict(inputs or {}),
            plan_facts=dict(plan_facts or {}),
        )
        self._append(record)
        self.attempts.append(record)
        return record

    def record(self, record: RestoreRecord | ReadyRecord | PlanChangeRecord | FaultRecord | EvaluationRecord) -> None:
        """Make a record durable that does not commit a step."""
        self._append(record)

    def commit(self, record: StepRecord) -> None:
        """Make the step durable. Raises `ValueError` unless it is the next one, `OutputUnavailable` on a full disk."""
        if record.step != self.next_step:
            raise ValueError(f"expected step {self.next_step} to be committed, found step {record.step}")
        self._append(record)
        self.steps.append(record)

    def _append(self, record: LedgerRecord) -> None:
        line = record.model_dump_json(by_alias=True).encode() + b"\n"
        end = os.lseek(self._descriptor, 0, os.SEEK_END)
        with writing(self.path, len(line)):
            try:
                _write_all(self._descriptor, line)
                os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, end)
                raise
        self.records.append(record)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _parse_line(path: Path, number: int, line: bytes) -> LedgerRecord:
    try:
        return parse_record(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        found = f"{field}: {first['msg']}" if field else first["msg"]
        raise _corrupt(path, number, "one of the ledger's records", found) from error


def _corrupt(path: Path, number: int, expected: str, found: str) -> OutputUnavailable:
    return OutputUnavailable(
        f"{path}, line {number} is corrupt: expected {expected}, found {found}. "
        "Restore the file from a copy, or start over with another --output."
    )
