"""`rljob diagnose`: the cause of an out-of-memory failure from what it left behind, as text or as JSON."""

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
from rljob_memory.diagnosis import (
    Balance,
    BalanceEntry,
    Diagnosis,
    FailureClass,
    Finding,
    diagnose,
    found_causes,
    gpu_entries,
    host_entries,
)
from rljob_memory.evidence import CollectedEvidence, Unreadable, read_evidence
from rljob_memory.programs import PROGRAMS
from rljob_memory.sizes import human_bytes

_SURE = 0.5
_LIKELY = 0.4
"""Confidences from which a class is printed in red (`_SURE`) and in yellow."""
_INDENT = (0, 0, 0, 2)
_WIDTH_OF_A_FILE = 1_000
"""Lines are not wrapped in a file or a pipe, where an option's name would be cut."""
_NOT_SHOWN = frozenset({"gpu", "failures", "other_processes_bytes", "private_pool_bytes", "process_bytes"})
"""Numbers that the message names if they matter."""
_MEMORY_EXIT_CODES = {
    ExitCode.DEVICE_OUT_OF_MEMORY,
    ExitCode.HOST_OUT_OF_MEMORY,
    ExitCode.SHARED_MEMORY_EXHAUSTED,
}

FAILURE_FOUND = 1
"""Exit code for `--exit-code`, like that of `git diff --exit-code`."""


def run_diagnose(paths: Sequence[Path], *, as_json: bool, explain: bool = False, exit_code: bool = False) -> int:
    """Print the diagnosis of the files and directories, or that they contain no out-of-memory failure.

    `explain`: print also the causes with their excess and the balances. `exit_code`: return 1 if a failure was found.
    Otherwise 0; 2 if a path cannot be read, with the reason on the standard error.
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
        if not console.is_terminal:
            console.width = _WIDTH_OF_A_FILE
        _print_report(console, ", ".join(map(str, paths)), evidence, diagnoses)
        for reason in filter(None, map(_other_reason, paths)):
            console.print(escape(reason), soft_wrap=not console.is_terminal)
        if explain and evidence.failure is not None:
            _print_explanation(console, Balance(evidence.failure, evidence))
    return FAILURE_FOUND if exit_code and diagnoses else ExitCode.COMPLETE


def _other_reason(path: Path) -> str | None:
    """The failure of the run in the directory `path`, from its summary, if it is not one of memory."""
    try:
        summary = json.loads((path / "summary.json").read_bytes())
        status, code, reason = summary["status"], summary["exit_code"], summary["exit_reason"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if status != "Failed" or code in _MEMORY_EXIT_CODES:
        return None
    return f"The run in {path} failed for another reason (exit code {code}): {reason}"


def _explanation(evidence: CollectedEvidence) -> dict[str, Any] | None:
    """JSON values of the causes that fit and of the balances; None without a failure."""
    if evidence.failure is None:
        return None
    balance = Balance(evidence.failure, evidence)
    return {
        "causes": [
            {"class": str(name), "weight": finding.weight.name, "excess_bytes": finding.excess_bytes}
            for name, finding in found_causes(balance)
        ],
        "gpu": [asdict(entry) for entry in gpu_entries(balance)],
        "host": [asdict(entry) for entry in host_entries(evidence)],
    }


def _print_explanation(console: Console, balance: Balance) -> None:
    failure, evidence = balance.failure, balance.evidence
    console.print("\n[bold]What the evidence shows[/]\n")
    activity = failure.activity.meaning if failure.activity else "neither marked nor shown by a stack"
    facts = [("memory that ran out", failure.kind.meaning), ("activity", activity)]
    facts += [("program", PROGRAMS[key].title) for key in evidence.programs]
    values = evidence.option_values
    whole = [name for name in values if not any(other.endswith(f".{name}") for other in values)]
    facts += [(f"option {name}", values[name]) for name in whole]
    facts += [(f"memory of {series.name}", f"{len(series.samples)} samples") for series in evidence.series]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    for name, value in facts:
        table.add_row(escape(name), escape(value))
    console.print(Padding(table, (0, 0, 1, 2), expand=False))
    _print_causes(console, found_causes(balance))
    _print_balance(console, "The GPU at that moment", gpu_entries(balance))
    if host := host_entries(evidence):
        _print_balance(console, "The host", host)


def _print_causes(console: Console, causes: Sequence[tuple[FailureClass, Finding]]) -> None:
    console.print("[bold]Causes that fit, with what is beyond the expected memory[/]\n")
    table = Table.grid(padding=(0, 2))
    for name, finding in causes:
        excess = human_bytes(finding.excess_bytes) if finding.excess_bytes else ""
        table.add_row(str(name), finding.weight.name.lower(), excess)
    console.print(Padding(table if causes else "None.", (0, 0, 1, 2), expand=False))


def _print_balance(console: Console, title: str, entries: Sequence[BalanceEntry]) -> None:
    console.print(f"[bold]{title}[/]\n")
    if not entries:
        console.print(Padding("The message has no numbers of the GPU.", _INDENT, expand=False))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for entry in entries:
        owner = f"  of it: {entry.owner}" if entry.is_part else entry.owner
        owner = f"  expected: {entry.owner}" if entry.is_expected else owner
        table.add_row(owner, human_bytes(entry.size_bytes), f"from {entry.source}")
    console.print(Padding(table, _INDENT, expand=False))


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
    console.print(Padding(_numbers_table(best.numbers), _INDENT, expand=False))
    if others:
        console.print("\n[dim]Less likely:[/]\n")
    for diagnosis in others:
        _print_diagnosis(console, diagnosis)


def _print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    style = "red" if diagnosis.confidence >= _SURE else "yellow" if diagnosis.confidence >= _LIKELY else "dim"
    console.print(f"[bold {style}]{diagnosis.failure_class}[/]  [dim]confidence {diagnosis.confidence:.2f}[/]")
    console.print(Padding(escape(diagnosis.message), _INDENT, expand=False))
    console.print(Padding(f"[green]→[/] {escape(diagnosis.advice)}", (0, 0, 1, 2), expand=False))


def _numbers_table(numbers: Mapping[str, int]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in numbers.items():
        if name in _NOT_SHOWN:
            continue
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
