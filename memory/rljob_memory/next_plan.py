"""The memory plan of a job's next attempt, as far as it is known before the attempt begins."""

from __future__ import annotations

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfile
from rljob_memory.plan import LARGEST_MICRO_BATCH_TOKENS
from rljob_memory.recovery.pins import pinned_values, with_pins
from rljob_memory.recovery.profile import shares_gpu
from rljob_memory.sizes import GIB


def plan_of_next_attempt(spec: RLJobSpec, plan: MemoryPlan | None, profile: MemoryProfile | None) -> MemoryPlan | None:
    """The current `plan`, with the settings that the user has pinned since.

    None if there is no plan yet: RLJob's own trainer computes the first one.
    """
    if plan is None:
        return None if spec.trainer is None else other_trainers_first_plan(spec)
    # Another trainer reports no profile; it gets every pinned setting that it reads.
    return with_pins(plan, spec.memory, shares_gpu=shares_gpu(profile) if spec.trainer is None else True)


def other_trainers_first_plan(spec: RLJobSpec) -> MemoryPlan:
    """The plan of generation 1 for another trainer, whose model and machine are unknown. Pure.

    Settings that are not pinned have the values of a trainer without any options, as a base for changes.
    """
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
