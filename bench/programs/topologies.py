"""Two GPUs, used by both roles in turn or one by each: seconds by phase, tokens/s, idle share, memory of each GPU.

    python -m bench.programs.topologies [ARM...] [--steps N] [--smoke]

Arms (Qwen3-0.6B's shape, random weights in bfloat16, 32 prompts x 8 responses of 1,024 tokens a step):

    colocated       two policy ranks and two engines, a pair on each GPU
    disaggregated   one policy rank on one GPU, one engine on the other
    overlapped      the same with `maxStaleness: 1`

Records one row for each arm in `bench/results/topologies.json`, after those that it already has. The first step of each
arm is warm-up and is not counted. The memory of the GPU of the engine is that of a GPU with a policy module (colocated)
and of one without (disaggregated). `--smoke`: a tiny model on any device; records nothing.
"""

from __future__ import annotations

from typing import Any

from bench.harness.run_arms import Arms, generating_job

SPECS: dict[str, dict[str, Any]] = {
    "colocated": {"topology": "Colocated", "policy": {"gpusPerReplica": 2}},
    "disaggregated": {"topology": "Disaggregated", "policy": {"gpusPerReplica": 1}, "rollout": {"gpusPerReplica": 1}},
}
SPECS["overlapped"] = SPECS["disaggregated"]
STALENESS = {"overlapped": 1}
SHAPE = "hidden=1024&intermediate=3072&layers=28&heads=16&kvHeads=8&headDim=128&vocabulary=151936&tied=true"
SMOKE_SHAPE = "hidden=64&layers=2&heads=4&kvHeads=2&headDim=32&tied=false"
BUSY_PHASES: dict[str, dict[str, tuple[str, ...]]] = {
    "colocated": {"policy": ("rollout", "update", "sync"), "rollout": ("rollout", "update", "sync")},
    "disaggregated": {"policy": ("update", "sync"), "rollout": ("rollout", "sync")},
    "overlapped": {"policy": ("update", "sync")},
}
"""Phases in which the GPU of a process of this role works. Overlapped: `rollout` is only the wait for the engine."""


def spec_of(arm: str, steps: int, smoke: bool) -> dict[str, Any]:
    job = (
        generating_job(SMOKE_SHAPE, steps, prompts=4, group_size=4, response_tokens=16)
        if smoke
        else generating_job(f"{SHAPE}&dtype=bfloat16", steps, prompts=32, group_size=8, response_tokens=1024)
    )
    job["algorithm"]["maxStaleness"] = STALENESS.get(arm, 0)
    return SPECS[arm] | job


def idle_shares(arm: str, _steps: list[dict[str, Any]], found: dict[str, Any]) -> dict[str, Any]:
    seconds, total = found["seconds_by_phase"], found["seconds_per_step"]
    return {
        "idle_share": {
            role: 1 - sum(seconds.get(phase, 0.0) for phase in busy) / total for role, busy in BUSY_PHASES[arm].items()
        }
    }


if __name__ == "__main__":
    Arms(
        "topologies",
        list(SPECS),
        spec_of,
        idle_shares,
        "Qwen3-0.6B's shape, random weights, 256 responses of 1,024 tokens a step",
        steps=6,
    ).main(__doc__)
