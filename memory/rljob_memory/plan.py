"""The first memory plan of a job: pinned settings, and `Auto` settings computed from the machine and the step.

The estimates need to be sane rather than exact: an error shows as an out-of-memory failure, which changes the plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rljob_api.memory_plan import MemoryPlan, MemorySettings
from rljob_memory.estimate import (
    OPTIMIZER_STEP_BYTES,
    POLICY_BESIDE_TORCH_BYTES,
    activation_bytes_per_token,
    awake_engine_bytes,
    engine_weight_bytes,
    kv_bytes,
    logits_bytes_per_token,
    logprob_bytes_per_token,
    optimizer_bytes,
    policy_offload_seconds,
    policy_state_bytes,
    policy_update_bytes,
    policy_weight_bytes,
    reference_bytes,
    reference_seconds,
    sleeping_engine_bytes,
    snapshot_bytes,
    streamed_seconds,
    trained_weight_bytes,
    weight_sync_bytes,
)
from rljob_memory.plan_settings import pinned_values
from rljob_memory.sizes import GIB, MIB
from rljob_memory.workload import Hardware, ModelShape, Workload

__all__ = [
    "Hardware",
    "MemoryPlan",
    "ModelShape",
    "Workload",
    "compiles_ahead",
    "copies_frozen_weights",
    "first_plan",
    "keeps_snapshots",
]

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
"""The chunk's logits, their softmax and their gradient, in compiled functions; others hold more at once."""
_REDUCED_NUMBER_BYTES = 12
"""Of each gradient of a layer while several ranks reduce it: at most 2 bytes in the weights' dtype, 2 of this rank's
float32 shard, 4 of the float32 input of the reduction, and 4 of that of the layer before, which may still run."""
_LARGEST_LOGPROB_CHUNK_TOKENS = 8_192
_SMALLEST_KV_CACHE_BYTES = 64 * MIB
_AUTO_WEIGHT_EXPORT: Literal["SwitchSegments"] = "SwitchSegments"
"""Between syncs this keeps no buffer; bench/programs/memory_settings.py measures both."""


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
    offload = _offload(hardware, model, workload, engine_sleeps, fused, pinned)
    kv_cache_bytes = pinned.get("kv_cache_bytes", _auto_kv_cache_bytes(hardware, model, workload, offload))
    room = _activation_room_bytes(hardware, model, workload, engine_sleeps, fused, offload, kv_cache_bytes)
    whole_sequence = workload.max_sequence_tokens * activation_bytes_per_token(model, checkpointing=False, fused=fused)
    checkpointing = pinned.get("activation_checkpointing", room < whole_sequence)
    chunk_bytes = _logprob_chunk_bytes(hardware, room)
    room -= _logprob_bytes(model, chunk_bytes - _LOGPROB_CHUNK_BYTES[0], fused)
    unpinned = {
        "empty_cache": shares_gpu,
        "expandable_segments": gpu,
        "rollout_sleep": rollout_sleep,
        "kv_cache_bytes": kv_cache_bytes,
        "micro_batch_tokens": _auto_micro_batch_tokens(model, workload, room, checkpointing, fused),
        "logprob_chunk_tokens": _auto_logprob_chunk_tokens(model, chunk_bytes),
        "activation_checkpointing": checkpointing,
        "optimizer_offload": offload.optimizer,
        "policy_offload": offload.weights,
        "sync_bucket_bytes": _auto_sync_bucket_bytes(model),
        "detach_metrics": True,
        "weight_export": _AUTO_WEIGHT_EXPORT,
    }
    return MemoryPlan.model_validate(unpinned | pinned)


def keeps_snapshots(hardware: Hardware, model: ModelShape, workload: Workload) -> bool:
    """True if the ranks keep a copy of their state in host memory, to undo an update in which one of them fails.

    Only for several ranks: they take longest to restart. The host must have room for the copy, and for that of a
    checkpoint which is being written. Loading is over when they are made.
    """
    if workload.policy_ranks == 1:
        return False
    copies = 2 * snapshot_bytes(model, workload)
    if hardware.device == "cpu":
        copies += workload.policy_ranks * policy_state_bytes(model, workload, optimizer_offload=False)
    return copies <= hardware.host_memory_bytes * _SNAPSHOT_SHARE


def copies_frozen_weights(hardware: Hardware, model: ModelShape, workload: Workload, plan: MemoryPlan) -> bool:
    """True if the host can hold a copy of weights that are not trained, while `policyOffload` keeps them off the GPU.
    Otherwise they are read from the model's files again."""
    return _host_holds(hardware, model, workload, _Offload(plan.optimizer_offload, plan.policy_offload), frozen=True)


