"""The block on the memory of policy ranks while they load a model."""

from __future__ import annotations

from bench.report.markdown import Result, source, table


def block(result: Result) -> str:
    """One row per number of ranks and way of loading: memory of one rank and of all, and processor time."""
    rows = [
        (
            row["ranks"],
            {"whole": "the whole model, then its shards", "slices": "slices of its shards"}[row["arm"]],
            f"{row['parameter_bytes'] / row['ranks'] / 2**20:,.0f} MiB",
            f"{row['peak_rss_bytes'] / 2**20:,.0f} MiB",
            f"{row['peak_rss_bytes_of_all'] / 2**20:,.0f} MiB",
            f"{row['processor_seconds']:.1f}",
        )
        for row in result["rows"]
    ]
    head = ("ranks", "each reads", "shards of one", "peak of one", "peaks of all", "processor seconds of one")
    return f"{source(result)}{result['note']}.\n\n{table(head, rows)}"
