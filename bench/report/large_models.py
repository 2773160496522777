"""The blocks on large models on one GPU: full fine-tuning, adapters and 8-bit engines."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from bench.report.markdown import Result, gib, source, table

_PHASES = ("rollout", "update", "sync")

_MODELS = {
    "0.6b": "0.6B, 512 tokens",
    "0.6b-padded": "0.6B, 512 tokens, padded sequences",
    "0.6b-trl": "0.6B, 512 tokens, TRL 1.16, float32 weights",
    "4b": "4B",
    "8b": "8B",
    "8b-padded": "8B, padded sequences",
    "8b-cold": "8B, started with empty compile caches, second step",
    "8b-warm": "8B, started with warm compile caches",
    "8b-fp8": "8B, rollouts in 8 bits",
    "8b-bfloat16": "8B, bfloat16 moments",
    "8b-int8": "8B, int8 moments",
    "8b-earlier": "8B, earlier version",
    "8b-trl": "8B, TRL 1.16, bfloat16 weights only",
    "8b-trl-float32": "8B, TRL 1.16, float32 weights, out of memory in the second step",
    "8b-80gib": "8B, 79 GiB of the GPU, second step",
    "14b": "14B, bfloat16 moments",
}
_WITH_ADAPTERS = {
    "8b": "8B",
    "8b-fp8": "8B, Fp8PerTensor",
    "8b-fp8-block": "8B, Fp8PerBlock",
    "8b-fp8-kv": "8B, Fp8PerTensor, KV cache in 8 bits",
    "8b-40gib": "8B in 40 GiB",
    "8b-40gib-fp8": "8B in 40 GiB, Fp8PerTensor",
    "32b": "32B",
    "32b-fp8": "32B, Fp8PerTensor",
}


def block(result: Result) -> str:
    """Seconds and memory by model. An arm without steps after the warm-up shows its last step."""
    head = ("model", "s/step", "rollout", "update", "sync", "peak, policy", "peak, GPU", "optimizer", "micro-batch")
    rows = [_row(arm) for arm in sorted(result["rows"], key=lambda arm: list(_MODELS).index(arm["arm"]))]
    return f"{source(result)}\n{table((*head, 'start-up', 'first step'), rows)}"


def _row(arm: dict[str, Any]) -> tuple[str, ...]:
    phases, plan = arm.get("seconds_by_phase", {}), arm.get("plan")
    # TRL's engine is in the same process, where torch counts its memory although it sleeps.
    of_policy = None if "-trl" in arm["arm"] else arm.get("torch_peak_reserved_bytes")
    # Of the whole GPU, with the ballast that another process holds.
    whole_gpu = None if arm["arm"].endswith("-80gib") else arm.get("device_peak_bytes")
    return (
        _MODELS[arm["arm"]],
        f"{arm.get('seconds_per_step', arm['all_seconds'][-1]):.1f}",
        *(f"{phases[phase]:.1f}" if phase in phases else "–" for phase in _PHASES),
        *("–" if peak is None else gib(peak) for peak in (of_policy, whole_gpu)),
        "–" if plan is None else "host" if plan["optimizerOffload"] else "GPU",
        "–" if plan is None else f"{plan['microBatchTokens']:,}",
        f"{arm['start_up_seconds']:.0f} s",
        f"{arm['all_seconds'][0]:.0f} s",
    )


def adapters(result: Result) -> str:
    """Seconds and memory by arm. The memory of the whole GPU is left out: in some arms, another process holds most of
    it."""
    head = ("model", "s/step", *_PHASES, "peak, policy", "KV cache", "start-up", "log-prob. diff.", "importance weight")
    rows = [_row_with_adapters(arm) for arm in result["rows"]]
    return f"{source(result)}{result['note']}.\n\n{table(head, rows)}"


def rounding_to_8_bits(result: Result) -> str:
    rows = [(row["model"], *(f"{row[name]:.2f}" for name in ("bfloat16", "8 bits"))) for row in result["rows"]]
    return f"{source(result)}{result['note']}.\n\n{table(('model', 'bfloat16', '8 bits'), rows)}"


def _row_with_adapters(arm: dict[str, Any]) -> tuple[str, ...]:
    name = _WITH_ADAPTERS[arm["arm"]]
    if "seconds_per_step" not in arm:
        return (f"{name}: failed", *"–" * 9)
    return (
        name,
        f"{arm['seconds_per_step']:.1f}",
        *(f"{arm['seconds_by_phase'][phase]:.1f}" for phase in _PHASES),
        gib(arm["torch_peak_reserved_bytes"]),
        gib(arm["plan"]["kvCache"]),
        f"{arm['start_up_seconds']:.0f} s",
        *(f"{fmean(arm['metrics'][name]):.2f}" for name in ("logprob_diff_mean", "importance_weight_mean")),
    )
