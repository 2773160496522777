"""Shrinks the evidence of a failure for tests/data/oom, without changing its diagnosis."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from rljob_memory.diagnosis import diagnose
from rljob_memory.evidence import read_evidence
from rljob_memory.evidence.collected import CollectedEvidence
from rljob_testing.machine import device
from rljob_testing.repository import ROOT

LARGEST_LOG_CHARACTERS = 6_000
MOST_SAMPLES = 40
LARGEST_SNAPSHOT_BYTES = 8_192
_PACKAGES = re.compile(r"/[^\s\"']*/(?:site|dist)-packages/")
_MODEL_CACHE = re.compile(r"/[^\s\"']*/rljob/random/")
_ADDRESS = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}:")
_REPOSITORY = str(ROOT)
_NO_EVIDENCE = frozenset({"job.yaml", "summary.json"})
_UNTELLING = re.compile(r"^\s*[\^~]+\s*$|it/s\]|s/it\]|^\s*$")


def pack(failure: Path, recorded: Path, made_by: str) -> Path:
    """Copy the failure in the folder `failure`, as `<class>/<name>`, into `recorded`, with its source.

    The copy is a text file if the failure has only a log, else a JSON file with the text of each file by its path.
    Raises `ValueError` if the diagnosis of the copy differs.
    """
    source = f"made on one {device()}, {datetime.now(UTC):%Y-%m-%d}, by {made_by}"
    paths = ((str(path.relative_to(failure)), _small(path)) for path in _files(failure))
    files = {name: text for name, text in paths if text is not None}
    _require_same_diagnosis(failure, files)
    copy = recorded / failure.parent.name / f"induced-{failure.name.replace('_', '-')}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    if len(files) == 1 and next(iter(files)).endswith(".log"):
        text = copy.with_suffix(".txt")
        text.write_text(f"# source: {source}\n{next(iter(files.values()))}", encoding="utf-8")
        return text
    document = copy.with_suffix(".json")
    document.write_text(json.dumps({"source": source, "files": files}, ensure_ascii=False, indent=1) + "\n", "utf-8")
    return document


def evidence_of_files(files: Mapping[str, str]) -> CollectedEvidence:
    """Read the evidence in a directory of these files: the text of each, by its path in the directory."""
    with tempfile.TemporaryDirectory() as directory:
        for name, text in files.items():
            path = Path(directory) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        return read_evidence(Path(directory))


def _files(failure: Path) -> Iterator[Path]:
    """Files that can be evidence; a run's folder has many others."""
    yield from sorted(
        path for path in failure.iterdir() if path.is_file() and path.name not in _NO_EVIDENCE and path.name[0] != "."
    )
    for folder in ("logs", "memory", "oom"):
        yield from sorted(path for path in (failure / folder).rglob("*") if path.is_file())


def _small(path: Path) -> str | None:
    """The relevant text of the file; None if it is left out."""
    text = path.read_text(encoding="utf-8", errors="replace").replace(f"{_REPOSITORY}/", "")
    text = _PACKAGES.sub("/opt/venv/lib/python3/site-packages/", text)
    text = _ADDRESS.sub("127.0.0.1:", _MODEL_CACHE.sub("/models/random/", text))
    if path.suffix == ".jsonl":
        return "".join(text.splitlines(keepends=True)[-MOST_SAMPLES:])
    if path.suffix == ".json":
        return text if len(text) <= LARGEST_SNAPSHOT_BYTES else None
    if path.suffix == ".log":
        return _middle_left_out("".join(line for line in text.splitlines(keepends=True) if not _UNTELLING.search(line)))
    return text if path.stat().st_size <= LARGEST_LOG_CHARACTERS else None


def _middle_left_out(text: str) -> str:
    """The beginning, where an engine reports its memory, and the end, with the failure."""
    if len(text) <= LARGEST_LOG_CHARACTERS:
        return text
    head = text[: LARGEST_LOG_CHARACTERS // 3].rpartition("\n")[0]
    tail = text[-LARGEST_LOG_CHARACTERS * 2 // 3 :].partition("\n")[2]
    return f"{head}\n[…]\n{tail}"


def _require_same_diagnosis(failure: Path, files: Mapping[str, str]) -> None:
    whole, small = read_evidence(failure), evidence_of_files(files)
    expected, found = ([(each.failure_class, each.confidence) for each in diagnose(read)] for read in (whole, small))
    if expected != found:
        raise ValueError(f"{failure}: diagnosed as {expected}, and its small copy as {found}")
