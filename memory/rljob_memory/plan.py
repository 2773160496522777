"""The first memory plan of a job: pinned settings, and `Auto` settings computed from the machine and the step.

The estimates need to be sane rather than exact: an error shows as an out-of-memory failure, which changes the plan.
"""

from __future__ import annotations

import math
from typing import Literal

from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_settings import MemorySettings
from rljob_memory.estimate import (
    OPTIMIZER_STEP_BYTES,
    POLICY_BESIDE_TORCH_BYTES,
    activation_bytes_per_token,
    awake_engine_bytes,
    engine_weight_bytes,
    kv_bytes,
    logits_bytes_per_token,
    optimizer_bytes,
    policy_state_bytes,
    policy_update_bytes,
    sleeping_engine_bytes,
    snapshot_bytes,
    streamed_seconds,
)
from rljob_memory.recovery.pins import pinned_values
from rljob_memory.sizes import GIB, MIB
from rljob_memory.workload import Hardware, ModelShape, Workload

__all__ = ["Hardware", "MemoryPlan", "ModelShape", "Workload", "first_plan", "keeps_snapshots"]

_USABLE = 0.9
"""Share of a device's memory that is planned with; the rest is for fragmentation and errors of the estimates."""
_CPU_ROLE_SHARE = 0.25
"""Share of the host's memory for the activations of all policy ranks on the CPU, and for all KV caches: each."""
_SNAPSHOT_SHARE = 0.5
"""Share of the host's memory for snapshots, with what is beside them."""
_BUSY_TOKENS = 8_192, 16_384
_BUSY_FLOPS = 6e13
"""Arithmetic of a micro-batch that keeps a GPU busy, and the bounds on its tokens: below, what comes once per
micro-batch (launches, the sum of gradients) takes a part of the time; above, more tokens only take memory."""
_FLOPS_PER_SECOND, _MEMORY_BYTES_PER_SECOND = 4e14, 3e12
"""Of an H100 or H200: half of its bfloat16 peak in an update; memory bandwidth in decoding."""
_CLEARLY_FASTER = 0.9
"""The state leaves the GPU only for this share of the estimated time of a step, which is rough."""
_LOGPROB_CHUNK_BYTES = 256 * MIB, GIB
"""Bounds on the logits of a chunk. Every chunk adds its part to the whole gradient of the head: with chunks of 96
tokens instead of 384, an update took 0.54 s longer than 1.17 s (bench/results/memory_mitigation_cost.json)."""
_LOGPROB_CHUNK_ROOM_SHARE = 16
"""Above the lower bound, the logits take at most this fraction of the room for activations: 1/16."""
_LOGITS_OF_A_CHUNK = 3
"""The chunk's logits, their softmax and their gradient."""
_LARGEST_LOGPROB_CHUNK_TOKENS = 8_192
_SMALLEST_KV_CACHE_BYTES = 64 * MIB
_AUTO_WEIGHT_EXPORT: Literal["SwitchSegments"] = "SwitchSegments"
"""Between syncs this keeps no buffer; bench/programs/memory_small_card.py measures both."""


def first_plan(
    settings: MemorySettings, hardware: Hardware, model: ModelShape, workload: Workload, *, fused: bool = False
) -> MemoryPlan:
    """The plan of generation 1. Pure: the same arguments give the same plan. `fused`: layers are compiled."""
    gpu = hardware.device == "cuda"
    shares_gpu = gpu and workload.topology == "Colocated"
    pinned = pinned_values(settings, shares_gpu=shares_gpu)

    # Level 2: the next sync brings the weights, so none need be kept in host memory.
    rollout_sleep = pinned.get("rollout_sleep", "Level2" if shares_gpu else "Disabled")
    engine_sleeps = rollout_sleep != "Disabled"
    offload = pinned.get("optimizer_offload", _offload_pays(hardware, model, workload, engine_sleeps, fused))
    kv_cache_bytes = pinned.get("kv_cache_bytes", _auto_kv_cache_bytes(hardware, model, workload, offload))
    room = _activation_room_bytes(hardware, model, workload, engine_sleeps, offload, kv_cache_bytes)
    whole_sequence = workload.max_sequence_tokens * activation_bytes_per_token(model, checkpointing=False, fused=fused)
    checkpointing = pinned.get("activation_checkpointing", room < whole_sequence)
    chunk_bytes = _logprob_chunk_bytes(hardware, room)
    room -= _LOGITS_OF_A_CHUNK * (chunk_bytes - _LOGPROB_CHUNK_BYTES[0])
    unpinned = {
        "empty_cache": shares_gpu,
        "expandable_segments": gpu,
        "rollout_sleep": rollout_sleep,
        "kv_cache_bytes": kv_cache_bytes,
        "micro_batch_tokens": _auto_micro_batch_tokens(model, workload, room, checkpointing, fused),
        "logprob_chunk_tokens": _auto_logprob_chunk_tokens(model, chunk_bytes),
        "activation_checkpointing": checkpointing,
        "optimizer_offload": offload,
        "sync_bucket_bytes": _auto_sync_bucket_bytes(model),
        "detach_metrics": True,
        "weight_export": _AUTO_WEIGHT_EXPORT,
    }
    return MemoryPlan.model_validate(unpinned | pinned)


