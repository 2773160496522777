"""Shrinks the evidence of a failure for tests/data/oom, without changing its diagnosis."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from rljob_memory.diagnosis import diagnose
from rljob_memory.evidence import read_evidence
from rljob_testing.device import device
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

    The copy is a text file if the failure has only a log, else a folder. Raises `ValueError` if the diagnosis of the
    copy differs.
    """
    source = f"# source: made on one {device()}, {datetime.now(UTC):%Y-%m-%d}, by {made_by}\n"
    copy = recorded / failure.parent.name / f"induced-{failure.name.replace('_', '-')}"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    for path in _files(failure):
        if (small := _small(path)) is not None:
            target = copy / path.relative_to(failure)
            target.parent.mkdir(exist_ok=True)
            target.write_text(small, encoding="utf-8")
    (copy / "source.txt").write_text(source, encoding="utf-8")
    _require_same_diagnosis(failure, copy)
    files = [path for path in copy.rglob("*") if path.is_file() and path.name != "source.txt"]
    if len(files) == 1 and files[0].suffix == ".log":
        text = copy.with_suffix(".txt")
        text.write_text(source + files[0].read_text(encoding="utf-8"), encoding="utf-8")
        shutil.rmtree(copy)
        return text
    return copy


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


def _require_same_diagnosis(whole: Path, small: Path) -> None:
    expected, found = ([(d.failure_class, d.confidence) for d in diagnose(read_evidence(p))] for p in (whole, small))
    if expected != found:
        raise ValueError(f"{whole}: diagnosed as {expected}, and its small copy as {found}")
