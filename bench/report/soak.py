"""What docs/benchmarks.md says of the recorded soak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def section(result: Mapping[str, Any]) -> str:
    [row] = result["rows"]
    others = {reason: count for reason, count in row["attempts"].items() if reason != "AllStepsCommitted"}
    disk = [size / 1e3 for size in row["disk_bytes"]]
    operator = [size / 1e6 for size in row["operator_bytes"]]
    left = "; ".join(row["left_behind"]) or "nothing"
    command = f"python -m bench.programs.soak --minutes {row['minutes_of_faults']:.0f} --seed {row['seed']}"
    machine = f"{result['device']}, Kubernetes {row['kubernetes']}"
    return f"""## {row["minutes_of_faults"]:.0f} minutes of random faults

`{command}`, {result["date"]}, {machine}:
{result["note"]}.
{row["lanes"]} jobs at a time, {row["jobs"]} in all, each also with failures of its own by `spec.faultInjection`:
{_counted(row["failures_on_purpose"])}.
**{row["complete"]} of {row["jobs"]} are complete**; each of {row["steps"]:,} steps is in its ledger once.

| fault from outside | times | seconds until a step was committed: median | worst |
|---|---|---|---|
{_table(row["recovery_seconds_by_fault"], row["faults"])}

A time counts until the last job that the fault may have disturbed committed a step. It contains whatever else struck
that job meanwhile, and the rest of its start; what serves all jobs may disturb all. Everything ran on these cores,
which had other work besides. Attempts that did not end with the last step:
{_counted(others)}.

| the memory plan changed, in force by | times | seconds to recover: median | worst |
|---|---|---|---|
{_table(row["recovery_seconds_by_level"], {})}

Left behind, of pods, objects, volumes, containers, processes, mounts, networks: {left}.
Disk of nodes and volumes, images apart, {disk[0]:,.0f} kB before, {disk[1]:,.0f} kB after; the operator's memory
{operator[0]:.0f} MB before, {operator[1]:.0f} MB after.
"""


def _table(recoveries: Mapping[str, Any], times: Mapping[str, int]) -> str:
    """A line for each name; `times`, where it is known apart from the recoveries that were timed."""
    lines = []
    for name in sorted({*recoveries, *times}):
        timed = recoveries.get(name)
        numbers = f"{timed['median']:.0f} | {timed['worst']:.0f}" if timed else "– | –"
        lines.append(f"| `{name}` | {times.get(name, timed['count'] if timed else 0)} | {numbers} |")
    return "\n".join(lines)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × `{name}`" for name, count in sorted(counts.items(), key=lambda each: -each[1]))
