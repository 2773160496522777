"""Blocks on rollouts: the cost of log-probabilities, and the queue of prompts."""

from __future__ import annotations

from bench.report.markdown import Result, source, table

_LOGPROBS = {"none": "none", "public": "vLLM's path", "fast": "fast path"}
_ARMS = {"shares": "fixed shares, then rewards", "queue": "queue, rewards meanwhile"}


def logprobs(result: Result) -> str:
    """One row per way: processor and wall time of a decoding step."""
    rows = [
        (
            _LOGPROBS[row["arm"]],
            f"{row['processor_ms']:.1f}",
            f"{row['processor_ms_median']:.1f}",
            f"{row['ms']:.1f}",
            f"{row['ms_median']:.1f}",
        )
        for row in result["rows"]
    ]
    head = ("log-probabilities", "processor ms, least", "median", "wall ms, least", "median")
    sequences = result["rows"][0]["sequences"]
    return f"{source(result)}A decoding step of {sequences} sequences: {result['note']}.\n\n{table(head, rows)}"


def queue(result: Result) -> str:
    """One row per job and version: seconds by phase."""
    rows = [
        (
            row["job"],
            _ARMS[row["arm"]],
            f"{row['seconds_by_phase']['rollout']:.2f}",
            f"{row['seconds_by_phase']['reward']:.2f}",
            f"{row['seconds_per_step']:.2f}",
            f"{row['least_seconds_per_step']:.2f}",
        )
        for row in result["rows"]
    ]
    head = ("job", "version", "rollout s", "reward s", "step s", "step s, least")
    return f"{source(result)}{result['note'].capitalize()}.\n\n{table(head, rows)}"


def queue_steps(result: Result) -> str:
    """One row per number of engines and groups."""
    ways = ("shares", "queue", "queue_with_estimates", "queue_with_means")
    rows = [
        (row["engines"], row["groups"], row["concurrent_sequences"], *(f"{row[way]:.2f}" for way in ways))
        for row in result["rows"]
    ]
    head = ("engines", "groups", "sequences at once", "shares", "queue, lengths unknown", "estimates", "means known")
    return f"{source(result, versions=False)}*{result['note'].capitalize()}.*\n\n{table(head, rows)}"
