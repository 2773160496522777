"""Block on the soak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.report.markdown import Result, facts, source, table


def block(result: Result) -> str:
    [row] = result["rows"]
    hostile = row.get("hostile_objects", {})
    others = {reason: count for reason, count in row["attempts"].items() if reason != "AllStepsCommitted"}
    disk = [size / 1e3 for size in row["disk_bytes"]]
    operator = [size / 1e6 for size in row["operator_bytes"]]
    rows = [
        (
            "options",
            f"`--minutes {row['minutes_of_faults']:.0f} --seed {row['seed']}{' --hostile-tenant' if hostile else ''}`",
        ),
        ("Kubernetes", row["kubernetes"]),
        ("jobs at a time", str(row["streams"])),
        ("**complete**", f"**{row['complete']} of {row['jobs']} jobs**"),
        ("steps, each committed once", f"{row['steps']:,}"),
        ("injected failures", _counted(row["injected_failures"])),
        ("attempts that did not end with the last step", _counted(others)),
        *([("objects of a hostile tenant, stored meanwhile", _counted(hostile))] if hostile else []),
        ("leaked pods, objects, volumes, containers, processes, mounts, networks", _leaked(row["leaks"])),
        ("disk of nodes and volumes, without images", f"{disk[0]:,.0f} kB before, {disk[1]:,.0f} kB after"),
        ("resident memory of the operator", f"{operator[0]:.0f} MB before, {operator[1]:.0f} MB after"),
    ]
    by_kind = _kinds(row.get("jobs_by_kind", {}))
    by_fault = _recoveries(row["recovery_seconds_by_fault"], row["faults"])
    by_level = _recoveries(row["recovery_seconds_by_level"], {})
    return (
        f"{source(result, versions=False)}\n{facts(rows)}\n{by_kind}"
        f"{table(('external fault', 'times', 'median seconds to the next commit', 'worst'), by_fault)}\n"
        f"{table(('level of a plan change', 'times', 'median seconds to recover', 'worst'), by_level)}"
    )


def _kinds(kinds: Mapping[str, Any]) -> str:
    """A table with a row for each kind of job; empty for a soak of jobs of one kind."""
    if not kinds:
        return ""
    heads = ("topology and worker pods", "jobs", "complete", "steps", "injected failures")
    numbers = ("jobs", "complete", "steps", "injected_failures")
    return table(heads, [(kind, *(f"{of[name]:,}" for name in numbers)) for kind, of in kinds.items()]) + "\n"


def _recoveries(recoveries: Mapping[str, Any], times: Mapping[str, int]) -> list[tuple[str, ...]]:
    """A row for each name. `times` counts faults, some of which have no recovery that was timed."""
    rows: list[tuple[str, ...]] = []
    for name in sorted({*recoveries, *times}):
        timed = recoveries.get(name)
        numbers = (f"{timed['median']:.0f}", f"{timed['worst']:.0f}") if timed else ("–", "–")
        rows.append((f"`{name}`", str(times.get(name, timed["count"] if timed else 0)), *numbers))
    return rows


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × `{name}`" for name, count in sorted(counts.items(), key=lambda each: -each[1]))


def _leaked(found: list[str]) -> str:
    return "; ".join(found) or "none"
