"""Accuracy of the diagnosis on public failures, from the records of bench/programs/public_failures.py."""

from __future__ import annotations

from collections import Counter

from bench.report.markdown import Result, Row, source, table


def block(result: Result) -> str:
    """A line for each class: cases, right first diagnoses, and the classes that were diagnosed instead."""
    rows = [
        [str(row["class"]), str(row["cases"]), f"{row['right']} ({row['right'] / row['cases']:.0%})", _instead(row)]
        for row in result["rows"]
    ]
    return f"{source(result, versions=False)}\n" + table(["class", "cases", "right", "diagnosed instead"], rows)


def _instead(row: Row) -> str:
    if row["class"] in ("all", "firm labels"):
        return f"{row['silent']} without any diagnosis; {row['wrong_and_sure']} wrong with more than 0.8 confidence"
    counts = Counter(miss["found"] for miss in row["misses"])
    return ", ".join(f"{name} ×{count}" for name, count in counts.most_common())
