"""The memory plan of the next attempt: the one in force, with what the user pinned since."""

from __future__ import annotations

from typing import Any

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.other_trainer import other_trainers_first_plan

_SWITCHES = ("empty_cache", "expandable_segments", "activation_checkpointing", "optimizer_offload", "detach_metrics")
_SLEEP_LEVELS = {"Disabled": 0, "Level1": 1, "Level2": 2}


def plan_for_next_attempt(spec: RLJobSpec, plan: MemoryPlan | None) -> MemoryPlan | None:
    """`plan` itself, or one of the next generation where `spec.memory` pins a setting to another value.

    None where there is no plan yet: the trainer works the first one out, unless it is another one than RLJob's own.
    """
    if plan is None:
        return None if spec.trainer is None else other_trainers_first_plan(spec)
    pinned = {name: value for name, value in _pinned_settings(spec).items() if value != getattr(plan, name)}
    return plan.model_copy(update={"generation": plan.generation + 1, **pinned}) if pinned else plan


def _pinned_settings(spec: RLJobSpec) -> dict[str, Any]:
    memory = spec.memory
    switches = {name: getattr(memory, name) == "Enabled" for name in _SWITCHES if getattr(memory, name) != "Auto"}
    sizes = {
        "kv_cache_bytes": memory.kv_cache,
        "micro_batch_tokens": memory.micro_batch_tokens,
        "logprob_chunk_tokens": memory.logprob_chunk_tokens,
        "sync_bucket_bytes": memory.sync_bucket_size,
    }
    shared_gpu = spec.topology == "Colocated" and spec.policy.gpus_per_replica > 0
    sleep = {}
    if memory.rollout_sleep != "Auto" and shared_gpu:
        sleep = {"rollout_sleep_level": _SLEEP_LEVELS[memory.rollout_sleep]}
    export = {} if memory.weight_export == "Auto" else {"weight_export": memory.weight_export}
    return switches | {name: size for name, size in sizes.items() if size != "Auto"} | sleep | export