def keeps_snapshots(hardware: Hardware, model: ModelShape, workload: Workload) -> bool:
    """True if the ranks keep a copy of their state in host memory, to undo an update in which one of them fails.

    Only for several ranks: they take longest to restart. The host must have room for the copy, for that of a checkpoint
    which is being written, and for the weights, which each rank reads as a whole.
    """
    if workload.policy_ranks == 1:
        return False
    copies = 2 * snapshot_bytes(model, workload) + workload.policy_ranks * model.weight_bytes
    if hardware.device == "cpu":
        copies += workload.policy_ranks * policy_state_bytes(model, workload, optimizer_offload=False)
    return copies <= hardware.host_memory_bytes * _SNAPSHOT_SHARE


def _offload_pays(hardware: Hardware, model: ModelShape, workload: Workload, engine_sleeps: bool, fused: bool) -> bool:
    """True if the host can hold the optimizer's state, and the GPU has no room for it or a better use for the room."""
    host_bytes = optimizer_bytes(model, workload) + model.weight_bytes
    if hardware.device == "cpu" or host_bytes > hardware.host_memory_bytes * _USABLE:
        return False
    on_gpu, on_host = (
        _step_seconds(hardware, model, workload, engine_sleeps, fused, offload=offload) for offload in (False, True)
    )
    if math.isinf(on_host):
        return math.isinf(on_gpu) and not model.adapter_parameters  # nothing fits by the estimates: the smaller need
    return on_host < _CLEARLY_FASTER * on_gpu


