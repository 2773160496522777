"""What docs/benchmarks.md says of jobs that ran out of memory, and of what a change of their plan freed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench import freed_bytes as freed
from bench.recovery_rows import table


def recovered_jobs(result: Mapping[str, Any], versions: str) -> str:
    """`result`: of bench/recovered_jobs.py."""
    recovered = [row for row in result["rows"] if row["arm"] == "with"]
    died = {row["job"] for row in result["rows"] if row["arm"] == "without" and row["as_meant"]}
    as_meant = [row for row in recovered if row["as_meant"] and row["job"] in died]
    return f"""## Jobs that ran out of memory

`bench/{result["script"]}`, {result["date"]}, {versions}, one {result["device"]}:
the jobs of `tests/gpu/jobs`, each without recovery and with it. Of {len(recovered)} that were run, {len(as_meant)} died
without recovery, and did with it what they were to do:

{table(as_meant)}
`–`: not measured. Where several remedies stand in a line, the failure came again after all but the last.
"""


def freed_bytes() -> str:
    found = freed.effects()
    recoveries = sum(effect.how == "recovery" for effect in found)
    close = sum(effect.is_close for effect in found)
    return f"""## What a change of the plan frees, expected and seen

`bench/freed_bytes.py`, one NVIDIA H200. {len(found)} changes: {recoveries} seen in a recovery (the table above),
with what was expected in that run; {len(found) - recoveries} of a setting by itself, where nothing failed
([Memory mitigations](mitigations.md)), with what `rljob_memory.remedies` expects of it. {close} of {len(found)} are
off by less than a third. Failures on purpose are left out: what a fault has taken is given back whatever is changed.

{freed.table(found)}

![Expected and freed bytes](../bench/results/freed_bytes.png)
"""
