"""Two or four GPUs with an engine on each, or with engines over several: seconds by phase, tokens/s, GPU memory.

    python -m bench.programs.tensor_parallel [ARM...] [--steps N] [--smoke]

Arms (Qwen3's shapes, random weights in bfloat16, 16 prompts x 8 responses a step), colocated with a policy rank on each
GPU that this process sees:

    tp1, tp1-8b, tp1-14b             an engine on each GPU, with the whole model and its part of the prompts
    tp2, tp2-8b, tp2-14b             engines of two processes (`rollout.tensorParallelSize: 2`), each with half of the
                                     weights and KV heads
    tp4-8b, tp4-14b                  an engine of four processes

4B: responses of 4,096 tokens. 8B and 14B: 1,024 tokens, and for 14B on two GPUs `policy.optimizer.moments: bfloat16`.

Records one row for each arm in `bench/results/tensor_parallel.json`, on four GPUs in `tensor_parallel_4.json`, after
those that it already has. The first two steps are not counted. `--smoke`: a tiny model on the CPU, with two processes
of each role; asserts that both sizes of engine complete and agree with the policy, and records nothing.
"""

from __future__ import annotations

from typing import Any

from bench.harness.run_arms import Arms
from rljob_testing.plan_accuracy.errors import Row
from rljob_testing.plan_accuracy.jobs import generating_job
from rljob_trainer.hardware import visible_gpus

ON_TWO = ("tp1", "tp2", "tp1-8b", "tp2-8b", "tp2-14b")
ON_FOUR = ("tp1-8b", "tp2-8b", "tp4-8b", "tp1-14b", "tp2-14b", "tp4-14b")
GPUS = 4 if len(visible_gpus()) >= 4 else 2
SMOKE_TOLERANCE = 1e-4
"""Largest difference between log-probabilities in float32."""


def spec_of(arm: str, steps: int, smoke: bool) -> dict[str, Any]:
    engine, _, model = arm.partition("-")
    model = model or "4b"
    job = generating_job(model, steps, 16, 4096 if model == "4b" else 1024, smoke=smoke)
    policy: dict[str, Any] = {"gpusPerReplica": GPUS}
    if model == "14b" and GPUS == 2:
        policy["optimizer"] = {"moments": "bfloat16"}
    return {"policy": policy, "rollout": {"tensorParallelSize": int(engine.removeprefix("tp"))}} | job


def check_agreement(row: Row) -> None:
    assert max(row["metrics"]["logprob_diff_max"]) <= SMOKE_TOLERANCE, (
        f"engine and policy disagree in the arm {row['arm']}"
    )


if __name__ == "__main__":
    Arms(
        "tensor_parallel_4" if GPUS == 4 else "tensor_parallel",
        spec_of,
        ON_FOUR if GPUS == 4 else ON_TWO,
        "Qwen3-4B's shape with 128 responses of 4,096 tokens a step, Qwen3-8B's and 14B's with 1,024; random weights",
        steps=12,
        warm_up_steps=2,
        gpus=GPUS,
        smoke_options=("--device", "cpu"),
        check_smoke=check_agreement,
        smoke_names=("tp1", "tp2"),
    ).main(__doc__)
