"""Blocks on recoveries: jobs that ran out of memory, one recovery in pods, and the time that each way back takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness.recovery_rows import GIB
from bench.report import markdown
from bench.report.markdown import Result, facts, sentence, source

_PARTS_OF_A_START = {
    "reading": "model and task",
    "ray": "Ray",
    "processes": "processes, imports",
    "policy": "policy",
    "engine": "engine",
    "replay": "replay of three steps, with compilation",
    "sync": "weights to the engine",
}


def recovered_jobs(result: Result) -> str:
    rows = result["rows"]
    recovered = [row for row in rows if row["arm"] == "with"]
    died = sum(row["as_intended"] for row in rows if row["arm"] == "without")
    gave_up = [row for row in recovered if row["as_intended"] and row["exit_code"]]
    complete = [row for row in recovered if row["as_intended"] and not row["exit_code"]]
    lost = [row["seconds_lost"] for row in complete]
    starts = [sum(row["start"].values()) for row in rows if row["start"] and row["arm"] != "calm"]
    cost, start = (f"{min(seconds):.0f} to {max(seconds):.0f} s" for seconds in (lost, starts))
    counts = [
        ("jobs", str(len(recovered))),
        ("without recovery: ran out of memory", str(died)),
        ("with recovery: completed all steps", str(len(complete))),
        ("with recovery: failed with an explanation, as no change can help", str(len(gave_up))),
        ("seconds lost by a recovery", cost),
        ("for comparison: start of the same job", start),
    ]
    return f"{source(result)}\n{facts(counts)}\n{table(recovered)}"


def recovery_in_pods(result: Result) -> str:
    """Times of one recovery, and the parts of the start before the failure and after it."""
    [row] = result["rows"]
    after, seconds = row["seconds_from_apply"], row["attempt_ready_seconds"]
    restarted = after["failed_step_committed"] - after["plan_changed"]
    moments = [
        ("from the failure to the changed plan", f"{after['plan_changed'] - after['out_of_memory']:.1f} s"),
        ("from the changed plan to the commit of the failed step", f"{restarted:.0f} s"),
    ]
    starts = [
        (text, *(f"{seconds[number][name]:.1f} s" if name in seconds[number] else "–" for number in ("1", "2")))
        for name, text in _PARTS_OF_A_START.items()
    ]
    parts = markdown.table(("part of the start", "first start", "restart in place"), starts)
    return f"{source(result)}\n{facts(moments)}\n{parts}"


def recovery_time(result: Result) -> str:
    """The first start is that of the last arm."""
    shown = result["rows"][-2]["arm"]
    rows = [
        ("first start" if row["arm"] == shown else row["arm"], f"{row['seconds']:.1f} s", markdown.parts(row["parts"]))
        for row in result["rows"]
        if not row["arm"].startswith("first start") or row["arm"] == shown
    ]
    note = f"{sentence(result['note'])}\n"
    header = ("recovery by", "seconds", "of these")
    return f"{source(result, versions=False)}{note}\n{markdown.table(header, rows)}"


def ranks_recover(result: Result) -> str:
    """One line for each failure, with the seconds that its step took longer, by arm, and what live recovery freed."""
    rows = [row for row in result["rows"] if "failed" not in row]
    lines = []
    for failure in dict.fromkeys(row["failure"] for row in rows):
        found = {row["arm"]: row for row in rows if row["failure"] == failure}
        restarted, live = found.get("restart", found.get("killed")), found.get("live")
        lines.append((failure, _lost(restarted), _lost(live), _change(live)))
    note = f"{sentence(result['note'])}\n"
    header = ("rank 1 fails in", "processes restarted; parts", "live; parts", "live change; freed")
    return f"{source(result, versions=False)}{note}\n{markdown.table(header, lines)}"


def _lost(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    seconds = f"{row['seconds_lost']:.1f} s"
    return f"{seconds}; {markdown.parts(row['parts'])}" if row.get("parts") else seconds


def _change(row: Mapping[str, Any] | None) -> str:
    if row is None or "change" not in row:
        return "–"
    freed = row.get("freed_bytes")
    return row["change"] if freed is None else f"{row['change']}; {_gib([freed])}"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown with one line for each job that ran with recovery."""
    lines = [
        "| failure | change | steps | attempts | seconds lost | of these | expected to free | freed | rewards differ |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["arm"] != "with":
            continue
        remedies = row["remedies"]
        settings = "; ".join(f"{remedy['setting']}: {remedy['after']} ({remedy['level']})" for remedy in remedies)
        expected, freed = (_gib([remedy[name] for remedy in remedies]) for name in ("expected_bytes", "observed_bytes"))
        difference = row["largest_reward_difference"]
        cells = (
            f"{row['class']}{' (injected)' if row.get('injected') else ''}",
            settings or "none",
            row["steps"],
            row["attempts"],
            row["seconds_lost"] or "–",
            "; ".join(markdown.parts(remedy["parts"]) for remedy in remedies) or "–",
            expected,
            freed,
            "–" if difference is None else f"{difference:.2g}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def _gib(sizes: Sequence[int | None]) -> str:
    return "; ".join("–" if size is None else f"{size / GIB:.1f} GiB" for size in sizes) or "–"
