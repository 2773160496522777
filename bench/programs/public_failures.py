"""`rljob diagnose` on sets of failures from public threads (tests/data/public).

    .venv/bin/python -m bench.programs.public_failures third [--print] [--output DIR]

The logs of a set were collected and labelled without knowledge of the rules (but see `_NOTES`), and the result was
recorded before anybody wrote a rule from them. The texts of the first two sets and of the thirteenth are posts as they
are, and not part of the repository; their results are. A case is right if the first diagnosis is one of its accepted
classes, or, without a failure, if nothing is diagnosed. Writes public_failures_SET.json: a row for each class, with the
misses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.record import RESULTS, record
from bench.report.confusion_matrix import SURE
from rljob_memory.diagnosis import Diagnosis, diagnose
from rljob_memory.evidence import read_evidence
from rljob_testing.repository import ROOT

SETS = ROOT / "tests" / "data" / "public"
NEGATIVE = "no failure of memory"
_NOTE = "logs of public threads, collected and labelled without knowledge of the rules"
_NOTES = {
    "fourth": "logs of public threads, collected after the rules were frozen, labelled before they were diagnosed, by "
    "an author of the rules"
}
"""Sets that came about in another way than `_NOTE` says."""


@dataclass(frozen=True)
class Verdict:
    """One case and its diagnosis."""

    file: str
    source: str
    accepted: tuple[str, ...]
    """Classes that are right, the best first; empty if no memory ran out."""
    firm: bool
    """The label leaves no doubt."""
    first: Diagnosis | None

    @property
    def found(self) -> str:
        return str(self.first.failure_class) if self.first else NEGATIVE

    @property
    def label(self) -> str:
        return self.accepted[0] if self.accepted else NEGATIVE

    @property
    def right(self) -> bool:
        return self.found in (self.accepted or (NEGATIVE,))

    @property
    def confidence(self) -> float:
        return self.first.confidence if self.first else 0.0


def verdicts(folder: Path) -> list[Verdict]:
    """Diagnose every case of `folder`, whose cases.json lists them."""
    return [
        Verdict(
            case["file"],
            case["source"],
            tuple(case["expected"]),
            case["firm"],
            next(iter(diagnose(read_evidence(folder / case["file"]))), None),
        )
        for case in json.loads((folder / "cases.json").read_text())
    ]


def rows(found: Iterable[Verdict]) -> list[dict[str, Any]]:
    """A row for each class of the labels, then one for all, with what was missed."""
    by_label: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in found:
        by_label[verdict.label].append(verdict)
    everything = [verdict for of_label in by_label.values() for verdict in of_label]
    return [_row(label, of_label) for label, of_label in sorted(by_label.items())] + [
        _row("firm labels", [verdict for verdict in everything if verdict.firm]),
        _row("all", everything),
    ]


def _row(name: str, found: list[Verdict]) -> dict[str, Any]:
    missed = [verdict for verdict in found if not verdict.right]
    return {
        "class": name,
        "cases": len(found),
        "right": len(found) - len(missed),
        "silent": sum(1 for verdict in missed if verdict.accepted and verdict.first is None),
        "wrong_and_sure": sum(1 for verdict in missed if verdict.confidence > SURE),
        "misses": [
            {"file": verdict.file, "source": verdict.source, "found": verdict.found, "confidence": verdict.confidence}
            for verdict in missed
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", help="a folder of tests/data/public")
    parser.add_argument("--print", action="store_true", dest="only_print", help="print every case, record nothing")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the result")
    arguments = parser.parse_args()
    found = verdicts(SETS / arguments.set)
    if arguments.only_print:
        for verdict in found:
            mark = "ok  " if verdict.right else "MISS"
            accepted = ", ".join(verdict.accepted) or NEGATIVE
            print(f"{mark} {verdict.file:44} {verdict.found:20} {verdict.confidence:.2f}  accepted: {accepted}")
        return 0
    note = _NOTES.get(arguments.set, _NOTE)
    print(record(f"public_failures_{arguments.set}", rows(found), note, directory=arguments.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
