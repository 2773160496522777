"""Two GPUs with an engine on each, or with one engine over both: seconds by phase, tokens/s, memory of each GPU.

    python -m bench.programs.tensor_parallel [ARM...] [--steps N] [--smoke]

Arms (Qwen3's shapes, random weights in bfloat16, 16 prompts x 8 responses a step, colocated with two policy ranks):

    tp1, tp1-8b             two engines, each with the whole model and half of the prompts
    tp2, tp2-8b, tp2-14b    one engine of two processes (`rollout.tensorParallelSize: 2`), each with half of the weights
                            and KV heads

4B: responses of 4,096 tokens. 8B and 14B: 1,024 tokens, and for 14B `policy.optimizer.moments: bfloat16`.

Records one row for each arm in `bench/results/tensor_parallel.json`, after those that it already has. The first step is
not counted. `--smoke`: a tiny model on the CPU, with two processes of each role; asserts that both sizes of engine
complete and agree with the policy, and records nothing.
"""

from __future__ import annotations

from typing import Any

from bench.harness.run_arms import Arms
from rljob_testing.plan_accuracy.errors import Row
from rljob_testing.plan_accuracy.jobs import generating_job

SIZES = {"tp1": 1, "tp2": 2, "tp1-8b": 1, "tp2-8b": 2, "tp2-14b": 2}
"""`tensorParallelSize` of each arm."""
SMOKE_TOLERANCE = 1e-4
"""Largest difference between log-probabilities in float32."""


def spec_of(arm: str, steps: int, smoke: bool) -> dict[str, Any]:
    model = arm.partition("-")[2] or "4b"
    job = generating_job(model, steps, 16, 4096 if model == "4b" else 1024, smoke=smoke)
    policy: dict[str, Any] = {"gpusPerReplica": 2}
    if model == "14b":
        policy["optimizer"] = {"moments": "bfloat16"}
    return {"policy": policy, "rollout": {"tensorParallelSize": SIZES[arm]}} | job


def check_agreement(row: Row) -> None:
    assert max(row["metrics"]["logprob_diff_max"]) <= SMOKE_TOLERANCE, (
        f"engine and policy disagree in the arm {row['arm']}"
    )


if __name__ == "__main__":
    Arms(
        "tensor_parallel",
        spec_of,
        list(SIZES),
        "Qwen3-4B's shape with 128 responses of 4,096 tokens a step, Qwen3-8B's and 14B's with 1,024; random weights",
        steps=4,
        gpus=2,
        smoke_options=("--device", "cpu"),
        check_smoke=check_agreement,
        smoke_names=("tp1", "tp2"),
    ).main(__doc__)
