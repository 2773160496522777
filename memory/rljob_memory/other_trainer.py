"""The first memory plan of a job of another trainer, whose model and machine nobody has reported.

Pinned settings are as they are. The others are what a trainer does that was told nothing, so that a remedy has
somewhere to start from; the trainer is given those that it honours.
"""

from __future__ import annotations

from typing import Literal

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.estimate import GIB

_LARGEST_MICRO_BATCH_TOKENS = 16_384
_SLEEP_LEVELS: dict[str, Literal[0, 1, 2]] = {"Auto": 0, "Disabled": 0, "Level1": 1, "Level2": 2}


def other_trainers_first_plan(spec: RLJobSpec) -> MemoryPlan:
    """The plan of generation 1. Pure."""
    settings, algorithm = spec.memory, spec.algorithm
    sequence_tokens = algorithm.max_prompt_tokens + algorithm.max_response_tokens
    step_tokens = algorithm.prompts_per_step * algorithm.group_size * sequence_tokens
    most_tokens = max(min(step_tokens, _LARGEST_MICRO_BATCH_TOKENS), sequence_tokens)
    return MemoryPlan(
        empty_cache=settings.empty_cache == "Enabled",
        expandable_segments=settings.expandable_segments == "Enabled",
        rollout_sleep_level=_SLEEP_LEVELS[settings.rollout_sleep],
        kv_cache_bytes=GIB if settings.kv_cache == "Auto" else settings.kv_cache,
        micro_batch_tokens=most_tokens if settings.micro_batch_tokens == "Auto" else settings.micro_batch_tokens,
        logprob_chunk_tokens=most_tokens if settings.logprob_chunk_tokens == "Auto" else settings.logprob_chunk_tokens,
        activation_checkpointing=settings.activation_checkpointing == "Enabled",
        optimizer_offload=settings.optimizer_offload == "Enabled",
        sync_bucket_bytes=GIB if settings.sync_bucket_size == "Auto" else settings.sync_bucket_size,
        detach_metrics=settings.detach_metrics != "Disabled",
        weight_export="SwitchSegments" if settings.weight_export == "Auto" else settings.weight_export,
    )
