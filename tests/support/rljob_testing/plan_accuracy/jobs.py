"""Jobs with random weights in the shapes of Qwen3, for comparisons."""

from __future__ import annotations

from typing import Any

GROUP_SIZE = 8
"""Responses to each prompt."""
SHORT_PROMPT = 16
"""Limit on the tokens of a prompt of the task `digits`."""
LONG_PROMPTS = "prompts.jsonl"

_COMMON = "kvHeads=8&headDim=128&vocabulary=151936&maxPositions=40960&dtype=bfloat16"
SHAPES = {
    "smoke": "hidden=64&layers=2&heads=4&kvHeads=2&headDim=32&tied=false&initializerRange=0.1",
    "cpu": "hidden=256&intermediate=1024&layers=6&heads=8&kvHeads=4&headDim=32&tied=false",
    "0.6b": f"hidden=1024&intermediate=3072&layers=28&heads=16&tied=true&{_COMMON}",
    "1.7b": f"hidden=2048&intermediate=6144&layers=28&heads=16&tied=true&{_COMMON}",
    "4b": f"hidden=2560&intermediate=9728&layers=36&heads=32&tied=true&{_COMMON}",
    "8b": f"hidden=4096&intermediate=12288&layers=36&heads=32&tied=false&{_COMMON}",
    "14b": f"hidden=5120&intermediate=17408&layers=40&heads=40&tied=false&{_COMMON}",
    "32b": f"hidden=5120&intermediate=25600&layers=64&heads=64&tied=false&{_COMMON}",
}


def generating_job(
    size: str, steps: int, prompts: int, response_tokens: int, prompt_tokens: int = SHORT_PROMPT, *, smoke: bool
) -> dict[str, Any]:
    """The part of a spec that the arms share: random weights of Qwen3's `size`, 8 responses to each prompt, of exactly
    `response_tokens`. `smoke`: a tiny job instead. Prompts longer than a digit have exactly `prompt_tokens`."""
    group_size = GROUP_SIZE
    if smoke:
        size, prompts, group_size, response_tokens = "smoke", 4, 4, 16
    has_long_prompts = prompt_tokens > SHORT_PROMPT
    task = {"name": "jsonl", "args": {"path": LONG_PROMPTS}} if has_long_prompts else {"name": "digits"}
    return {
        "model": {"uri": f"random://qwen3?{SHAPES[size]}"},
        "task": task | {"reward": "spread_rewards:spread"},
        "algorithm": {
            "steps": steps,
            "promptsPerStep": prompts,
            "groupSize": group_size,
            "maxPromptTokens": prompt_tokens,
            "maxResponseTokens": response_tokens,
            "ignoreEndOfSequence": True,
            "learningRate": 1.0e-5,
        },
        "checkpoint": {"everySteps": 1000},
    }
