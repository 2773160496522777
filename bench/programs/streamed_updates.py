"""Updates that begin while groups of their step are generated, and after all are complete: seconds by phase.

    python -m bench.programs.streamed_updates [ARM...] [--steps N] [--smoke]

Arms (Qwen3's shapes, random weights in bfloat16, 24 prompts of 1,000 tokens × 16 responses a step; the lengths of
responses are distributed geometrically, with a mean of 400 and at most 1,600 tokens):
    1.7b, 1.7b-streamed        policy and engine on a GPU each
    4b, 4b-streamed            the same
    shared, shared-streamed    0.6B, policy and engine on one GPU at the same time
    cpu, cpu-streamed          a small model, policy and engine on a core each: 16 prompts of 40 tokens × 8 responses of
                               60 tokens on average

Records one row for each arm in `bench/results/streamed_updates.json`, after those that it already has. The first step
is not counted. `--smoke`: a tiny model on any device; records nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.harness.run_arms import Arms, model_with_ends
from rljob_testing.plan_accuracy.errors import Row
from rljob_testing.plan_accuracy.jobs import generating_job
from rljob_trainer.hardware import visible_gpus
from rljob_trainer.runtime.streamed_update import VARIABLE

PROMPTS, GROUP_SIZE, PROMPT_TOKENS, RESPONSE_TOKENS, MEAN_TOKENS = 24, 16, 1000, 1600, 400
KINDS = ("1.7b", "4b", "shared", "cpu")
OF_CPU = {
    "promptsPerStep": 16,
    "groupSize": 8,
    "maxPromptTokens": 40,
    "maxResponseTokens": 192,
    "ignoreEndOfSequence": False,
}


def spec_of(arm: str, steps: int, smoke: bool) -> dict[str, Any]:
    kind = arm.removesuffix("-streamed")
    size = "smoke" if smoke else "0.6b" if kind == "shared" else kind
    job = generating_job(size, steps, PROMPTS, RESPONSE_TOKENS, PROMPT_TOKENS, smoke=smoke)
    if kind == "cpu" and not smoke:
        job["model"]["uri"] = f"file://{model_with_ends(size, 60)}"
        job["algorithm"] |= OF_CPU
        rollout = {"maxConcurrentSequences": 32, "gpusPerReplica": 0}
        return job | {"topology": "Disaggregated", "policy": {"gpusPerReplica": 0}, "rollout": rollout}
    job["model"]["uri"] = f"file://{model_with_ends(size, 20 if smoke else MEAN_TOKENS)}"
    job["algorithm"] |= {"ignoreEndOfSequence": False} | ({} if smoke else {"groupSize": GROUP_SIZE})
    job["rollout"] = {"maxConcurrentSequences": 8} if smoke else {}
    if smoke:
        job["algorithm"] |= {"maxResponseTokens": 80, "maxPromptTokens": 40}
    if kind == "shared":
        return job | {"memory": {"rolloutSleep": "Disabled"}}
    gpus = int(not smoke)
    job["rollout"] |= {"gpusPerReplica": gpus}
    return job | {"topology": "Disaggregated", "policy": {"gpusPerReplica": gpus}}


def variables_of(arm: str) -> Mapping[str, str]:
    return {VARIABLE: str(int(arm.endswith("-streamed")))}


def check_smoke(row: Row) -> None:
    streamed = [share for share in row["metrics"]["streamed_groups"] if share]
    assert bool(streamed) == row["arm"].endswith("-streamed"), f"streamed shares of groups: {streamed}"


if __name__ == "__main__":
    Arms(
        "streamed_updates",
        spec_of,
        [name for kind in KINDS for name in (kind, f"{kind}-streamed")],
        "random weights; a step: 384 responses of up to 1,600 tokens, prompts of 1,000; cpu: 128 of up to 192",
        steps=6,
        gpus=len(visible_gpus()),
        variables=variables_of,
        smoke_names=["1.7b", "1.7b-streamed", "shared-streamed"],
        check_smoke=check_smoke,
    ).main(__doc__)
