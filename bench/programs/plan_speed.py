"""Seconds of a step under the memory plan's own choices, compared with pinned settings.

    python -m bench.programs.plan_speed [ARM...] [--steps N] [--smoke]

Arms (Qwen3's shapes, random weights in bfloat16, 16 prompts × 8 responses of 1,024 tokens a step), on one GPU:
    8b-offload     `optimizerOffload: Enabled`: the optimizer's state streams through the GPU
    8b             the plan decides which part of it does
    4b-offload     the same with 4B, for a GPU of 80 GB
    4b             the plan decides
On four GPUs, with `moments: bfloat16` and `tensorParallelSize: 4`:
    32b-kept       micro-batches of 1,040 tokens whose activations are kept, and the state on the GPUs
    32b            the plan decides

Records one row for each arm in `bench/results/plan_speed.json` (32B: `plan_speed_32b.json`), with predicted and
measured seconds and GPU memory by phase. The first two steps are not counted. A model in `runs/models/8b` (4b, 32b) is
used instead of one that this program writes. `--smoke`: a tiny model on any device; records nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.harness.run_arms import Arms
from rljob_testing.plan_accuracy.jobs import generating_job
from rljob_trainer.hardware import visible_gpus

PINNED: dict[str, dict[str, Any]] = {
    "8b-offload": {"optimizerOffload": "Enabled"},
    "8b": {},
    "4b-offload": {"optimizerOffload": "Enabled"},
    "4b": {},
    "32b-kept": {"activationCheckpointing": "Disabled", "microBatchTokens": 1040, "optimizerOffload": "Disabled"},
    "32b": {},
}
MODELS = Path("runs") / "models"
OF_32B = {
    "policy": {"gpusPerReplica": 4, "optimizer": {"moments": "bfloat16"}},
    "rollout": {"tensorParallelSize": 4},
}


def spec_of(arm: str, steps: int, smoke: bool) -> dict[str, Any]:
    size = arm.partition("-")[0]
    job = generating_job(size, steps, 16, 1024, smoke=smoke)
    if not smoke and (prepared := MODELS / size).is_dir():
        job["model"] = {"uri": f"file://{prepared.absolute()}"}
    return job | {"memory": PINNED[arm]} | (OF_32B if size == "32b" and not smoke else {})


if __name__ == "__main__":
    on_four = len(visible_gpus()) >= 4
    Arms(
        "plan_speed_32b" if on_four else "plan_speed",
        spec_of,
        ["32b-kept", "32b"] if on_four else ["8b-offload", "8b", "4b-offload", "4b"],
        "Qwen3 shapes, random weights, 128 responses of 1,024 tokens a step; pinned settings, and those of the plan",
        steps=8,
        warm_up_steps=2,
        gpus=4 if on_four else 1,
        smoke_names=["8b"],
    ).main(__doc__)
