"""The block on checkpoints: seconds and host memory of writing one and of resuming from it."""

from __future__ import annotations

from bench.report.markdown import Result, source, table


def block(result: Result) -> str:
    """Two rows per way: writing and resuming."""
    rows = [
        (
            {"writing": "write", "resuming": "resume"}[phase],
            {"whole": "one file, read again", "pieces": "pieces, once"}[row["arm"]],
            row["files"],
            f"{row[f'{phase}_seconds']:.1f}",
            f"{row[f'{phase}_processor_seconds']:.1f}",
            f"{row[f'{phase}_peak_rss_bytes'] / 2**20:,.0f} MiB",
            f"{row[f'{phase}_read_bytes'] / row['checkpoint_bytes']:.1f} ×",
        )
        for phase in ("writing", "resuming")
        for row in result["rows"]
    ]
    size = f"{result['rows'][0]['checkpoint_bytes'] / 2**20:,.0f} MiB"
    head = (
        "phase",
        "way",
        "files",
        "seconds",
        "processor seconds",
        "peak of host memory above the state",
        "bytes read",
    )
    return f"{source(result)}{result['note']}; a checkpoint of {size}.\n\n{table(head, rows)}"
