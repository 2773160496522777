"""The first memory plan of a job: pinned settings, and `Auto` settings computed from the machine and the step.

The estimates need to be sane rather than exact: an error shows as an out-of-memory failure, which changes the plan.
"""

from __future__ import annotations

from typing import Literal

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_settings import MemorySettings
from rljob_memory.estimate import (
    AWAKE_ENGINE_BYTES,
    POLICY_BESIDE_TORCH_BYTES,
    SLEEPING_ENGINE_BYTES,
    activation_bytes_per_token,
    kv_bytes,
    logits_bytes_per_token,
    optimizer_bytes,
    policy_state_bytes,
    policy_update_bytes,
)
from rljob_memory.recovery.pins import pinned_values
from rljob_memory.sizes import GIB, MIB
from rljob_memory.workload import Hardware, ModelShape, Workload

__all__ = ["Hardware", "MemoryPlan", "ModelShape", "Workload", "first_plan"]

_USABLE = 0.9
"""Share of a device's memory that is planned with; the rest is for fragmentation and errors of the estimates."""
_CPU_ROLE_SHARE = 0.25
"""Share of the host's memory for the activations of all policy ranks on the CPU, and for all KV caches: each."""
LARGEST_MICRO_BATCH_TOKENS = 16_384
"""Beyond this, larger matrices make a GPU no faster; they only take memory."""
_LARGEST_LOGPROB_CHUNK_BYTES = 256 * MIB
_LARGEST_LOGPROB_CHUNK_TOKENS = 8_192
_SMALLEST_KV_CACHE_BYTES = 64 * MIB
_AUTO_WEIGHT_EXPORT: Literal["SwitchSegments"] = "SwitchSegments"
"""Between syncs this keeps no buffer; bench/programs/memory_small_card.py measures both."""


def first_plan(settings: MemorySettings, hardware: Hardware, model: ModelShape, workload: Workload) -> MemoryPlan:
    """The plan of generation 1. Pure: the same arguments give the same plan."""
    gpu = hardware.device == "cuda"
    shares_gpu = gpu and workload.topology == "Colocated"
    pinned = pinned_values(settings, shares_gpu=shares_gpu)

    # Level 2: the next sync brings the weights, so none need be kept in host memory.
    rollout_sleep = pinned.get("rollout_sleep", "Level2" if shares_gpu else "Disabled")
    engine_sleeps = rollout_sleep != "Disabled"
    offload = pinned.get("optimizer_offload", _offload_helps(hardware, model, workload, engine_sleeps))
    kv_cache_bytes = pinned.get("kv_cache_bytes", _auto_kv_cache_bytes(hardware, model, workload, offload))
    room = _activation_room_bytes(hardware, model, workload, engine_sleeps, offload, kv_cache_bytes)
    whole_sequence = workload.max_sequence_tokens * activation_bytes_per_token(model, checkpointing=False)
    checkpointing = pinned.get("activation_checkpointing", room < whole_sequence)
    unpinned = {
        "empty_cache": shares_gpu,
        "expandable_segments": gpu,
        "rollout_sleep": rollout_sleep,
        "kv_cache_bytes": kv_cache_bytes,
        "micro_batch_tokens": _auto_micro_batch_tokens(model, workload, room, checkpointing),
        "logprob_chunk_tokens": _auto_logprob_chunk_tokens(model),
        "activation_checkpointing": checkpointing,
        "optimizer_offload": offload,
        "sync_bucket_bytes": _auto_sync_bucket_bytes(model),
        "detach_metrics": True,
        "weight_export": _AUTO_WEIGHT_EXPORT,
    }
    return MemoryPlan.model_validate(unpinned | pinned)


def _offload_helps(hardware: Hardware, model: ModelShape, workload: Workload, engine_sleeps: bool) -> bool:
    """True if the optimizer's state must leave the GPU for one sequence to fit, and the host can hold it."""
    if hardware.device == "cpu":
        return False
    one_sequence = workload.max_sequence_tokens * activation_bytes_per_token(model, checkpointing=True)
    kv_cache_bytes = _auto_kv_cache_bytes(hardware, model, workload, offload=False)
    room = _activation_room_bytes(hardware, model, workload, engine_sleeps, False, kv_cache_bytes)
    return room < one_sequence and 2 * optimizer_bytes(model) <= hardware.host_memory_bytes


