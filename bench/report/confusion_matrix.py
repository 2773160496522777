"""Accuracy of the diagnosis on induced failures, from the record of bench/programs/induced_failures.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

SURE = 0.8

Row = Mapping[str, Any]


def score(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts of failures and of right first diagnoses, and the failures with a wrong class above 0.8 confidence."""
    failures = [row for row in rows if _failed(row)]
    wrong = [
        f"{row['induced']}.{row['program']}"
        for row in failures
        if any(found["class"] != row["induced"] and found["confidence"] > SURE for found in row["diagnoses"])
    ]
    right = sum(_said_first(row) == row["induced"] for row in failures)
    return {
        "failures": len(failures),
        "right_first": right,
        "right_first_share": round(right / len(failures), 4) if failures else 0.0,
        "wrong_and_sure": wrong,
        "not_induced": [f"{row['induced']}.{row['program']}: {row['ended']}" for row in rows if not _failed(row)],
    }


def _failed(row: Row) -> bool:
    """True if memory ran out, diagnosed or not."""
    return bool(row["diagnoses"]) or row["ended"] == "not diagnosed"


def _said_first(row: Row) -> str:
    return str(row["diagnoses"][0]["class"]) if row["diagnoses"] else "nothing"


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each induced class, with the classes that were diagnosed first."""
    lines = ["| induced | failures | diagnosed first as | confidence |", "|---|---|---|---|"]
    for induced in dict.fromkeys(row["induced"] for row in sorted(rows, key=lambda row: row["induced"])):
        failures = [row for row in rows if row["induced"] == induced and _failed(row)]
        if not failures:
            continue
        named = ", ".join(f"{name} ×{count}" for name, count in Counter(map(_said_first, failures)).most_common())
        confidences = sorted({row["diagnoses"][0]["confidence"] for row in failures if row["diagnoses"]})
        lines.append(f"| {induced} | {len(failures)} | {named} | {_range(confidences)} |")
    total = score(rows)
    lines += [
        "",
        f"{total['right_first']} of {total['failures']} failures ({total['right_first_share']:.0%}) had the right "
        f"class first; {len(total['wrong_and_sure'])} had a wrong class with a confidence above {SURE}.",
    ]
    return "\n".join(lines) + "\n"


def block(result: Mapping[str, Any]) -> str:
    rows = [row for row in result["rows"] if "induced" in row]
    return f"{result['date']}, one {result['device']}, torch {result['versions'].get('torch', '?')}:\n\n{table(rows)}"


def _range(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{values[0]:.2f}" if len(values) == 1 else f"{values[0]:.2f}–{values[-1]:.2f}"
