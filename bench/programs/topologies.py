"""Two GPUs, used by both roles in turn or one by each: seconds by phase, tokens/s, idle share, memory of each GPU.

    python -m bench.programs.topologies [ARM...] [--steps N] [--smoke]

Arms (Qwen3's shapes with random weights in bfloat16; the memory plan decides where the optimizer's state is):

    colocated, colocated-8b           two policy ranks and two engines, a pair on each GPU
    disaggregated, disaggregated-8b   one policy rank on one GPU, one engine on the other
    overlapped, overlapped-8b         the same with `maxStaleness: 1`

0.6B: 32 prompts x 8 responses of 1,024 tokens a step. 8B: 16 prompts x 8 responses of 1,024 tokens.

Records one row for each arm in `bench/results/topologies.json`, after those that it already has. The first step is not
counted. The idle share of each GPU is measured (NVML); that of each role follows from the seconds of the phases.
`--smoke`: a tiny model on any device; records nothing.
"""

from __future__ import annotations

from typing import Any

from bench.harness.run_arms import SHAPES, Arms, Row, generating_job

SPECS: dict[str, dict[str, Any]] = {
    "colocated": {"topology": "Colocated", "policy": {"gpusPerReplica": 2}},
    "disaggregated": {"topology": "Disaggregated", "policy": {"gpusPerReplica": 1}, "rollout": {"gpusPerReplica": 1}},
}
SPECS["overlapped"] = SPECS["disaggregated"]
STALENESS = {"overlapped": 1}
PROMPTS = {"0.6b": 32, "8b": 16}
SMOKE_SHAPE = "hidden=64&layers=2&heads=4&kvHeads=2&headDim=32&tied=false"
BUSY_PHASES: dict[str, dict[str, tuple[str, ...]]] = {
    "colocated": {"policy": ("rollout", "update", "sync"), "rollout": ("rollout", "update", "sync")},
    "disaggregated": {"policy": ("update", "sync"), "rollout": ("rollout", "sync")},
    "overlapped": {"policy": ("update", "sync")},
}
"""Phases in which the GPU of a process of this role works. Overlapped: `rollout` is only the wait for the engine."""
NAMES = [*SPECS, *(f"{arm}-8b" for arm in SPECS)]


def parts_of(arm: str) -> tuple[str, str]:
    """Kind of the arm, and size of its model."""
    kind, _, size = arm.partition("-")
    return kind, size or "0.6b"


def spec_of(arm: str, steps: int, smoke: bool) -> dict[str, Any]:
    kind, size = parts_of(arm)
    job = (
        generating_job(SMOKE_SHAPE, steps, prompts=4, group_size=4, response_tokens=16)
        if smoke
        else generating_job(SHAPES[size], steps, prompts=PROMPTS[size], group_size=8, response_tokens=1024)
    )
    job["algorithm"]["maxStaleness"] = STALENESS.get(kind, 0)
    return SPECS[kind] | job


def idle_shares(arm: str, row: Row) -> Row:
    if "seconds_per_step" not in row:
        return {}
    seconds, total = row["seconds_by_phase"], row["seconds_per_step"]
    busy_phases = BUSY_PHASES[parts_of(arm)[0]]
    return {
        "idle_share": {
            role: 1 - sum(seconds.get(phase, 0.0) for phase in busy) / total for role, busy in busy_phases.items()
        }
    }


if __name__ == "__main__":
    Arms(
        "topologies",
        spec_of,
        NAMES,
        "Qwen3-0.6B's shape with 256 responses of 1,024 tokens a step, Qwen3-8B's with 128; random weights",
        steps=6,
        gpus=2,
        figures=idle_shares,
        smoke_names=list(SPECS),
    ).main(__doc__)
