"""Adapter for TRL, and for every other trainer that is configured by transformers' TrainingArguments.

The global batch stays the same: smaller micro-batches are accumulated more often. So do the batch that GRPO generates
at once and, with it, the groups of completions that advantages are computed over.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from rljob_probe.adapters import Changes, divisor, guarded, say

MODULE = "transformers.training_args"
_LEAST_SHARE = 0.05
"""Smallest share of the GPU for vLLM: a model does not fit in less."""


def patch(module: Any, changes: Changes) -> None:
    """Adapt each configuration before it computes anything from its fields."""
    arguments = module.TrainingArguments
    initialize = arguments.__post_init__
    seen = Seen()

    def of_config(config: Any) -> None:
        is_first = not (seen.batches or seen.engine_shares)
        lines = adapt(config, changes, seen)
        if lines or is_first:
            say(f"{type(config).__name__}: {'; '.join(lines) or 'the memory plan changes no option of it'}")

    @functools.wraps(initialize)
    def adapted(self: Any, *given: Any, **named: Any) -> Any:
        guarded("TRL", of_config)(self)
        return initialize(self, *given, **named)

    arguments.__post_init__ = adapted


class Seen:
    """Sizes that the adapter has set. A copy of a configuration, such as dataclasses.replace makes, has them already;
    the second configuration of a script may not."""

    def __init__(self) -> None:
        self.batches: set[tuple[int, int]] = set()
        self.engine_shares: set[float] = set()


def _batch(config: Any) -> tuple[int, int]:
    return config.per_device_train_batch_size, config.gradient_accumulation_steps


def adapt(config: Any, changes: Changes, seen: Seen) -> list[str]:
    """Change the options in place; returns a line for each change, and for each that is not possible."""
    lines: list[str] = []
    if changes.micro_batch < 1 and _batch(config) not in seen.batches:
        lines += _smaller_micro_batches(config, changes.micro_batch)
        seen.batches.add(_batch(config))
    if changes.activation_checkpointing and not config.gradient_checkpointing:
        lines.append(_set(config, "gradient_checkpointing", True))
    if changes.empty_cache and hasattr(config, "torch_empty_cache_steps") and not config.torch_empty_cache_steps:
        lines.append(_set(config, "torch_empty_cache_steps", 1))
    if changes.optimizer_offload:
        lines.append("optimizerOffload is not possible: TRL offloads the optimizer only by FSDP or DeepSpeed files")
    return lines + _engine(config, changes, seen)


def _smaller_micro_batches(config: Any, share: float) -> list[str]:
    before = config.per_device_train_batch_size
    if _deepspeed_sets_micro_batches(config):
        return [f"per_device_train_batch_size stays {before}: the DeepSpeed configuration sets it; write auto there"]
    # KTO compares each completion with its neighbor in the micro-batch, and refuses a micro-batch of one.
    is_kto = any(class_.__name__ == "KTOConfig" for class_ in type(config).__mro__)
    after = divisor(before, share, least=2 if is_kto else 1)
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


def _deepspeed_sets_micro_batches(config: Any) -> bool:
    """True if DeepSpeed's configuration has numbers, which transformers then requires to equal the arguments."""
    given = getattr(config, "deepspeed", None)
    if isinstance(given, str):
        try:
            with open(given, encoding="utf-8") as file:
                given = json.load(file)
        except (OSError, ValueError):
            return False
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return isinstance(given, dict) and any(given.get(name, "auto") != "auto" for name in names)


def _engine(config: Any, changes: Changes, seen: Seen) -> list[str]:
    if not (changes.rollout_sleep or changes.kv_cache < 1):
        return []
    if not (getattr(config, "use_vllm", False) and getattr(config, "vllm_mode", "") == "colocate"):
        return ["kvCache and rolloutSleep change nothing: there is no vLLM engine on the trainer's GPUs"]
    lines = []
    if changes.rollout_sleep and not hasattr(config, "vllm_enable_sleep_mode"):
        lines.append("rolloutSleep is not possible: this version has no vllm_enable_sleep_mode")
    elif changes.rollout_sleep and not config.vllm_enable_sleep_mode:
        lines.append(_set(config, "vllm_enable_sleep_mode", True))
    if changes.kv_cache < 1 and config.vllm_gpu_memory_utilization not in seen.engine_shares:
        before = config.vllm_gpu_memory_utilization
        share = max(round(before * changes.kv_cache, 3), min(_LEAST_SHARE, before))
        lines.append(_set(config, "vllm_gpu_memory_utilization", share))
        seen.engine_shares.add(share)
    return lines


def _set(config: Any, option: str, value: Any) -> str:
    before = getattr(config, option)
    setattr(config, option, value)
    return f"{option} {before} -> {value}"