def compiles_ahead(hardware: Hardware, model: ModelShape, workload: Workload, plan: MemoryPlan) -> bool:
    """True if the policy may compile its layers while the engine starts. `model`'s layers must be compiled.

    The passes of one layer and the head for this need memory beside an engine that is awake: for the activations of a
    micro-batch, for the gradient of the head, and with several ranks for gathered weights and for gradients that are
    being reduced. A policy that makes room for the engine before it starts compiles in its first update.
    """
    if hardware.device == "cpu":
        return False
    engine = 0
    if workload.topology == "Colocated":
        if plan.policy_offload:
            return False
        engine = engine_weight_bytes(model, workload) + awake_engine_bytes(workload) + plan.kv_cache_bytes
    policy = policy_state_bytes(model, workload, optimizer_offload=plan.optimizer_offload) + POLICY_BESIDE_TORCH_BYTES
    # Sums of gradients are dropped.
    gradients = policy_update_bytes(model, workload) - 4 * model.trained_parameters // workload.policy_ranks
    room = hardware.device_memory_bytes
    if workload.policy_ranks > 1:
        gradients += _REDUCED_NUMBER_BYTES * model.trained_parameters // model.layers
        room = int(room * _USABLE)  # FSDP2 allocates on several streams, which cannot reuse each other's free memory
    layer = activation_bytes_per_token(model, checkpointing=False, fused=True) // model.layers
    passes = plan.micro_batch_tokens * layer + _LOGITS_OF_A_CHUNK * plan.logprob_chunk_tokens * logits_bytes_per_token(
        model
    )
    return engine + policy + gradients + passes <= room


@dataclass(frozen=True, slots=True)
class _Offload:
    """Parts of the policy that are in host memory."""

    optimizer: bool
    weights: bool
    """While the engine generates."""


def _offload(
    hardware: Hardware,
    model: ModelShape,
    workload: Workload,
    engine_sleeps: bool,
    fused: bool,
    pinned: Mapping[str, Any],
) -> _Offload:
    """The optimizer's state first: it is away from the GPU at all times. The weights give an engine no room that it
    keeps in the update, even if `policyOffload` is pinned."""

    def seconds(offload: _Offload) -> float:
        return _step_seconds(hardware, model, workload, engine_sleeps, fused, offload)

    weights = engine_sleeps and pinned.get("policy_offload", False)
    if (optimizer := pinned.get("optimizer_offload")) is None:
        optimizer = _optimizer_offload_pays(
            hardware, model, workload, *(seconds(_Offload(offload, weights)) for offload in (False, True))
        )
    if "policy_offload" not in pinned and engine_sleeps:
        on_gpu, on_host = _Offload(optimizer, False), _Offload(optimizer, True)
        weights = _host_holds(hardware, model, workload, on_host, frozen=False) and (
            seconds(on_host) < _CLEARLY_FASTER * seconds(on_gpu)
        )
    return _Offload(optimizer, weights)


def _optimizer_offload_pays(
    hardware: Hardware, model: ModelShape, workload: Workload, on_gpu: float, on_host: float
) -> bool:
    """True if the host can hold the optimizer's state, and the GPU has no room for it or a better use for the room.

    `on_gpu`, `on_host`: seconds of a step with the state there.
    """
    host_bytes = optimizer_bytes(model, workload) + model.weight_bytes
    if hardware.device == "cpu" or host_bytes > hardware.host_memory_bytes * _USABLE:
        return False
    if math.isinf(on_host):
        return math.isinf(on_gpu) and not model.adapter_parameters  # nothing fits by the estimates: the smaller need
    return on_host < _CLEARLY_FASTER * on_gpu


def _host_holds(hardware: Hardware, model: ModelShape, workload: Workload, offload: _Offload, *, frozen: bool) -> bool:
    """True if the host has room for `offload`, with or without a copy of the weights that are not trained, and for the
    copy from which checkpoints are written, which an offloaded optimizer's state does not need. A reference model is
    beside that state."""
    if offload.optimizer:
        needed = optimizer_bytes(model, workload) + reference_bytes(model, workload)
    else:
        needed = snapshot_bytes(model, workload)
    if frozen:
        of_a_rank = policy_weight_bytes(model, workload, optimizer_offload=offload.optimizer)
        needed += workload.policy_ranks * of_a_rank
    else:
        needed += trained_weight_bytes(model, workload)
    return needed <= hardware.host_memory_bytes * _USABLE


