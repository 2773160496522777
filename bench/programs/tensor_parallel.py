"""Two GPUs with an engine on each, or with one engine over both: seconds by phase, tokens/s, memory of each GPU.

    python -m bench.programs.tensor_parallel [ARM...] [--steps N] [--smoke]

Arms (Qwen3-4B's shape, random weights in bfloat16, 16 prompts x 8 responses of 4,096 tokens a step, colocated with two
policy ranks):

    tp1    two engines, each with the whole model and half of the prompts
    tp2    one engine of two processes (`rollout.tensorParallelSize: 2`), each with half of the weights and KV heads

Records one row for each arm in `bench/results/tensor_parallel.json`, after those that it already has. The first step of
each arm is warm-up and is not counted. Each row has the largest difference between the log-probabilities of engine and
policy, and the KV cache that the plan has for each GPU. `--smoke`: a tiny model on the CPU, with two processes of each
role; asserts that both arms complete and agree with the policy, and records nothing.
"""

from __future__ import annotations

from typing import Any

from bench.harness.run_arms import Arms, generating_job

SIZES = {"tp1": 1, "tp2": 2}
"""`tensorParallelSize` of each arm."""
SHAPE = "hidden=2560&intermediate=9728&layers=36&heads=32&kvHeads=8&headDim=128&vocabulary=151936&tied=true"
SMOKE_SHAPE = "hidden=64&layers=2&heads=4&kvHeads=2&headDim=32&tied=false&initializerRange=0.1"
SMOKE_TOLERANCE = 1e-4
"""Between log-probabilities in float32."""


def spec_of(arm: str, steps: int, smoke: bool) -> dict[str, Any]:
    job = (
        generating_job(SMOKE_SHAPE, steps, prompts=4, group_size=4, response_tokens=16)
        if smoke
        else generating_job(f"{SHAPE}&dtype=bfloat16", steps, prompts=16, group_size=8, response_tokens=4096)
    )
    return {"policy": {"gpusPerReplica": 2}, "rollout": {"tensorParallelSize": SIZES[arm]}} | job


def agreement(_arm: str, steps: list[dict[str, Any]], _found: dict[str, Any]) -> dict[str, Any]:
    return {"logprob_diff_max": max(step["metrics"]["logprob_diff_max"] for step in steps)}


def check_agreement(row: dict[str, Any]) -> None:
    assert row["logprob_diff_max"] <= SMOKE_TOLERANCE, f"engine and policy disagree in the arm {row['arm']}"


if __name__ == "__main__":
    Arms(
        "tensor_parallel",
        list(SIZES),
        spec_of,
        agreement,
        "Qwen3-4B's shape, random weights, 128 responses of 4,096 tokens a step",
        steps=4,
        smoke_options=("--device", "cpu"),
        check_smoke=check_agreement,
    ).main(__doc__)
