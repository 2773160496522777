"""Recorded failures, as described in tests/data/README.md, and readers of texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from io import BytesIO
from pathlib import Path, PurePath
from typing import Any

import yaml

from rljob_api.quantity import quantity_bytes
from rljob_memory.diagnosis import Diagnosis, FailureClass, diagnose
from rljob_memory.evidence import CollectedEvidence
from rljob_memory.evidence.collected import EvidenceBuilder
from rljob_memory.evidence.log_reader import LogReader
from rljob_testing.induced_failures.recorded_evidence import evidence_of_files

DATA = Path(__file__).parents[3] / "data"
RECORDED = DATA / "oom"
SURE = 0.8
"""A wrong class never has a higher confidence."""


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The documents of a file with one per line."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def public_failures() -> list[dict[str, Any]]:
    """Every excerpt of every set."""
    return json_lines(DATA / "public_failures.jsonl")


def recorded_failures() -> list[tuple[FailureClass, PurePath]]:
    """The class and the place, CLASS/NAME, of each failure."""
    runs = (path.relative_to(RECORDED) for path in RECORDED.glob("*/*.json"))
    return [(FailureClass(place.parent.name), place) for place in sorted([*runs, *recorded_texts()])]


@cache
def recorded_texts() -> dict[PurePath, str]:
    """The logs of the recorded failures that have nothing else, by their place."""
    texts: dict[PurePath, str] = {}
    for path in RECORDED.glob("*/*.txt"):
        texts[path.relative_to(RECORDED).with_suffix("")] = path.read_text()
    for of_class, excerpts in yaml.safe_load((RECORDED / "excerpts.yaml").read_text()).items():
        texts |= {PurePath(of_class, name): text for name, text in excerpts.items()}
    return dict(sorted(texts.items()))


def recorded_evidence(place: PurePath) -> CollectedEvidence:
    """Read a recorded failure: a log, or the files of a run's directory in one JSON document."""
    if place.suffix == ".json":
        return evidence_of_files(json.loads((RECORDED / place).read_text(encoding="utf-8"))["files"])
    return evidence_of(recorded_texts()[place])


def evidence_of(text: str | bytes) -> CollectedEvidence:
    """Read a log."""
    builder = EvidenceBuilder()
    LogReader(builder).read(BytesIO(text.encode() if isinstance(text, str) else text))
    return builder.build()


def diagnoses_of(*lines: str) -> list[Diagnosis]:
    """Diagnose the lines of a log."""
    return diagnose(evidence_of("\n".join(lines)))


def in_bytes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of a JSON document (512Mi) as numbers."""
    is_size = re.compile(r"\d+[KMG]i").fullmatch
    return {name: quantity_bytes(v) if isinstance(v, str) and is_size(v) else v for name, v in values.items()}


def torch_message(
    requested: float = 2,
    *,
    total: float = 80,
    free: float = 1,
    process: float = 79,
    allocated: float = 76,
    cached: float = 1,
) -> str:
    """torch's message about a failed request; all sizes in GiB."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {requested:.2f} GiB. GPU 0 has a total "
        f"capacity of {total:.2f} GiB of which {free:.2f} GiB is free. Including non-PyTorch memory, this process has "
        f"{process:.2f} GiB memory in use. Of the allocated memory {allocated:.2f} GiB is allocated by PyTorch, and "
        f"{cached:.2f} GiB is reserved by PyTorch but unallocated."
    )
