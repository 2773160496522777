"""Adapter for TRL, and for every other trainer that is configured by transformers' TrainingArguments.

The global batch stays the same: smaller micro-batches are accumulated more often. So do the batch that GRPO generates
at once and, with it, the groups of completions that advantages are computed over.
"""

from __future__ import annotations

import functools
from typing import Any

from rljob_probe.adapters import say
from rljob_probe.adapters.changes import Changes, divisor

MODULE = "transformers.training_args"
_LEAST_SHARE = 0.05
"""Of vLLM's part of the GPU: less holds no model."""


def patch(module: Any, changes: Changes) -> None:
    """Adapt each configuration before it computes anything from its fields."""
    arguments = module.TrainingArguments
    initialize = arguments.__post_init__
    seen: set[tuple[int, int]] = set()

    @functools.wraps(initialize)
    def adapted(self: Any, *given: Any, **named: Any) -> Any:
        # A copy of a configuration, such as dataclasses.replace makes, is adapted already.
        if _batch(self) not in seen:
            lines = adapt(self, changes)
            seen.add(_batch(self))
            say(f"{type(self).__name__}: {'; '.join(lines) or 'the memory plan changes no option of it'}")
        return initialize(self, *given, **named)

    arguments.__post_init__ = adapted


def _batch(config: Any) -> tuple[int, int]:
    return config.per_device_train_batch_size, config.gradient_accumulation_steps


def adapt(config: Any, changes: Changes) -> list[str]:
    """Change the options in place; returns a line for each change, and for each that is not possible."""
    lines: list[str] = []
    if changes.micro_batch < 1:
        lines += _smaller_micro_batches(config, changes.micro_batch)
    if changes.activation_checkpointing and not config.gradient_checkpointing:
        lines.append(_set(config, "gradient_checkpointing", True))
    if changes.empty_cache and hasattr(config, "torch_empty_cache_steps") and not config.torch_empty_cache_steps:
        lines.append(_set(config, "torch_empty_cache_steps", 1))
    if changes.optimizer_offload:
        lines.append("optimizerOffload is not possible: TRL offloads the optimizer only by FSDP or DeepSpeed files")
    return lines + _engine(config, changes)


def _smaller_micro_batches(config: Any, share: float) -> list[str]:
    before = config.per_device_train_batch_size
    after = divisor(before, share)
    if after == before:
        return [f"per_device_train_batch_size stays {before}: a micro-batch cannot be smaller"]
    times = before // after
    lines = [
        _set(config, "per_device_train_batch_size", after),
        _set(config, "gradient_accumulation_steps", config.gradient_accumulation_steps * times),
    ]
    if getattr(config, "steps_per_generation", None) is not None:  # absent: derived from the accumulation steps
        lines.append(_set(config, "steps_per_generation", config.steps_per_generation * times))
    return lines


def _engine(config: Any, changes: Changes) -> list[str]:
    if not (changes.rollout_sleep or changes.kv_cache < 1):
        return []
    if not (getattr(config, "use_vllm", False) and getattr(config, "vllm_mode", "") == "colocate"):
        return ["kvCache and rolloutSleep change nothing: there is no vLLM engine on the trainer's GPUs"]
    lines = []
    if changes.rollout_sleep and not config.vllm_enable_sleep_mode:
        lines.append(_set(config, "vllm_enable_sleep_mode", True))
    if changes.kv_cache < 1:
        share = max(round(config.vllm_gpu_memory_utilization * changes.kv_cache, 3), _LEAST_SHARE)
        lines.append(_set(config, "vllm_gpu_memory_utilization", share))
    return lines


def _set(config: Any, option: str, value: Any) -> str:
    before = getattr(config, option)
    setattr(config, option, value)
    return f"{option} {before} -> {value}"
