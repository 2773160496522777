"""What docs/benchmarks.md says of jobs that ran out of memory, and of what a change of their plan freed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness.recovery_rows import GIB
from bench.report import freed_bytes as freed
from rljob_memory.evidence.sizes import human_bytes


def recovered_jobs(result: Mapping[str, Any], versions: str) -> str:
    """`result`: of bench/programs/recovered_jobs.py."""
    rows = result["rows"]
    recovered = [row for row in rows if row["arm"] == "with"]
    died = sum(row["as_meant"] for row in rows if row["arm"] == "without")
    accounts = [row for row in recovered if row["as_meant"] and row["exit_code"]]
    complete = [row for row in recovered if row["as_meant"] and not row["exit_code"]]
    lost = [row["seconds_lost"] for row in complete]
    starts = [sum(row["start"].values()) for row in rows if row["start"] and row["arm"] != "calm"]
    cost, start = (f"{min(seconds):.0f} to {max(seconds):.0f} s" for seconds in (lost, starts))
    return f"""## Jobs that ran out of memory

`{result["script"]}`, {result["date"]}, {versions}, one {result["device"]}:
the jobs of `bench/programs/failing_jobs`, each without recovery and with it. Of {len(recovered)} jobs {died} died
without recovery. With it {len(complete)} completed all their steps, and {len(accounts)} that nothing in its plan could
help ended with its account. It cost {cost}; the same job's start from nothing takes {start}, and the
steps since its last checkpoint.

{table(recovered)}
`–`: none, or not measured. On purpose: freed is what the fault itself had taken, for the most part.
"""


def freed_bytes() -> str:
    found = freed.effects()
    recoveries = sum(effect.how == "recovery" for effect in found)
    close = sum(effect.is_close for effect in found)
    return f"""## What a change of the plan frees, expected and seen

`bench/report/freed_bytes.py`, one NVIDIA H200. {len(found)} changes: {recoveries} seen in a recovery (the table above),
with what was expected in that run; {len(found) - recoveries} of a setting by itself, where nothing failed
([Memory mitigations](mitigations.md)), with what `rljob_memory.recovery` expects of it. {close} of {len(found)} are
off by less than a third. Failures on purpose are left out: what a fault has taken is given back whatever is changed.

{freed.table(found)}

![Expected and freed bytes](../bench/results/freed_bytes.png)
"""


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """As Markdown: a line a job that recovered, or gave its account."""
    lines = [
        "| failure | remedy | steps | attempts | seconds lost | of these | expected | freed | rewards differ by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["arm"] != "with":
            continue
        remedies = row["remedies"]
        settings = "; ".join(f"{remedy['setting']}: {_value(remedy)} ({remedy['level']})" for remedy in remedies)
        expected, freed = (_gib([remedy[name] for remedy in remedies]) for name in ("expected_bytes", "observed_bytes"))
        difference = row["largest_reward_difference"]
        cells = (
            f"{row['class']}{' (on purpose)' if row.get('on_purpose') else ''}",
            settings or "none",
            row["steps"],
            row["attempts"],
            row["seconds_lost"] or "–",
            "; ".join(parts_text(remedy["parts"]) for remedy in remedies) or "–",
            expected,
            freed,
            "–" if difference is None else f"{difference:.2g}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def parts_text(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in parts.items() if seconds >= 0.05) or "–"


def _value(remedy: Mapping[str, Any]) -> str:
    """The setting's new value, as people write it."""
    value = str(remedy["after"])
    return human_bytes(int(value)) if remedy["setting"].endswith("Bytes") and value.isdecimal() else value


def _gib(sizes: Sequence[int | None]) -> str:
    return "; ".join("–" if size is None else f"{size / GIB:.1f} GiB" for size in sizes) or "–"
