"""`rljob diagnose`: the cause of an out-of-memory failure from what it left behind, for people or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from rljob_api.exit_codes import ExitCode
from rljob_memory.diagnosis import Diagnosis, diagnose
from rljob_memory.evidence import CollectedEvidence, Unreadable, read_evidence
from rljob_memory.sizes import human_bytes

_SURE = 0.75
_LIKELY = 0.5
_INDENT = (0, 0, 0, 2)


def run_diagnose(path: Path, *, as_json: bool) -> ExitCode:
    """Print the diagnosis of the file or directory at `path`, or that it contains no out-of-memory failure.

    Exit codes: 0, or 2 if `path` cannot be read, with the reason on the standard error.
    """
    try:
        evidence = read_evidence(path)
    except Unreadable as problem:
        print(f"rljob: {problem}", file=sys.stderr)
        return ExitCode.INVALID_MANIFEST
    diagnoses = diagnose(evidence)
    if as_json:
        print(json.dumps([diagnosis.as_dict() for diagnosis in diagnoses], indent=2, ensure_ascii=False))
    else:
        _print_report(Console(highlight=False), path, evidence, diagnoses)
    return ExitCode.COMPLETE


def _print_report(console: Console, path: Path, evidence: CollectedEvidence, diagnoses: list[Diagnosis]) -> None:
    if evidence.failure is None:
        files = f"{len(evidence.names)} file{'' if len(evidence.names) == 1 else 's'} read"
        console.print(f"No out-of-memory failure found in {escape(str(path))} ({files}).{_consequences(evidence)}")
        return
    console.print(f"[bold]{escape(evidence.failure.source or str(path))}[/]  [dim]{_messages(evidence)}[/]\n")
    best, *others = diagnoses
    _print_diagnosis(console, best)
    console.print(Padding(_numbers_table(best.numbers), _INDENT))
    if others:
        console.print("\n[dim]Less likely:[/]\n")
    for diagnosis in others:
        _print_diagnosis(console, diagnosis)


def _print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    style = "red" if diagnosis.confidence >= _SURE else "yellow" if diagnosis.confidence >= _LIKELY else "dim"
    console.print(f"[bold {style}]{diagnosis.failure_class}[/]  [dim]confidence {diagnosis.confidence:.2f}[/]")
    console.print(Padding(escape(diagnosis.message), _INDENT))
    console.print(Padding(f"[green]→[/] {escape(diagnosis.advice)}", (0, 0, 1, 2)))


def _numbers_table(numbers: Mapping[str, int]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in numbers.items():
        if name.endswith("_bytes"):
            table.add_row(name.removesuffix("_bytes").replace("_", " "), human_bytes(value))
        else:
            table.add_row(name.replace("_", " "), str(value))
    return table


def _messages(evidence: CollectedEvidence) -> str:
    count = "one out-of-memory message" if evidence.failures == 1 else f"the first of {evidence.failures} messages"
    return f"{count}{_consequences(evidence)}"


def _consequences(evidence: CollectedEvidence) -> str:
    """Messages that were left out, since they follow from a failure elsewhere."""
    if not evidence.secondary:
        return ""
    named = ", ".join(f"{name} ×{count}" for name, count in sorted(evidence.secondary.items()))
    return f"; left out as consequences: {named}"
