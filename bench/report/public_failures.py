"""Accuracy of the diagnosis on public failures, from the records of bench/programs/public_failures.py."""

from __future__ import annotations

from collections import Counter

from bench.report.markdown import Result, Row, read, source, table

SETS = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
)
"""Sets of cases, the newest last."""


def block(result: Result) -> str:
    """A line for each class: cases, right first diagnoses, and the classes that were diagnosed instead."""
    rows = [
        [str(row["class"]), str(row["cases"]), f"{row['right']} ({row['right'] / row['cases']:.0%})", _instead(row)]
        for row in result["rows"]
    ]
    return f"{source(result, versions=False)}\n" + table(["class", "cases", "right", "diagnosed instead"], rows)


def every_set() -> str:
    """A line for each set, in the order of their collection, from the record of each."""
    return table(
        [
            "set",
            "measured",
            "cases",
            "right",
            "with firm labels",
            "without any diagnosis",
            "wrong, confidence above 0.8",
        ],
        [_of_set(name, read(f"public_failures_{name}")) for name in SETS],
    )


def _of_set(name: str, result: Result) -> list[str]:
    rows = {row["class"]: row for row in result["rows"]}
    every, firm = rows["all"], rows["firm labels"]
    rights = [f"{row['right']} of {row['cases']} ({row['right'] / row['cases']:.0%})" for row in (every, firm)]
    counts = [str(every[key]) for key in ("silent", "wrong_and_sure")]
    return [name, result["date"], str(every["cases"]), *rights, *counts]


def _instead(row: Row) -> str:
    if row["class"] in ("all", "firm labels"):
        return f"{row['silent']} without any diagnosis; {row['wrong_and_sure']} wrong with more than 0.8 confidence"
    counts = Counter(miss["found"] for miss in row["misses"])
    return ", ".join(f"{name} ×{count}" for name, count in counts.most_common())
