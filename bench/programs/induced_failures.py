"""Runs every program of `rljob_testing.induced_failures`, diagnoses each failure, and counts mistakes.

    python -m bench.programs.induced_failures --output DIR [--only TITLE …]

Each program runs in its own process and folder. Several load their libraries at the same time and take turns on the
GPU. A program that hangs or does not fail is recorded too. After each program, the record (`DIR/induced_failures.json`)
and the packed evidence (`DIR/recorded/CLASS/…`, in `DIR/recorded.tar.gz`) are complete up to that program. Takes 5
minutes on one H200 with 16 cores.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness.record import record
from rljob_testing.induced_failures.catalogue import programs
from rljob_testing.induced_failures.induce import Row, induce

AT_A_TIME = 6
SURE = 0.8
"""Confidence above which a wrong class is a mistake."""


def main(output: Path, only: Sequence[str]) -> None:
    chosen = [program for program in programs() if not only or program.title in only]
    output.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for row in pool.map(lambda program: induce(program, output), chosen):
            rows.append(row)
            save(rows, output)
            print(f"{len(rows):>3}/{len(chosen)}  {line(row)}", flush=True)
    print(json.dumps(score(rows), indent=1))


def save(rows: Sequence[Row], output: Path) -> None:
    """Write the record and the packed evidence so far."""
    as_dicts = [asdict(row) for row in rows]
    for row in as_dicts:
        row["diagnoses"] = [{name: each[name] for name in ("class", "confidence")} for each in row["diagnoses"]]
    note = "each program of rljob_testing.induced_failures, diagnosed by `rljob diagnose` from what it left behind"
    record("induced_failures", [{"program": "all", **score(rows)}, *as_dicts], note, output)
    with tarfile.open(output / "recorded.tar.gz", "w:gz") as archive:
        if (output / "recorded").exists():
            archive.add(output / "recorded", "recorded")


def score(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts of failures and of right first diagnoses, and the failures with a confident wrong class."""
    failures = [row for row in rows if row.diagnoses or row.ended == "not diagnosed"]
    return {
        "failures": len(failures),
        "right_first": sum(bool(row.diagnoses) and row.diagnoses[0]["class"] == row.induced for row in failures),
        "wrong_and_sure": [
            f"{row.induced}.{row.program}"
            for row in failures
            if any(found["class"] != row.induced and found["confidence"] > SURE for found in row.diagnoses)
        ],
        "not_induced": [f"{row.induced}.{row.program}: {row.ended}" for row in rows if row not in failures],
    }


def line(row: Row) -> str:
    shown = (
        ", ".join(f"{found['class']} {found['confidence']}" for found in row.diagnoses) or f"{row.ended}: {row.note}"
    )
    return f"{row.seconds:5.1f} s  {row.induced}.{row.program}  →  {shown}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="where evidence and record go")
    titles = [program.title for program in programs()]
    parser.add_argument("--only", nargs="*", default=[], metavar="TITLE", choices=titles, help="as Class.name")
    main(**vars(parser.parse_args()))
