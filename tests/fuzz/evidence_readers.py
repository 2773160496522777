"""Feeds the readers of evidence what a fuzzer makes of the recorded failures: no exception, no sure wrong answer.

    pip install atheris
    python -m tests.fuzz.evidence_readers -max_total_time=300 CORPUS    (a folder, empty the first time)

A hypothesis test does the same with less patience: tests/unit/memory/diagnosis/test_damaged_evidence.py.
"""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["rljob_memory"]):
    from rljob_memory.diagnosis import diagnose
    from rljob_memory.evidence.collected import EvidenceBuilder
    from rljob_memory.evidence.log_reader import LogReader
    from rljob_memory.evidence.reports import read_report
    from rljob_memory.evidence.run_files import read_ledger, read_memory_log, read_oom_snapshot

RECORDED = Path(__file__).parents[1] / "data" / "oom"


def one_input(data: bytes) -> None:
    builder = EvidenceBuilder()
    LogReader(builder, "log").read(BytesIO(data))
    read_memory_log(builder, BytesIO(data), "policy-0")
    read_ledger(builder, BytesIO(data))
    text = data.decode("utf-8", "replace")
    read_oom_snapshot(builder, text, "snapshot")
    read_report(builder, text, "document")
    diagnoses = diagnose(builder.build())
    assert all(0 <= diagnosis.confidence <= 1 for diagnosis in diagnoses)
    assert all(isinstance(number, int) for diagnosis in diagnoses for number in diagnosis.numbers.values())


def main() -> None:
    corpus = Path(sys.argv[-1])
    if corpus.is_dir() and not any(corpus.iterdir()):
        for path in RECORDED.glob("*/*.txt"):
            (corpus / path.name).write_bytes(path.read_bytes())
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
