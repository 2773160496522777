"""The memory profile of a job: numbers that bound the memory plan and estimate the effect of a change."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.memory_profile import MemoryProfile
from rljob_api.roles import LoraSpec
from rljob_memory.estimate import (
    activation_bytes_per_token,
    engine_weight_bytes,
    kv_bytes,
    logprob_bytes_per_token,
    optimizer_bytes,
    policy_state_bytes,
    policy_weight_bytes,
    trained_bytes,
)
from rljob_memory.planning.model_size import with_adapters
from rljob_memory.workload import Hardware, ModelShape, Workload

_BFLOAT16_BYTES = 2


def profile_of(
    hardware: Hardware, model: ModelShape, workload: Workload, *, fused: bool, shared_memory_bytes: int = 0
) -> MemoryProfile:
    """The profile by the formulas of `rljob_memory.estimate`.

    `fused`: the policy's layers are compiled. `shared_memory_bytes`: size of /dev/shm where the workers run, 0 if it is
    not known.
    """
    return MemoryProfile(
        policy_ranks=workload.policy_ranks,
        colocated=workload.topology == "Colocated",
        longest_sequence_tokens=workload.max_sequence_tokens,
        rank_tokens=workload.sequences_per_rank * workload.max_sequence_tokens,
        smallest_kv_cache_bytes=kv_bytes(model, workload, 1),
        largest_parameter_bytes=model.largest_parameter_bytes,
        weight_bytes=engine_weight_bytes(model, workload),
        optimizer_bytes=optimizer_bytes(model, workload) // workload.policy_ranks,
        smaller_moments_bytes=_smaller_moments_bytes(model, workload),
        adapter_policy_bytes=_adapter_policy_bytes(model, workload),
        trained_bytes=trained_bytes(model, workload) // workload.policy_ranks,
        policy_weight_bytes=policy_weight_bytes(model, workload, optimizer_offload=True),
        activation_bytes_per_token=activation_bytes_per_token(model, checkpointing=False, fused=fused),
        checkpointed_activation_bytes_per_token=activation_bytes_per_token(model, checkpointing=True, fused=fused),
        logits_bytes_per_token=logprob_bytes_per_token(model, fused=fused),
        vocabulary=model.vocabulary,
        device_total_bytes=hardware.device_memory_bytes,
        host_memory_bytes=hardware.host_memory_bytes,
        shared_memory_bytes=shared_memory_bytes,
    )


def _smaller_moments_bytes(model: ModelShape, workload: Workload) -> int:
    if workload.moment_bytes <= _BFLOAT16_BYTES:
        return 0
    smaller = replace(workload, moment_bytes=_BFLOAT16_BYTES)
    kept, less = (policy_state_bytes(model, work, optimizer_offload=False) for work in (workload, smaller))
    return kept - less


def _adapter_policy_bytes(model: ModelShape, workload: Workload) -> int:
    if model.adapter_parameters:
        return 0
    adapted = with_adapters(model, LoraSpec().rank)
    gradients = 4 * adapted.trained_parameters // workload.policy_ranks
    return policy_state_bytes(adapted, workload, optimizer_offload=False) + gradients


def shares_gpu(profile: MemoryProfile | None) -> bool | None:
    """True if policy and engine take turns on a GPU; None if no trainer has reported it."""
    return None if profile is None else profile.colocated and profile.device_total_bytes > 0
