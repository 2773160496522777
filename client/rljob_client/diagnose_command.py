"""`rljob diagnose`: the cause of an out-of-memory failure from what it left behind, for people or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from rljob_api.exit_codes import ExitCode
from rljob_memory.diagnosis import Diagnosis, Explanation, FiredRule, LedgerEntry, diagnose, gpu_entries, host_entries
from rljob_memory.diagnosis import explain as explain_failure
from rljob_memory.evidence import CollectedEvidence, Unreadable, read_evidence
from rljob_memory.programs import PROGRAMS
from rljob_memory.sizes import human_bytes

_SURE = 0.75
_LIKELY = 0.5
_INDENT = (0, 0, 0, 2)
_OF_MEMORY = {ExitCode.DEVICE_OUT_OF_MEMORY, ExitCode.HOST_OUT_OF_MEMORY, ExitCode.SHARED_MEMORY_EXHAUSTED}

FAILURE_FOUND = 1
"""Exit code for `--exit-code`, as of `git diff --exit-code`."""


def run_diagnose(paths: Sequence[Path], *, as_json: bool, explain: bool = False, exit_code: bool = False) -> int:
    """Print the diagnosis of the files and directories, or that they contain no out-of-memory failure.

    `explain`: print also the rules that fired and the ledgers. `exit_code`: return 1 if a failure was found. Otherwise
    0; 2 if a path cannot be read, with the reason on the standard error.
    """
    try:
        evidence = read_evidence(*paths)
    except Unreadable as problem:
        print(f"rljob: {problem}", file=sys.stderr)
        return ExitCode.INVALID_MANIFEST
    diagnoses = diagnose(evidence)
    if as_json:
        found: Any = [diagnosis.as_dict() for diagnosis in diagnoses]
        if explain:
            found = {"diagnoses": found, "explanation": _explanation(evidence)}
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        console = Console(highlight=False)
        _print_report(console, ", ".join(map(str, paths)), evidence, diagnoses)
        for reason in filter(None, map(_other_reason, paths)):
            console.print(escape(reason), soft_wrap=not console.is_terminal)
        if explain and (explanation := explain_failure(evidence)):
            _print_explanation(console, explanation)
    return FAILURE_FOUND if exit_code and diagnoses else ExitCode.COMPLETE


def _other_reason(path: Path) -> str | None:
    """The failure of the run in the directory `path`, from its summary, if it is not one of memory."""
    try:
        summary = json.loads((path / "summary.json").read_bytes())
        status, code, reason = summary["status"], summary["exit_code"], summary["exit_reason"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if status != "Failed" or code in _OF_MEMORY:
        return None
    return f"The run in {path} failed for another reason (exit code {code}): {reason}"


def _explanation(evidence: CollectedEvidence) -> dict[str, Any] | None:
    """JSON values of the rules that fired and of the ledgers; None without a failure."""
    explanation = explain_failure(evidence)
    if explanation is None:
        return None
    return {
        "rules": [
            {
                "rule": rule.name,
                "class": str(rule.failure_class),
                "confidence": rule.confidence,
                "weighed_confidence": rule.weighed_confidence,
            }
            for rule in explanation.rules
        ],
        "gpu": [asdict(entry) for entry in gpu_entries(explanation.ledger)],
        "host": [asdict(entry) for entry in host_entries(evidence)],
    }


def _print_explanation(console: Console, explanation: Explanation) -> None:
    failure, evidence = explanation.ledger.failure, explanation.ledger.evidence
    console.print("\n[bold]What the evidence shows[/]\n")
    facts = [
        ("memory that ran out", failure.kind.meaning),
        ("activity", failure.activity.meaning if failure.activity else "not shown by a stack"),
    ]
    facts += [("program", PROGRAMS[key].title) for key in evidence.programs]
    values = evidence.option_values
    whole = [name for name in values if not any(other.endswith(f".{name}") for other in values)]
    facts += [(f"option {name}", values[name]) for name in whole]
    facts += [(f"memory of {series.name}", f"{len(series.samples)} samples") for series in evidence.series]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    for name, value in facts:
        table.add_row(escape(name), escape(value))
    console.print(Padding(table, (0, 0, 1, 2)))
    _print_rules(console, explanation.rules)
    _print_ledger(console, "The GPU at that moment", gpu_entries(explanation.ledger))
    if host := host_entries(evidence):
        _print_ledger(console, "The host", host)


def _print_rules(console: Console, rules: Sequence[FiredRule]) -> None:
    console.print("[bold]Rules that fired, with their confidence before and after weighing[/]\n")
    table = Table.grid(padding=(0, 2))
    for rule in rules:
        table.add_row(str(rule.failure_class), f"{rule.confidence:.2f} → {rule.weighed_confidence:.2f}")
    if rules:
        console.print(Padding(table, (0, 0, 1, 2)))
    else:
        console.print(Padding("None.", (0, 0, 1, 2)))


def _print_ledger(console: Console, title: str, entries: Sequence[LedgerEntry]) -> None:
    console.print(f"[bold]{title}[/]\n")
    if not entries:
        console.print(Padding("The message has no numbers of the GPU.", _INDENT))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for entry in entries:
        owner = f"  of it: {entry.owner}" if entry.is_part else entry.owner
        owner = f"  expected: {entry.owner}" if entry.is_expected else owner
        table.add_row(owner, human_bytes(entry.size_bytes), f"from {entry.source}")
    console.print(Padding(table, _INDENT))


def _print_report(console: Console, names: str, evidence: CollectedEvidence, diagnoses: list[Diagnosis]) -> None:
    if evidence.failure is None:
        files = f"{len(evidence.names)} file{'' if len(evidence.names) == 1 else 's'} read"
        console.print(f"No out-of-memory failure found in {escape(names)} ({files}).{_consequences(evidence)}")
        for diagnosis in diagnoses:
            console.print()
            _print_diagnosis(console, diagnosis)
        return
    console.print(f"[bold]{escape(evidence.failure.source or names)}[/]  [dim]{_messages(evidence)}[/]\n")
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
