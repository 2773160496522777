"""The blocks on two GPUs: shared by policy and engine or one for each, with one engine over both or one on each."""

from __future__ import annotations

from bench.report.markdown import Result, Row, gib, parts, source, table


def topologies(result: Result) -> str:
    """One row per arm: seconds, tokens/s, idle share and memory of each GPU, engine against policy."""
    rows = [
        (
            row["arm"],
            f"{row['seconds_per_step']:.1f}",
            parts(row["seconds_by_phase"]),
            f"{row['tokens_per_second']:,.0f}",
            " / ".join(f"{100 * share:.0f} %" for share in row["idle_share_of_gpus"]) or "–",
            _memory(row),
            f"{row['logprob_diff_max']:.3f}",
        )
        for row in _complete(result)
    ]
    head = (
        "arm",
        "s per step",
        "seconds by phase",
        "tokens/s",
        "idle, of each GPU",
        "peak GPU memory",
        "largest log-prob. diff.",
    )
    return f"{source(result)}{result['note']}.\n\n{table(head, rows)}{_failures(result)}"


def tensor_parallel(result: Result) -> str:
    """One row per arm: seconds, tokens/s, KV cache and memory of each GPU, engine against policy."""
    rows = [
        (
            row["arm"],
            f"{row['seconds_per_step']:.1f}",
            f"{row['seconds_by_phase']['rollout']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            gib(row["plan"]["kvCache"]),
            _memory(row),
            f"{row['logprob_diff_max']:.3f}",
        )
        for row in _complete(result)
    ]
    head = (
        "arm",
        "s per step",
        "s in rollout",
        "tokens/s",
        "KV cache of a GPU",
        "peak GPU memory",
        "largest log-prob. diff.",
    )
    return f"{source(result)}{result['note']}.\n\n{table(head, rows)}{_failures(result)}"


def _complete(result: Result) -> list[Row]:
    return [row for row in result["rows"] if "seconds_per_step" in row]


def _failures(result: Result) -> str:
    failed = [f"`{row['arm']}` (exit code {row['exit_code']})" for row in result["rows"] if row["exit_code"] != 0]
    return f"\nFailed: {', '.join(failed)}.\n" if failed else ""


def _memory(row: Row) -> str:
    """Of the GPU of each process."""
    return ", ".join(f"{name} {gib(of['gpu_used_bytes'])}" for name, of in row["memory"].items())
