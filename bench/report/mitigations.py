"""Blocks on memory mitigations: their costs, the memory that they free, the footprint of each role."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import shorten

from bench.report.markdown import MIB, Result, Row, gib, source, table


def costs(result: Result) -> str:
    """Each setting changed alone, against the second run of the default plan: the first arm of a process is slower."""
    arms = {row["arm"]: row for row in result["rows"]}
    default, generation = arms["default plan, again"], arms["generation"].get("generate_seconds", 0.0)
    whole_step = generation + default["without_generation_seconds"]
    measured = [row for row in arms.values() if "update_seconds" in row and row is not default]
    rows = [("nothing", f"{1e3 * whole_step:.0f}", "", *_memory(default))]
    for row in measured:
        seconds = row["without_generation_seconds"] - default["without_generation_seconds"]
        name = "nothing, first run" if row["arm"] == "default plan" else row["arm"]
        rows.append((name, f"{1e3 * seconds:+.0f}", f"{100 * seconds / whole_step:+.1f}", *_memory(row)))
    header = ("changed", "ms per step", "%", "peak allocated", "peak reserved", "reserved after the sync")
    return (
        f"{_source(result)}\nA step of the default plan takes {whole_step:.2f} s, of which generation takes "
        f"{generation:.2f} s.\n\n{table(header, rows)}{_failures(arms.values())}"
    )


def _memory(row: Row) -> tuple[str, str, str]:
    return (
        gib(row["peak_allocated_bytes"]),
        gib(row["peak_reserved_bytes"]),
        gib(row["reserved_after_sync_bytes"]),
    )


def cache(result: Result) -> str:
    rows = [
        (
            row["arm"],
            gib(row["peak_allocated_bytes"]),
            gib(row["steps"][0]["peak_reserved_bytes"]),
            gib(row["peak_reserved_bytes"]),
            f"{row['reserved_by_allocated']:.2f}",
            gib(max(step["reserved_after_bytes"] for step in row["steps"])),
        )
        for row in result["rows"]
        if row.get("steps") and "peak_allocated_bytes" in row
    ]
    header = (
        "enabled",
        "peak allocated",
        "peak reserved, first step",
        "peak reserved, all steps",
        "reserved / allocated",
        "most reserved after an update",
    )
    return f"{_source(result)}\n{table(header, rows)}{_failures(result['rows'])}"


def retained(result: Result) -> str:
    rows = [
        (
            row["arm"],
            f"{row['micro_batches']:,}",
            f"{row['growth_bytes_per_micro_batch'] / MIB:+.2f} MiB",
            f"{row['growth_bytes'] / MIB:+,.1f} MiB",
            f"{row['milliseconds_per_micro_batch']:.1f}",
        )
        for row in result["rows"]
        if "growth_bytes" in row
    ]
    header = ("metrics", "micro-batches", "allocated per micro-batch", "allocated in all", "ms per micro-batch")
    return f"{_source(result)}\n{table(header, rows)}{_failures(result['rows'])}"


def small_card(result: Result) -> str:
    rows = [
        (
            row["arm"],
            gib(row["card_bytes"]) if "card_bytes" in row else "all",
            row["steps_survived"],
            _most(row, "cached_after_update_bytes"),
            _most(row, "cached_after_sync_bytes"),
            _most(row, "sync_peak_reserved_bytes"),
            f"{1e3 * row.get('sync_seconds_median', 0):.0f}",
        )
        for row in result["rows"]
        if "steps_survived" in row
    ]
    header = (
        "arm",
        "GPU memory available",
        "steps completed",
        "cached after an update",
        "cached after a sync",
        "peak reserved in a sync",
        "median ms per sync",
    )
    return f"{_source(result)}\n{table(header, rows)}{_failures(result['rows'])}"


def controller(result: Result) -> str:
    rows = [(row["arm"], f"{row['device_bytes'] / MIB:.0f} MiB") for row in result["rows"] if "device_bytes" in row]
    return f"{_source(result)}\n{table(('program', 'GPU memory'), rows)}{_failures(result['rows'])}"


def rollout_role(result: Result) -> str:
    rows = [
        (f"{row['arm']}{_shape(row)}", gib(row["awake_bytes"]), gib(row["asleep_bytes"]))
        for row in result["rows"]
        if "awake_bytes" in row
    ]
    return f"{_source(result)}\n{table(('in the process', 'awake', 'asleep'), rows)}{_failures(result['rows'])}"


def _shape(row: Row) -> str:
    """The shape, for rows of a result with several."""
    return f", {row['shape'].upper()}" if "shape" in row else ""


def _source(result: Result) -> str:
    note = result["note"]
    return f"{source(result, versions=False)}{note[0].upper()}{note[1:]}.\n"


def _failures(rows: Iterable[Row]) -> str:
    """A line for each arm that failed, with the beginning of its error."""
    return "".join(
        f"\n`{row['arm']}` failed: {shorten(row['error'], 300, placeholder=' …')}\n" for row in rows if "error" in row
    )


def _most(row: Row, name: str) -> str:
    return gib(max((step[name] for step in row["steps"]), default=0))
