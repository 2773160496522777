"""Attempts of another trainer whose options an adapter changes, from records of adapter_recovery, trl_failures and
verl_failures."""

from __future__ import annotations

from bench.report.markdown import Result, Row, source, table

_VERL_PREFIX = "actor_rollout_ref."


def block(result: Result) -> str:
    """A line for each attempt: the options that the adapter changed, the steps, and how the attempt ended."""
    rows = [
        [row["attempt"], _options(row), row["steps"], f"{row['seconds']:.0f}", _outcome(row)] for row in result["rows"]
    ]
    header = ["attempt", "options changed by the adapter", "steps", "seconds", "outcome"]
    note = f"{result['note'][0].upper()}{result['note'][1:]}"
    return f"{source(result)}{note}; TRL {result['versions']['trl']}.\n\n{table(header, rows)}"


def failures_of_trl(result: Result) -> str:
    return _failures(result, "options of `trl_steps`", f"TRL {result['versions']['trl']}")


def failures_of_verl(result: Result) -> str:
    note = f"verl {result['versions']['verl']}; its options without their prefix `{_VERL_PREFIX}`"
    return _failures(result, "options of verl", note)


def _failures(result: Result, options: str, note: str) -> str:
    """A line for each attempt of each failure."""
    rows = [
        [
            f"`{_short(' '.join(failure['options']))}`",
            row["attempt"],
            _options(row),
            row["steps"],
            f"{row['seconds']:.0f}",
            _outcome(row),
        ]
        for failure in result["rows"]
        for row in failure["attempts"]
    ]
    header = [options, "attempt", "options changed by the adapter", "steps", "seconds", "outcome"]
    return f"{source(result)}{note}.\n\n{table(header, rows)}"


def _options(row: Row) -> str:
    return "; ".join(f"`{_short(line.partition(': ')[2] or line)}`" for line in row["adapter"]) or "none"


def _short(options: str) -> str:
    return options.replace(_VERL_PREFIX, "")


def _outcome(row: Row) -> str:
    if row["exit_code"] == 0:
        return "completed"
    if "class" in row:
        return f"out of memory ({row['class']}); next plan: `{row['setting']}: {row['after']}`"
    return "failed; no change was left"
