"""The memory of a configuration of TRL itself: its options as pinned settings, and what its state takes.

TRL (1.16) trains with transformers' Trainer: layers that are not compiled, float32 weights that autocast casts, or 16
bits alone; log-probabilities in tiles; and vLLM, if it is in the same process, with a share of the GPU's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rljob_api.memory_plan import MemorySettings
from rljob_client.errors import BadInput
from rljob_memory.budget import Setup, gpu_budget
from rljob_memory.plan import first_plan
from rljob_memory.sizes import MIB

_TILE_TOKENS = 384
"""Size of a chunk of logits that takes as much as TRL's tiles: 1.5 GiB with a vocabulary of 151,936."""
_16_BIT = ("bfloat16", "float16", "auto")
"""Values of `dtype`, which is float32 by default; `auto`: that of the checkpoint."""


def is_colocated(options: Mapping[str, Any]) -> bool:
    """True if TRL runs vLLM in its own process, on the same GPUs."""
    return _is_true(options, "use_vllm", default=False) and options.get("vllm_mode", "colocate") == "colocate"


def as_configured(options: Mapping[str, Any], setup: Setup) -> tuple[MemorySettings, Setup]:
    """The memory settings that the options of a colocated TRL stand for, and the setup with TRL's state. Nothing is
    `Auto`. Raises `BadInput`."""
    is_16_bit = str(options.get("dtype", options.get("torch_dtype"))) in _16_BIT
    state: dict[str, Any] = {"casts_weights": not is_16_bit, "keeps_cache": True}
    if is_16_bit:
        state |= {"master_bytes": 2, "moment_bytes": 2}
    hardware = replace(setup.hardware, layers_compiled=False)
    setup = replace(setup.with_work(**state), hardware=hardware)
    responses = _number(options, "per_device_train_batch_size", default=8, most=1 << 20)
    settings = {
        "microBatchTokens": max(int(responses), 1) * setup.work.max_sequence_tokens,
        "logprobChunkTokens": _TILE_TOKENS,
        "activationCheckpointing": _switch(_is_true(options, "gradient_checkpointing", default=True)),
        "optimizerOffload": "Disabled",
        "policyOffload": "Disabled",
        "rolloutSleep": "Level2" if _is_true(options, "vllm_enable_sleep_mode", default=False) else "Disabled",
    }
    share = _number(options, "vllm_gpu_memory_utilization", default=0.3, most=1)
    settings["kvCache"] = f"{_kv_cache_bytes(settings, setup, share) // MIB}Mi"
    return MemorySettings.model_validate(settings), setup


def _kv_cache_bytes(settings: Mapping[str, Any], setup: Setup, share: float) -> int:
    """The rest of the engine's share of the GPU, at least 64 MiB. CUDA graphs and the activations of a prefill come on
    top of the share: with them, the peaks of TRL in bench/results/large_models.json and h100/large_models.json are
    within 1 %."""
    plan = first_plan(MemorySettings.model_validate(settings), setup)
    predicted = gpu_budget(setup, plan)
    others = sum(predicted.bytes_of(use, "gpu") for use in ("engine's weights", "engine's context"))
    return max(int(share * setup.hardware.device_memory_bytes) - others, 64 * MIB)


def _is_true(options: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """The value of a switch, which is text in a script."""
    return str(options.get(name, default)).lower() in ("true", "1", "yes")


def _number(options: Mapping[str, Any], name: str, *, default: float, most: float) -> float:
    try:
        value = float(options.get(name, default))
    except (TypeError, ValueError):
        value = -1.0
    if not 0 < value <= most:
        raise BadInput(f"expected a number up to {most:g} as {name}, found {options[name]!r}; write its value")
    return value


def _switch(is_on: bool) -> str:
    return "Enabled" if is_on else "Disabled"
