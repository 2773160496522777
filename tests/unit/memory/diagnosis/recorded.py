"""Recorded failures, as described in tests/data/README.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from rljob_memory.diagnosis import Diagnosis, FailureClass, diagnose
from rljob_memory.evidence import CollectedEvidence, read_evidence
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_testing.induced_failures.recorded_evidence import evidence_of_files

DATA = Path(__file__).parents[3] / "data"
RECORDED = DATA / "oom"


@dataclass(frozen=True, slots=True)
class PublicFailure:
    """An excerpt of a public thread, and its label."""

    name: str
    """`<set>/<excerpt>`"""
    source: str
    accepted: tuple[str, ...]
    """Classes that are right, the best first; empty if no memory ran out."""
    expected: tuple[str | None, ...]
    """The accepted classes; of a known miss, the class that is diagnosed today. None: no diagnosis."""
    is_miss: bool
    text: str


def public_failures() -> list[PublicFailure]:
    """Every excerpt of every set."""
    with (DATA / "public_failures.jsonl").open(encoding="utf-8") as lines:
        return [_public_failure(json.loads(line)) for line in lines]


def _public_failure(case: Mapping[str, Any]) -> PublicFailure:
    accepted = tuple(case["label"])
    expected = (case["miss"],) if "miss" in case else accepted or (None,)
    return PublicFailure(
        f"{case['set']}/{case['name']}", case["source"], accepted, expected, "miss" in case, case["text"]
    )


def recorded_failures() -> list[tuple[FailureClass, Path]]:
    """Each failure with its class."""
    return [(FailureClass(path.parent.name), path) for path in sorted(RECORDED.glob("*/*"))]


def recorded_texts() -> list[Path]:
    """Recorded failures that have only a log."""
    return sorted(RECORDED.glob("*/*.txt"))


def recorded_evidence(failure: Path) -> CollectedEvidence:
    """Read a recorded failure: a log, or the files of a run's directory in one JSON document."""
    if failure.suffix == ".json":
        return evidence_of_files(json.loads(failure.read_text(encoding="utf-8"))["files"])
    return read_evidence(failure)


def diagnoses_of(text: str) -> list[Diagnosis]:
    """Diagnose a log."""
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO(text.encode()))
    return diagnose(builder.build())
