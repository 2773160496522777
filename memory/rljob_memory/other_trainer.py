"""The first memory plan of a job of another trainer, whose model and machine nobody has reported.

The other settings have the values of a trainer without any options, as a base for changes. The trainer gets those that
it supports.
"""

from __future__ import annotations

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.estimate import GIB
from rljob_memory.plan import LARGEST_MICRO_BATCH_TOKENS
from rljob_memory.recovery.pins import pinned_values


def other_trainers_first_plan(spec: RLJobSpec) -> MemoryPlan:
    """The plan of generation 1. Pure."""
    algorithm = spec.algorithm
    sequence_tokens = algorithm.max_prompt_tokens + algorithm.max_response_tokens
    step_tokens = algorithm.prompts_per_step * algorithm.group_size * sequence_tokens
    most_tokens = max(min(step_tokens, LARGEST_MICRO_BATCH_TOKENS), sequence_tokens)
    unpinned = {
        "empty_cache": False,
        "expandable_segments": False,
        "rollout_sleep": "Disabled",
        "kv_cache_bytes": GIB,
        "micro_batch_tokens": most_tokens,
        "logprob_chunk_tokens": most_tokens,
        "activation_checkpointing": False,
        "optimizer_offload": False,
        "sync_bucket_bytes": GIB,
    }
    return MemoryPlan.model_validate(unpinned | pinned_values(spec.memory, shares_gpu=True))
