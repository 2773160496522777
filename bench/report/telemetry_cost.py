"""What telemetry costs, from the rows that bench/programs/memory_telemetry.py records."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def table(result: dict[str, Any]) -> str:
    """The costs as Markdown. An arm that failed is left out."""
    rows: dict[str, Row] = {row["arm"]: row for row in result["rows"] if "error" not in row}
    lines = [f"On one {result['device']}, torch {result['versions']['torch']}:", "", "| | |", "|---|---|"]
    if samples := rows.get("samples alone"):
        lines += [
            f"| a micro-batch's sample | {samples['micro_batch_microseconds']:.0f} µs |",
            f"| a phase's sample | {samples['phase_microseconds'] / 1e3:.2f} ms |",
            f"| all samples of an update with {samples['micro_batches']} micro-batches | "
            f"{samples['share_percent']:.2f} % of it |",
            f"| a line of the log | {samples['line_bytes']} bytes |",
        ]
    if turns := rows.get("log on and off in turn"):
        lines.append(
            f"| an update with the log and one without, medians in turn | {turns['update_seconds_on']:.3f} s, "
            f"{turns['update_seconds_off']:.3f} s (one update varies by {turns['spread_percent']:.1f} %) |"
        )
    if snapshot := rows.get("snapshot of a failed request"):
        with_it, without = snapshot["milliseconds_with"], snapshot["milliseconds_without"]
        size = snapshot["json_bytes"] / 1024
        took = f"{with_it:.0f} ms with its snapshot of {size:.1f} KiB, {without:.0f} ms without"
        lines.append(f"| a request that fails, the allocator's search included | {took} |")
    return "\n".join(lines) + "\n"
