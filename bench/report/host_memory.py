"""The block on predicted and measured host memory."""

from __future__ import annotations

from bench.report.markdown import Result, gib, source, table


def block(result: Result) -> str:
    """One row per job: measured and predicted peak of all processes, and a checkpoint."""
    rows = []
    for row in result["rows"]:
        measured, predicted = row["peak_pss_bytes"]["all"], row["predicted"]["all"]
        rows.append(
            (
                row["job"],
                gib(measured),
                gib(predicted),
                f"{100 * (predicted / measured - 1):+.0f} %",
                f"{row['checkpoint_bytes'] / 2**20:,.0f} MiB",
                f"{row['predicted']['checkpoint_bytes'] / 2**20:,.0f} MiB",
            )
        )
    head = ("job", "measured", "predicted", "difference", "checkpoint", "predicted checkpoint")
    return f"{source(result)}\n{table(head, rows)}"
