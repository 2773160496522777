"""What a rollout engine is made of."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rljob_trainer.errors import BadInput


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


# With the KV cache given in bytes, this fraction only decides whether vLLM starts at all: free memory must exceed it,
# and the policy is on the same GPU already.
_START_CHECK_FRACTION = 0.01


def engine_arguments(config: RolloutConfig, vllm_arguments: Collection[str]) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`, without the weight-transfer configuration.

    `vllm_arguments`: what the installed vLLM accepts. Raises `BadInput` where `config.engine_args` names something
    else, or something that the trainer depends on.
    """
    fixed = _fixed_arguments(config)
    for name in config.engine_args:
        if name in fixed or name == "weight_transfer_config":
            raise BadInput(f"rollout.engineArgs may not set {name}: the trainer depends on it; remove it")
        if name not in vllm_arguments:
            raise BadInput(f"rollout.engineArgs sets {name}, which is no engine argument of the installed vLLM")
    return _default_arguments(config) | config.engine_args | fixed


def _fixed_arguments(config: RolloutConfig) -> dict[str, Any]:
    return {
        "model": str(config.model_dir),
        # The first sync brings the weights: reading the checkpoint here would be work and host memory for nothing.
        "load_format": "dummy",
        "dtype": config.dtype,
        "seed": config.seed,
        "max_model_len": config.max_model_len,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "enable_sleep_mode": config.device == "cuda" and config.sleep_level > 0,
        # The policy computes log-probabilities of logits / temperature; raw ones would be off wherever that is not 1.
        "logprobs_mode": "processed_logprobs",
    }


def _default_arguments(config: RolloutConfig) -> dict[str, Any]:
    common = {"max_num_seqs": config.max_num_seqs, "disable_log_stats": True}
    if config.device == "cpu":
        return common | {"enforce_eager": True}
    return common | {"gpu_memory_utilization": _START_CHECK_FRACTION}


def engine_environment(device: str) -> dict[str, str]:
    """What must be set before vLLM is imported on `device` ("cpu" or "cuda"), but for the number of threads."""
    common = {
        # The engine runs in the actor's own process: one process less, and weights arrive without another copy.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cuda":
        return common
    return common | {
        # enforce_eager alone still compiles a few functions with a C++ compiler on the first request.
        "TORCH_COMPILE_DISABLE": "1",
        # Policy and engine take turns on the same cores; threads pinned to some would stand in each other's way.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
