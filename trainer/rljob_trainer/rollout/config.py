"""What a rollout engine is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """Settings of one engine.

    `model_dir` gives architecture and tokenizer; the weights come from the policy. `kv_cache_bytes`: size of the KV
    cache, fixed, so that it is the same in every attempt. `max_model_len`: prompt and response together, in tokens.
    `sleep_level`: what vLLM's sleep frees on a GPU (1: the weights go to host memory, 2: they are dropped; 0: the
    engine stays awake). `ignore_eos`: every response has `max_response_tokens` tokens. `engine_args`: further
    arguments of `vllm.LLM`.
    """

    model_dir: Path
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    max_response_tokens: int
    sleep_level: Literal[0, 1, 2] = 0
    temperature: float = 1.0
    ignore_eos: bool = False
    seed: int = 0
    engine_args: dict[str, Any] = field(default_factory=dict)
