"""Two GPUs, used by both roles in turn or one by each: seconds by phase, tokens/s, idle share, memory of each GPU.

    python -m bench.programs.topologies [ARM...] [--steps N] [--smoke]

Arms (Qwen3's shapes with random weights in bfloat16; the memory plan decides where the optimizer's state is):

    colocated, colocated-8b           two policy ranks and two engines, a pair on each GPU
    disaggregated, disaggregated-8b   one policy rank on one GPU, one engine on the other
    overlapped, overlapped-8b         the same with `maxStaleness: 1`
    mixed, partial                    overlapped, with lengths from 1 to 4,000 tokens; without and with partial rollouts

0.6B: 32 prompts x 8 responses of 1,024 tokens a step. 8B: 16 prompts x 8 responses of 1,024 tokens. Mixed lengths: 0.6B
with so many ends of sequence in generation_config.json that a random model ends a response after 500 tokens on average.

Records one row for each arm in `bench/results/topologies.json`, after those that it already has. The first step is not
counted. The idle share of each GPU is measured (NVML). `--smoke`: a tiny model on any device; records nothing.
"""

from __future__ import annotations

from typing import Any

from bench.harness.run_arms import Arms, model_with_ends
from rljob_testing.plan_accuracy.jobs import generating_job

SPECS: dict[str, dict[str, Any]] = {
    "colocated": {
        "topology": "Colocated",
        "policy": {"gpusPerReplica": 2},
        "rollout": {"tensorParallelSize": 1},
    },
    "disaggregated": {"topology": "Disaggregated", "policy": {"gpusPerReplica": 1}, "rollout": {"gpusPerReplica": 1}},
}
SPECS["overlapped"] = SPECS["disaggregated"]
NAMES = [*SPECS, *(f"{arm}-8b" for arm in SPECS)]
MIXED = ("mixed", "partial")
PROMPTS = {"0.6b": 32, "8b": 16}
MEAN_LENGTH = 500
"""Tokens of a response of mixed length: they are distributed geometrically."""


def spec_of(arm: str, steps: int, smoke: bool) -> dict[str, Any]:
    kind, _, size = arm.partition("-")
    size = size or "0.6b"
    job = generating_job(size, steps, PROMPTS[size], 1024, smoke=smoke)
    algorithm = job["algorithm"]
    algorithm["maxStaleness"] = int(kind in ("overlapped", *MIXED))
    if kind in MIXED:
        del algorithm["ignoreEndOfSequence"]
        algorithm["maxResponseTokens"] = 16 if smoke else 4000
        model = model_with_ends("smoke" if smoke else size, 20 if smoke else MEAN_LENGTH)
        job["model"]["uri"] = f"file://{model}"
    if kind == "partial":
        algorithm["partialRolloutPrompts"] = 1 if smoke else 8
    return SPECS["overlapped" if kind in MIXED else kind] | job


if __name__ == "__main__":
    Arms(
        "topologies",
        spec_of,
        [*NAMES, *MIXED],
        "Qwen3-0.6B's shape with 256 responses of 1,024 tokens a step, Qwen3-8B's with 128; random weights",
        steps=6,
        gpus=2,
        smoke_names=[*SPECS, *MIXED],
    ).main(__doc__)