def _auto_kv_cache_bytes(hardware: Hardware, model: ModelShape, workload: Workload, offload: bool) -> int:
    """The need of the step's sequences at their longest, bounded by the memory left beside weights and policy.

    At least one sequence of the longest length, since vLLM starts with nothing less; in whole MiB.
    """
    needed = kv_bytes(model, workload, workload.sequences_per_engine)
    least = max(kv_bytes(model, workload, 1), _SMALLEST_KV_CACHE_BYTES)
    return -(-max(min(needed, _kv_room_bytes(hardware, model, workload, offload)), least) // MIB) * MIB


def _kv_room_bytes(hardware: Hardware, model: ModelShape, workload: Workload, offload: bool) -> int:
    """Memory left for the KV cache of one engine while it generates; the policy's state stays on the GPU."""
    if hardware.device == "cpu":
        return int(hardware.host_memory_bytes * _CPU_ROLE_SHARE) // workload.engines
    engine = model.weight_bytes // workload.tensor_parallel_size + AWAKE_ENGINE_BYTES
    policy = 0
    if workload.topology == "Colocated":
        policy = policy_state_bytes(model, workload, optimizer_offload=offload) + POLICY_BESIDE_TORCH_BYTES
    return int(hardware.device_memory_bytes * _USABLE) - engine - policy


def _activation_room_bytes(
    hardware: Hardware, model: ModelShape, workload: Workload, engine_sleeps: bool, offload: bool, kv_cache_bytes: int
) -> int:
    """Memory left for activations of one rank in an update."""
    if hardware.device == "cpu":
        return int(hardware.host_memory_bytes * _CPU_ROLE_SHARE) // workload.policy_ranks
    engine = 0
    if workload.topology == "Colocated":
        awake = model.weight_bytes // workload.tensor_parallel_size + AWAKE_ENGINE_BYTES + kv_cache_bytes
        engine = SLEEPING_ENGINE_BYTES if engine_sleeps else awake
    policy = policy_state_bytes(model, workload, optimizer_offload=offload) + policy_update_bytes(model, workload)
    logits = 3 * _LARGEST_LOGPROB_CHUNK_BYTES  # the chunk's logits, their softmax and their gradient
    return int(hardware.device_memory_bytes * _USABLE) - engine - policy - logits - POLICY_BESIDE_TORCH_BYTES


def _auto_micro_batch_tokens(model: ModelShape, workload: Workload, room_bytes: int, checkpointing: bool) -> int:
    """As many tokens as fit, at most a rank's whole share of the step, at least one sequence of the longest length."""
    fitting = max(room_bytes, 0) // activation_bytes_per_token(model, checkpointing=checkpointing)
    share = workload.sequences_per_rank * workload.max_sequence_tokens
    return max(min(fitting, share, LARGEST_MICRO_BATCH_TOKENS), workload.max_sequence_tokens)


def _auto_logprob_chunk_tokens(model: ModelShape) -> int:
    """Tokens whose float32 logits take at most 256 MiB; a multiple of 64 if possible, for the GPU's tiles."""
    fitting = _LARGEST_LOGPROB_CHUNK_BYTES // logits_bytes_per_token(model)
    whole_tiles = fitting // 64 * 64
    return min(whole_tiles or max(fitting, 1), _LARGEST_LOGPROB_CHUNK_TOKENS)


def _auto_sync_bucket_bytes(model: ModelShape) -> int:
    """A quarter of the weights, within 256 MiB and 1 GiB, but never less than the largest parameter; in whole MiB."""
    quarter = min(max(model.weight_bytes // 4, 256 * MIB), GIB)
    return -(-max(quarter, model.largest_parameter_bytes) // MIB) * MIB
