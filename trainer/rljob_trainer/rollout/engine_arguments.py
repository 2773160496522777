"""From a `RolloutConfig` to the arguments of `vllm.LLM`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rljob_trainer.errors import BadInput
from rljob_trainer.rollout.config import RolloutConfig

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
