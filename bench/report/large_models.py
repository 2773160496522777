"""The block on full fine-tuning of large models on one GPU."""

from __future__ import annotations

from bench.report.markdown import Result, gib, source, table

_MODELS = {
    "0.6b": "0.6B, 512 tokens",
    "8b": "8B",
    "8b-80gib": "8B, 79 GiB of the GPU, second step",
    "14b": "14B, bfloat16 moments",
}


def block(result: Result) -> str:
    """Seconds and memory by model. An arm without steps after the warm-up shows its last step."""
    rows = []
    for row in result["rows"]:
        phases = row.get("seconds_by_phase", {})
        peak = row.get("torch_peak_reserved_bytes")
        rows.append(
            (
                _MODELS.get(row["arm"], row["arm"]),
                f"{row.get('seconds_per_step', row['all_seconds'][-1]):.1f}",
                *(f"{phases[phase]:.1f}" if phase in phases else "–" for phase in ("rollout", "update", "sync")),
                "–" if peak is None else gib(peak),
                "host" if row["plan"]["optimizerOffload"] else "GPU",
                f"{row['plan']['microBatchTokens']:,}",
                f"{row['start_up_seconds']:.0f} s",
                f"{row['all_seconds'][0]:.0f} s",
            )
        )
    head = ("model", "s/step", "rollout", "update", "sync", "peak, policy", "optimizer", "micro-batch", "start-up")
    return f"{source(result)}\n{table((*head, 'first step'), rows)}"