def _step_seconds(
    hardware: Hardware, model: ModelShape, workload: Workload, engine_sleeps: bool, fused: bool, *, offload: bool
) -> float:
    """Time of the longest step, as far as it depends on the place of the optimizer's state; infinite if a sequence does
    not fit. A rough model, to compare two plans: decoding is bound by reading the weights, an update by arithmetic."""
    kv_cache_bytes = _auto_kv_cache_bytes(hardware, model, workload, offload)
    room = _activation_room_bytes(hardware, model, workload, engine_sleeps, offload, kv_cache_bytes)
    per_token, checkpointed_per_token = (
        activation_bytes_per_token(model, checkpointing=checkpointing, fused=fused) for checkpointing in (False, True)
    )
    a_sequence = kv_bytes(model, workload, 1)
    if room < max(workload.max_sequence_tokens * checkpointed_per_token, OPTIMIZER_STEP_BYTES):
        return math.inf
    if _kv_room_bytes(hardware, model, workload, offload) < a_sequence:
        return math.inf
    waves = -(-workload.sequences_per_engine // max(kv_cache_bytes // a_sequence, 1))
    decoding = waves * workload.max_response_tokens * engine_weight_bytes(model, workload) / _MEMORY_BYTES_PER_SECOND
    flops = 6 * model.parameters * workload.sequences_per_rank * workload.max_sequence_tokens
    recomputed = 4 / 3 if room < workload.max_sequence_tokens * per_token else 1.0
    streaming = streamed_seconds(model, workload) if offload else 0.0
    return decoding + recomputed * flops / _FLOPS_PER_SECOND + streaming


def _auto_kv_cache_bytes(hardware: Hardware, model: ModelShape, workload: Workload, offload: bool) -> int:
    """The need of the step's sequences at their longest, bounded by the memory left beside weights and policy.

    At least one sequence of the longest length, since vLLM starts with nothing less; in whole MiB.
    """
    needed = kv_bytes(model, workload, workload.sequences_per_engine)
    least = max(kv_bytes(model, workload, 1), _SMALLEST_KV_CACHE_BYTES)
    return -(-max(min(needed, _kv_room_bytes(hardware, model, workload, offload)), least) // MIB) * MIB


def _kv_room_bytes(hardware: Hardware, model: ModelShape, workload: Workload, offload: bool) -> int:
    """Memory left for the KV cache on one GPU of an engine while it generates; a policy's state stays there."""
    if hardware.device == "cpu":
        return int(hardware.host_memory_bytes * _CPU_ROLE_SHARE) // workload.engine_processes
    engine = engine_weight_bytes(model, workload) + awake_engine_bytes(workload)
    if workload.topology == "Disaggregated":
        own_gpu_bytes = hardware.engine_device_memory_bytes or hardware.device_memory_bytes
        return int(own_gpu_bytes * _USABLE) - engine
    policy = policy_state_bytes(model, workload, optimizer_offload=offload) + POLICY_BESIDE_TORCH_BYTES
    return int(hardware.device_memory_bytes * _USABLE) - engine - policy


def _activation_room_bytes(
    hardware: Hardware, model: ModelShape, workload: Workload, engine_sleeps: bool, offload: bool, kv_cache_bytes: int
) -> int:
    """Memory left for activations of one rank in an update, beside the logits of the smallest chunk."""
    if hardware.device == "cpu":
        return int(hardware.host_memory_bytes * _CPU_ROLE_SHARE) // workload.policy_ranks
    engine = 0
    if workload.topology == "Colocated":
        awake = engine_weight_bytes(model, workload) + awake_engine_bytes(workload) + kv_cache_bytes
        engine = sleeping_engine_bytes(workload) if engine_sleeps else awake
    policy = policy_state_bytes(model, workload, optimizer_offload=offload) + policy_update_bytes(model, workload)
    logits = _LOGITS_OF_A_CHUNK * _LOGPROB_CHUNK_BYTES[0]
    return int(hardware.device_memory_bytes * _USABLE) - engine - policy - logits - POLICY_BESIDE_TORCH_BYTES


def _auto_micro_batch_tokens(
    model: ModelShape, workload: Workload, room_bytes: int, checkpointing: bool, fused: bool
) -> int:
    """As many tokens as fit, at most a rank's whole share of the step, at least one sequence of the longest length."""
    fitting = max(room_bytes, 0) // activation_bytes_per_token(model, checkpointing=checkpointing, fused=fused)
    share = workload.sequences_per_rank * workload.max_sequence_tokens
    least, most = _BUSY_TOKENS
    busy = min(max(int(_BUSY_FLOPS / (6 * model.parameters)), least), most)
    return max(min(fitting, share, busy), workload.max_sequence_tokens)


def _auto_logprob_chunk_tokens(model: ModelShape, chunk_bytes: int) -> int:
    """Tokens whose float32 logits fit into a chunk; a multiple of 64 if possible, for the GPU's tiles."""
    fitting = chunk_bytes // logits_bytes_per_token(model)
    whole_tiles = fitting // 64 * 64
    return min(whole_tiles or max(fitting, 1), _LARGEST_LOGPROB_CHUNK_TOKENS)


def _logprob_chunk_bytes(hardware: Hardware, room_bytes: int) -> int:
    least, most = _LOGPROB_CHUNK_BYTES
    if hardware.device == "cpu":
        return least
    return min(max(room_bytes // _LOGPROB_CHUNK_ROOM_SHARE, least), most)


def _auto_sync_bucket_bytes(model: ModelShape) -> int:
    """A quarter of the weights, within 256 MiB and 1 GiB, but never less than the largest parameter; in whole MiB."""
    quarter = min(max(model.weight_bytes // 4, 256 * MIB), GIB)
    return -(-max(quarter, model.largest_parameter_bytes) // MIB) * MIB
