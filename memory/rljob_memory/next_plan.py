"""The memory plan of a job's next attempt, as far as it is known before the attempt begins."""

from __future__ import annotations

from rljob_api.job import RLJobSpec
from rljob_api.memory_facts import MemoryFacts
from rljob_api.memory_plan import MemoryPlan
from rljob_api.roles import ADAPTER_SETTINGS
from rljob_memory.budget.others import ADAPTED_KV_CACHE_BYTES, BUCKET_BYTES, KV_CACHE_BYTES
from rljob_memory.plan_settings import name_of, values_in, with_pins
from rljob_memory.recovery.constraints import within_max_gpus

_SHARES = ("micro_batch_tokens", "kv_cache_bytes", "sync_bucket_bytes")
_SWITCHES = ("activation_checkpointing", "optimizer_offload", "empty_cache")
_MOST_MICRO_BATCH_TOKENS = 16_384
"""Beyond this, larger matrices make a GPU little faster."""


def plan_of_next_attempt(spec: RLJobSpec, plan: MemoryPlan | None, facts: MemoryFacts | None) -> MemoryPlan | None:
    """The current `plan`, with the settings that the user has pinned since, and no larger policy than `spec` allows.

    None if there is no plan yet: RLJob's own trainer computes the first one.
    """
    if plan is None:
        return None if spec.trainer is None else other_trainers_first_plan(spec)
    # Another trainer reports no facts; it gets every pinned setting that it reads.
    plan = within_max_gpus(plan, spec)
    shares_gpu: bool | None = True
    if spec.trainer is None:
        shares_gpu = None if facts is None else spec.topology == "Colocated" and facts.device_memory_bytes > 0
    return with_pins(plan, spec, shares_gpu=shares_gpu)


def other_trainers_first_plan(spec: RLJobSpec) -> MemoryPlan:
    """The plan of generation 1 for another trainer, whose model and machine are unknown. Pure.

    Settings that are not pinned have the values of a trainer without any options, as a base for changes.
    """
    algorithm = spec.algorithm
    sequence_tokens = algorithm.max_prompt_tokens + algorithm.max_response_tokens
    step_tokens = algorithm.prompts_per_step * algorithm.group_size * sequence_tokens
    most_tokens = max(min(step_tokens, _MOST_MICRO_BATCH_TOKENS), sequence_tokens)
    unpinned = {
        "empty_cache": False,
        "expandable_segments": False,
        "rollout_sleep": "Disabled",
        "kv_cache_bytes": ADAPTED_KV_CACHE_BYTES if spec.trainer and spec.trainer.adapter else KV_CACHE_BYTES,
        "micro_batch_tokens": most_tokens,
        "logprob_chunk_tokens": most_tokens,
        "activation_checkpointing": False,
        "optimizer_offload": False,
        "sync_bucket_bytes": BUCKET_BYTES,
    }
    return MemoryPlan.model_validate(unpinned | values_in(spec, shares_gpu=True))


def adapter_changes(spec: RLJobSpec, plan: MemoryPlan) -> dict[str, object]:
    """Changes for the adapter of another trainer, by the setting's name in the manifest. Pure; empty without changes.

    Sizes are shares of the first plan's: the trainer knows its own sizes, which the first plan does not. Switches are
    named if they are on, whether a remedy or the user switched them on.
    """
    if spec.trainer is None or spec.trainer.adapter is None:
        return {}
    first = other_trainers_first_plan(spec)
    shares = {name: getattr(plan, name) / getattr(first, name) for name in _SHARES}
    switches = {name: getattr(plan, name) for name in _SWITCHES}
    sleep = {"rollout_sleep": plan.rollout_sleep} if plan.rollout_sleep_level else {}
    changed: dict[str, object] = {
        **{name: round(share, 4) for name, share in shares.items() if share < 1},
        **{name: True for name, on in switches.items() if on},
        **sleep,
    }
    settings = ADAPTER_SETTINGS[spec.trainer.adapter]
    return {name_of(name): value for name, value in changed.items() if name_of(name) in settings}
