"""Jobs with low-rank adapters and with an engine in 8 bits: seconds by phase, peak GPU memory, engine against policy.

    python -m bench.programs.adapters_and_8_bits [ARM...] [--steps N] [--smoke]

Arms (16 prompts x 8 responses of 1,024 tokens a step, random weights in bfloat16, rank 16 on all linear layers):

    8b             Qwen3-8B's shape, adapters
    8b-fp8         the same with `rollout.quantization: Fp8PerTensor`
    8b-fp8-block   the same with Fp8PerBlock
    8b-fp8-kv      the same with Fp8PerTensor and `kvCacheDtype: Fp8`
    8b-40gib       Qwen3-8B's shape, adapters, where another process holds all but 40 GiB of the GPU and the memory plan
                   is that of such a GPU; 64 responses of 512 tokens
    32b            Qwen3-32B's shape, adapters; its weights take 61 GiB of the model cache (`$XDG_CACHE_HOME/rljob`)

Records one row for each arm in `bench/results/adapters_and_8_bits.json`, after those that it has. The first step is
not counted. `--smoke`: a tiny model on any device; records nothing.
"""

from __future__ import annotations

from typing import Any

from bench.harness.run_arms import Arms
from rljob_memory.sizes import GIB
from rljob_testing.plan_accuracy.jobs import generating_job

ROLLOUTS: dict[str, dict[str, str]] = {
    "8b": {},
    "8b-fp8": {"quantization": "Fp8PerTensor"},
    "8b-fp8-block": {"quantization": "Fp8PerBlock"},
    "8b-fp8-kv": {"quantization": "Fp8PerTensor", "kvCacheDtype": "Fp8"},
    "8b-40gib": {},
    "32b": {},
}
"""`spec.rollout` of each arm."""
SMALL_CARD_BYTES = 40 * GIB


def spec_of(arm: str, steps: int, smoke: bool) -> dict[str, Any]:
    prompts, tokens = (8, 512) if arm == "8b-40gib" else (16, 1024)
    job = generating_job(arm.partition("-")[0], steps, prompts, tokens, smoke=smoke)
    lora = {"rank": 16, "alpha": 32, "export": "Adapter"}
    return job | {"policy": {"lora": lora}, "rollout": {} if smoke else ROLLOUTS[arm]}


if __name__ == "__main__":
    Arms(
        "adapters_and_8_bits",
        spec_of,
        list(ROLLOUTS),
        "Qwen3 shapes, random weights, 128 responses of 1,024 tokens a step (40gib: 64 of 512), rank 16",
        steps=4,
        card_bytes=lambda arm: SMALL_CARD_BYTES if arm == "8b-40gib" else None,
        smoke_names=["8b"],
    ).main(__doc__)