def _step_seconds(
    hardware: Hardware, model: ModelShape, workload: Workload, engine_sleeps: bool, fused: bool, offload: _Offload
) -> float:
    """Time of the longest step, as far as it depends on `offload`; infinite if a sequence or the weight sync does not
    fit. A rough model, to compare two plans: decoding is bound by reading the weights, an update by arithmetic."""
    kv_cache_bytes = _auto_kv_cache_bytes(hardware, model, workload, offload)
    room = _activation_room_bytes(hardware, model, workload, engine_sleeps, fused, offload, kv_cache_bytes)
    per_token, checkpointed_per_token = (
        activation_bytes_per_token(model, checkpointing=checkpointing, fused=fused) for checkpointing in (False, True)
    )
    sequence_bytes, two_sequences_bytes = (kv_bytes(model, workload, sequences) for sequences in (1, 2))
    if room < max(workload.max_sequence_tokens * checkpointed_per_token, OPTIMIZER_STEP_BYTES):
        return math.inf
    if _kv_room_bytes(hardware, model, workload, offload) < sequence_bytes:
        return math.inf
    if offload.weights and _sync_bytes(model, workload, offload) > hardware.device_memory_bytes:
        return math.inf
    at_once = 1 + max(kv_cache_bytes - sequence_bytes, 0) // (two_sequences_bytes - sequence_bytes)
    waves = -(-workload.sequences_per_engine // at_once)
    decoding = waves * workload.max_response_tokens * engine_weight_bytes(model, workload) / _MEMORY_BYTES_PER_SECOND
    flops = 6 * model.parameters * workload.sequences_per_rank * workload.max_sequence_tokens
    recomputed = 4 / 3 if room < workload.max_sequence_tokens * per_token else 1.0
    copying = 0.0
    if offload.optimizer:
        tokens = _auto_micro_batch_tokens(model, workload, room, recomputed > 1, fused)
        micro_batches = -(-workload.sequences_per_rank * workload.max_sequence_tokens // tokens)
        copying += streamed_seconds(model, workload) + reference_seconds(model, workload, micro_batches)
    if offload.weights:
        reads_files = not _host_holds(hardware, model, workload, offload, frozen=True)
        copying += policy_offload_seconds(model, workload, optimizer_offload=offload.optimizer, reads_files=reads_files)
    return decoding + recomputed * flops / _FLOPS_PER_SECOND + copying


def _sync_bytes(model: ModelShape, workload: Workload, offload: _Offload) -> int:
    """Memory of a GPU in a weight sync: the weights of policy and engine, and no KV cache. Well known sizes."""
    policy = policy_state_bytes(model, workload, optimizer_offload=offload.optimizer) + POLICY_BESIDE_TORCH_BYTES
    engine = engine_weight_bytes(model, workload) + sleeping_engine_bytes(workload)
    return policy + engine + weight_sync_bytes(model, _auto_sync_bucket_bytes(model))


def _auto_kv_cache_bytes(hardware: Hardware, model: ModelShape, workload: Workload, offload: _Offload) -> int:
    """The need of the step's sequences at their longest, bounded by the memory left beside weights and policy.

    At least one sequence of the longest length, since vLLM starts with nothing less; in whole MiB.
    """
    needed = kv_bytes(model, workload, workload.sequences_per_engine)
    least = max(kv_bytes(model, workload, 1), _SMALLEST_KV_CACHE_BYTES)
    return -(-max(min(needed, _kv_room_bytes(hardware, model, workload, offload)), least) // MIB) * MIB


def _kv_room_bytes(hardware: Hardware, model: ModelShape, workload: Workload, offload: _Offload) -> int:
    """Memory left for the KV cache on one GPU of an engine while it generates, beside a policy's state there."""
    if hardware.device == "cpu":
        return int(hardware.host_memory_bytes * _CPU_ROLE_SHARE) // workload.engine_processes
    engine = engine_weight_bytes(model, workload) + awake_engine_bytes(workload)
    if workload.topology == "Disaggregated":
        own_gpu_bytes = hardware.engine_device_memory_bytes or hardware.device_memory_bytes
        return int(own_gpu_bytes * _USABLE) - engine
    policy = policy_state_bytes(model, workload, optimizer_offload=offload.optimizer) + POLICY_BESIDE_TORCH_BYTES
    if offload.weights:
        policy -= policy_weight_bytes(model, workload, optimizer_offload=offload.optimizer)
    return int(hardware.device_memory_bytes * _USABLE) - engine - policy


def _activation_room_bytes(
    hardware: Hardware,
    model: ModelShape,
    workload: Workload,
    engine_sleeps: bool,
    fused: bool,
    offload: _Offload,
    kv_cache_bytes: int,
) -> int:
    """Memory left for activations of one rank in an update, beside the logits of the smallest chunk."""
    if hardware.device == "cpu":
        return int(hardware.host_memory_bytes * _CPU_ROLE_SHARE) // workload.policy_ranks
    engine = 0
    if workload.topology == "Colocated":
        awake = engine_weight_bytes(model, workload) + awake_engine_bytes(workload) + kv_cache_bytes
        engine = sleeping_engine_bytes(workload) if engine_sleeps else awake
    state = policy_state_bytes(model, workload, optimizer_offload=offload.optimizer)
    policy = state + policy_update_bytes(model, workload)
    logits = _logprob_bytes(model, _LOGPROB_CHUNK_BYTES[0], fused)
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


def _logprob_bytes(model: ModelShape, chunk_bytes: int, fused: bool) -> int:
    """Peak memory of the log-probabilities of a chunk with `chunk_bytes` of logits."""
    copies_of_logits = logprob_bytes_per_token(model, fused=fused) / logits_bytes_per_token(model)
    return int(max(copies_of_logits, _LOGITS_OF_A_CHUNK) * chunk_bytes)


def _auto_sync_bucket_bytes(model: ModelShape) -> int:
    """A quarter of the weights, within 256 MiB and 1 GiB, but never less than the largest parameter; in whole MiB."""
    quarter = min(max(model.weight_bytes // 4, 256 * MIB), GIB)
    return -(-max(quarter, model.largest_parameter_bytes) // MIB) * MIB
