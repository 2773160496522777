"""GPU memory: the policy's state and update, the engine's weights and cache.

Sizes are of one rank, and of one GPU of an engine. The sources are papers, code, and measurements on H200s with torch
2.11 and vLLM 0.26 (`bench/results`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rljob_api.memory_plan import MemoryPlan
from rljob_memory.budget.lines import ALWAYS, UPDATE, Line, Phase, Pod
from rljob_memory.budget.setup import Setup
from rljob_memory.model_shape import ModelShape
from rljob_memory.sizes import GIB, MIB
from rljob_memory.workload import Workload

CONTEXT_BYTES = GIB
"""A process's CUDA context and code, and cuBLAS workspaces: 93.67 GB of a GPU were in use with 91.04 GB that torch had
reserved and an engine asleep (moments.json)."""

_NCCL_BYTES = GIB
"""NCCL buffers of a process in a group of several: 0.8 to 1 GiB (also vllm-project/vllm#51485, of engines that
sleep)."""

_SLEEPING_ENGINE_BYTES = int(1.5 * GIB)
"""An engine that sleeps at level 1 or 2: 1.3 GiB with CUDA graphs."""

_AWAKE_ENGINE_BYTES, _AWAKE_ENGINE_HIDDEN_UNIT_BYTES = int(0.6 * GIB), 590_000
"""An engine apart from its context, weights and KV cache: CUDA graphs and activations of a prefill, which grow with the
hidden size. 1.1 GB with 0.6B, 3.0 with 8B, and 3.0 with 14B on two GPUs (topologies.json, tensor_parallel.json)."""

_NUMBERS_A_HIDDEN_UNIT, _COMPILED_NUMBERS_A_HIDDEN_UNIT = 34, 22
"""Numbers that a layer keeps for the backward pass, per token and hidden unit."""

_COMPILED_INPUTS, _COMPILED_WIDTHS = 4, 3
"""Numbers that a compiled layer keeps: four as wide as its input, three as its queries, keys and MLP."""

_LOGITS_AT_ONCE, _COMPILED_LOGITS_AT_ONCE, _LOGITS_OF_A_COMPILATION = 6.75, 2.0, 3
"""Float32 tensors of the size of a chunk's logits that exist at once. Compiled: logits, their gradient in 16 bits, and
the gradient of the chunk before it; while the functions are compiled, the softmax too. Otherwise also the normalized
logits, the softmax, a mask, and three tensors on the way to the gradient: over a vocabulary of 151,936, an update
allocated 90.5 GB with chunks of 16,384 tokens, and reserved 60.9 GB with 8,192."""

_REDUCED_NUMBER_BYTES = 12
"""Bytes of each gradient of a layer while several ranks reduce it: at most 2 bytes in the weights' dtype, 2 of this
rank's float32 shard, 4 of the float32 input of the reduction, and 4 of that of the layer before, which may still
run."""

STREAMING_BYTES = int(1.5 * GIB)
"""An optimizer step whose state passes through the GPU, or is in 8 bits: three buckets of the state, and the masters of
one."""

_RELOADED_BUCKETS, _LOADING_BYTES = 2, 256 * MIB
"""Memory that an engine takes while it loads a bucket: buckets' worth if it quantizes the weights, which it otherwise
copies to their place, and always (plan_accuracy.json, 0.6B to 8B)."""

_MERGED_BUCKETS = 2
"""Buckets' worth of merged weights, and of memory that they leave in the allocator's cache: 8B with adapters of rank 16
reserved 3.1 GiB for buckets of 1.2 GiB (plan_accuracy.json)."""

_BFLOAT16_BYTES, _FLOAT32_BYTES = 2, 4

SMALLEST_KV_CACHE_BYTES, SMALLEST_BUCKET_BYTES = 64 * MIB, MIB
_OF_THE_SIZE_OF_LOGITS = 0.4, 2.2
"""Size of a request relative to a chunk's float32 logits: 0.5 in 16 bits, 2 for logits and a copy at once."""

_KV_BLOCK_TOKENS = 32
"""vLLM's blocks have 16 tokens on a GPU, 32 on a CPU."""


@dataclass(frozen=True)
class PolicyState:
    """Bytes of one rank's weights and of everything that an update changes, wherever they are.

    Per trained parameter 4 bytes for the float32 master and two moments, sharded over the ranks (Rajbhandari et al.
    2020, ZeRO, stage 3). A single rank splits the master into a bfloat16 weight and a remainder of 2 bytes. With
    adapters, the frozen weights are the reference model as well.
    """

    work: Workload
    model: ModelShape

    @cached_property
    def weights(self) -> int:
        """Trained weights in the form that a forward pass or FSDP2 reads."""
        return self._share(_BFLOAT16_BYTES if self._has_remainders else self.work.master_bytes)

    @cached_property
    def remainders(self) -> int:
        return self._share(self.work.master_bytes - _BFLOAT16_BYTES) if self._has_remainders else 0

    @cached_property
    def moments(self) -> int:
        return self._share(2 * self.work.moment_bytes)

    @cached_property
    def gradients(self) -> int:
        return self._share(self.work.master_bytes)

    @cached_property
    def casts(self) -> int:
        """Copies of float32 weights in 16 bits, which live until the backward pass."""
        each = _BFLOAT16_BYTES if self.work.casts_weights else 0
        return each * self.model.parameters // self.work.ranks_per_copy

    @cached_property
    def frozen(self) -> int:
        copies = 2 if self.work.casts_weights else 1
        return copies * self.model.frozen_bytes // self.work.ranks_per_copy

    @cached_property
    def reference(self) -> int:
        has_own = self.work.reference_model and not self.model.adapter_parameters
        copies = 2 if self.work.casts_weights else 1
        return copies * self.model.weight_bytes // self.work.ranks_per_copy if has_own else 0

    @property
    def optimizer(self) -> int:
        """The part that `optimizerOffload` moves to host memory, apart from the reference model."""
        return self.moments + self.remainders

    def offloaded_optimizer(self, plan: MemoryPlan) -> int:
        """The part of it that is in host memory: whole parameters, the embedding as the last and the head first."""
        share, largest = plan.optimizer_offload, self.model.largest_parameter_bytes / self.model.weight_bytes
        if share + largest > 1:
            share = 1.0
        return int(self.optimizer * (share and max(share, largest)))

    @property
    def changed(self) -> int:
        """All that an update changes, which a checkpoint stores: float32 masters and moments."""
        return self.weights + self.optimizer

    def offloaded_weights(self, plan: MemoryPlan) -> int:
        """The part that `policyOffload` moves to host memory while the engine generates."""
        return self.weights + self.frozen + (0 if offloads_reference(plan) else self.reference)

    @property
    def _has_remainders(self) -> bool:
        return self.work.policy_ranks == 1 and self.model.bytes_per_parameter == _BFLOAT16_BYTES

    def _share(self, bytes_per_parameter: float) -> int:
        return int(self.model.trained_parameters * bytes_per_parameter) // self.work.ranks_per_copy


def offloads_reference(plan: MemoryPlan) -> bool:
    """True if a reference model is in host memory. It leaves the GPU last: it passes it in each micro-batch, the
    optimizer's state once in an update."""
    return plan.optimizer_offload == 1


def gpu_lines(setup: Setup, plan: MemoryPlan) -> Iterator[Line]:
    """The lines of the GPUs; none without GPUs."""
    if setup.hardware.device == "cuda":
        lines = [*_state_lines(setup, plan), *_update_lines(setup, plan), *_engine_lines(setup, plan)]
        yield from lines
        if setup.work.keeps_cache or (setup.work.is_colocated and not plan.empty_cache):
            yield from _cache_lines(lines, ("sync",) if engine_sleeps(setup.work, plan) else ("sync", "rollout"))


def _cache_lines(lines: Sequence[Line], phases: Sequence[Phase]) -> Iterator[Line]:
    """The memory that an update leaves in the allocator, as far as the phase does not use it."""
    in_update = _total(lines, "update")
    for phase in phases:
        left = max(in_update - _total(lines, phase), 0)
        yield Line("policy", "cache of the update", "gpu", left, frozenset({phase}), "kept by torch's allocator")


def _total(lines: Sequence[Line], phase: Phase) -> int:
    return sum(line.bytes for line in lines if phase in line.phases)


def _state_lines(setup: Setup, plan: MemoryPlan) -> Iterator[Line]:
    work, model = setup.work, setup.model

    def line(use: str, size: int, reason: str, phases: frozenset[Phase] = ALWAYS, *, is_in_torch: bool = True) -> Line:
        return Line("policy", use, "gpu", size, phases, reason, is_in_torch=is_in_torch)

    state = PolicyState(work, model)
    makes_room = plan.policy_offload and engine_sleeps(work, plan)
    awake = ALWAYS - {"start", "rollout"} if makes_room else ALWAYS
    yield line("context", CONTEXT_BYTES, "CUDA context and workspaces", is_in_torch=False)
    if work.policy_ranks > 1:
        yield line("NCCL", _NCCL_BYTES, f"a group of {work.policy_ranks} ranks", is_in_torch=False)
    form = "bfloat16" if state.remainders else "float32, sharded"
    yield line("weights", state.weights, f"{form}, {model.trained_parameters:,} trained parameters", awake)
    yield line("frozen weights", state.frozen, "policy.lora", awake)
    kept = 1 - plan.optimizer_offload
    part = f", {kept:.0%} of them" if plan.optimizer_offload else ""
    yield line("masters", int(kept * state.remainders), f"the other 16 bits of float32 masters{part}")
    yield line("moments", int(kept * state.moments), f"AdamW, 2 × {work.moment_bytes:g} bytes{part}")
    if not offloads_reference(plan):
        yield line("reference model", state.reference, "algorithm.klCoefficient", awake)


def _update_lines(setup: Setup, plan: MemoryPlan) -> Iterator[Line]:
    work, model = setup.work, setup.model

    def line(use: str, size: int, reason: str, phase: Phase = "update") -> Line:
        return Line("policy", use, "gpu", size, frozenset({phase}), reason)

    state, compiled = PolicyState(work, model), setup.hardware.layers_compiled
    yield Line("policy", "gradients", "gpu", state.gradients, UPDATE, f"{work.master_bytes} bytes each")
    yield line("cast weights", state.casts, "autocast")
    for use, size in backward_buffers(work, model).items():
        yield line(use, size, "in each backward pass")
    tokens, chunk = filled_tokens(work, plan), filled_chunk_tokens(work, plan)
    each = activation_bytes_per_token(model, checkpointing=plan.activation_checkpointing, compiled=compiled)
    kind = "checkpointed" if plan.activation_checkpointing else "kept"
    yield line("activations", tokens * each, f"{tokens:,} tokens × {each:,} bytes, {kind}")
    yield line("logits", logits_bytes(model, chunk, compiled=compiled), f"{chunk:,} tokens × {model.vocabulary:,}")
    if plan.optimizer_offload or work.moment_bytes < _BFLOAT16_BYTES:
        yield line("streamed state", STREAMING_BYTES, "buckets of the optimizer's state", "optimizer")
    bucket = _bucket_bytes(model, plan)
    if work.policy_ranks > 1:
        layer = max(model.weight_bytes - model.largest_parameter_bytes, 0) // model.layers
        yield line(
            "gathered bucket", bucket + max(layer, model.largest_parameter_bytes), "a layer and a bucket", "sync"
        )
    is_kept = work.is_colocated and plan.weight_export == "ReservedBuffer"
    packed: frozenset[Phase] = ALWAYS if is_kept else frozenset({"sync"})
    buffers = _packed_buckets(work, model, plan) * bucket
    yield Line("policy", "packed buckets", "gpu", buffers, packed, f"weightExport {plan.weight_export}")
    if model.adapter_parameters:
        merged = _MERGED_BUCKETS * bucket + _FLOAT32_BYTES * model.hidden * max(model.intermediate, model.hidden)
        yield line("merged weights", merged, "a bucket of them, and one in float32", "sync")


def _engine_lines(setup: Setup, plan: MemoryPlan) -> Iterator[Line]:
    work, model = setup.work, setup.model
    pod: Pod = "policy" if work.is_colocated else "rollout"
    awake: frozenset[Phase] = frozenset({"start", "rollout"}) if engine_sleeps(work, plan) else ALWAYS
    asleep = ALWAYS - awake

    def line(use: str, size: int, phases: frozenset[Phase], reason: str) -> Line:
        return Line("engine", use, "gpu", size, phases, reason, pod)

    weights = engine_weight_bytes(work, model)
    yield replace(line("engine's context", CONTEXT_BYTES, awake, "CUDA context and workspaces"), is_in_torch=False)
    graphs = _AWAKE_ENGINE_BYTES + _AWAKE_ENGINE_HIDDEN_UNIT_BYTES * model.hidden
    yield line("CUDA graphs and prefill", graphs, awake, "vLLM")
    if computes_logits_in_float32(work, model):
        logits = float32_logits_bytes(model.vocabulary, work.sequences_per_engine) // 2
        yield line("engine's logits", logits, awake, "float32 in place of 16 bits")
    if asleep:
        kept = line("sleeping engine", _SLEEPING_ENGINE_BYTES, asleep, f"rolloutSleep {plan.rollout_sleep}")
        yield replace(kept, is_in_torch=False)
    if work.tensor_parallel_size > 1:
        nccl = line("engine's NCCL", _NCCL_BYTES, ALWAYS, "rollout.tensorParallelSize")
        yield replace(nccl, is_in_torch=False)
    kind = "8 bits" if work.quantized_weights else f"{model.bytes_per_parameter} bytes a parameter"
    yield line("engine's weights", weights, awake | {"sync"}, kind)
    buckets = (0 if work.is_colocated else 1) + (_RELOADED_BUCKETS if work.quantized_weights else 0)
    loaded = buckets * _bucket_bytes(model, plan) + _LOADING_BYTES
    yield line("loaded buckets", loaded, frozenset({"sync"}), "vLLM's load_weights")
    at_once = sequences_in(work, model, plan.kv_cache_bytes)
    yield line("KV cache", plan.kv_cache_bytes, awake, f"{at_once:,} × {work.max_sequence_tokens:,} tokens")


def computes_logits_in_float32(work: Workload, model: ModelShape) -> bool:
    """True if the engine's logits have more bits than its weights."""
    return model.bytes_per_parameter < _FLOAT32_BYTES and not work.quantized_weights


def float32_head_bytes(model: ModelShape) -> int:
    """The output projection in float32: the head's gradient, and on a CPU a copy of a head in 16 bits."""
    return _FLOAT32_BYTES * model.vocabulary * model.hidden


def _bucket_bytes(model: ModelShape, plan: MemoryPlan) -> int:
    """Weights that a sync sends at a time."""
    return max(min(plan.sync_bucket_bytes, model.weight_bytes), model.largest_parameter_bytes)


def _packed_buckets(work: Workload, model: ModelShape, plan: MemoryPlan) -> int:
    """Buffers of the size of a bucket in a sync: one that is broadcast, two that an engine on the same GPU reads in
    turn, or none, if it reads the weights of a single rank where they are."""
    if not work.is_colocated:
        return 1
    return 0 if work.policy_ranks == 1 and not model.adapter_parameters and not plan.policy_offload else 2


def engine_sleeps(work: Workload, plan: MemoryPlan) -> bool:
    """True if the engine leaves the GPU to the policy after it has generated."""
    return work.is_colocated and plan.rollout_sleep_level > 0


def compilation_bytes(work: Workload, model: ModelShape, plan: MemoryPlan) -> int:
    """GPU memory of a policy that compiles its layers before the first update: the passes of one layer and the head.

    Sums of gradients are dropped.
    """
    layer = activation_bytes_per_token(model, checkpointing=False, compiled=True) // model.layers
    logits = _LOGITS_OF_A_COMPILATION * float32_logits_bytes(model.vocabulary, plan.logprob_chunk_tokens)
    return sum(backward_buffers(work, model).values()) + plan.micro_batch_tokens * layer + logits


def backward_buffers(work: Workload, model: ModelShape) -> dict[str, int]:
    """Memory of one rank in a backward pass that does not depend on its tokens, by use.

    The head's gradient before it is added to the others: in float32 and in the weights' dtype. A single rank adds that
    of a bfloat16 matrix to its sum as it is computed, and so has none. With several ranks also the input of its
    reduction, the weights that FSDP2 has gathered at a time (embedding, output projection and two layers), and the
    gradients of a layer that are being reduced.
    """
    head = float32_head_bytes(model)
    buffers = {}
    if not model.adapter_parameters and not sums_matrices(work, model):
        buffers["gradient of the head"] = head + model.largest_parameter_bytes
    if work.policy_ranks > 1:
        layer = max(model.weight_bytes - model.largest_parameter_bytes, 0) // model.layers
        buffers["gathered weights"] = 2 * model.largest_parameter_bytes + 2 * layer
        buffers["gradients in reduction"] = _REDUCED_NUMBER_BYTES * model.trained_parameters // model.layers
        if not model.adapter_parameters:
            buffers["gradient of the head"] += head
    return buffers


def sums_matrices(work: Workload, model: ModelShape) -> bool:
    """True if the products of a backward pass add the gradients of matrices to their sums."""
    return work.policy_ranks == 1 and model.bytes_per_parameter < _FLOAT32_BYTES and not model.adapter_parameters


def activation_bytes_per_token(model: ModelShape, *, checkpointing: bool, compiled: bool) -> int:
    """Memory that a forward pass keeps for the backward pass, per token.

    Korthikanti et al. 2022 count 34 bytes per hidden unit and layer in 16 bits, without the attention matrix. RMSNorm
    in float32, rotary embeddings and gated MLPs that are not compiled make it 34 numbers: 36 were measured with Qwen3's
    shape (tests/data/oom, a job's ActivationSpike). Compiled layers keep less: 22.0 numbers with the shape of
    Qwen3-0.6B (memory_mitigation_cost.json), 16.8 with 8B, 17.7 with 14B (moments.json, large_models.json).
    With checkpointing each layer keeps only its input, and one layer at a time keeps everything.
    """
    numbers = _compiled_numbers(model) if compiled else _NUMBERS_A_HIDDEN_UNIT
    whole_layer = int(numbers * model.hidden) * model.bytes_per_parameter
    if not checkpointing:
        return model.layers * whole_layer
    return model.layers * model.hidden * model.bytes_per_parameter + whole_layer


def _compiled_numbers(model: ModelShape) -> float:
    if not model.heads or not model.intermediate:
        return _COMPILED_NUMBERS_A_HIDDEN_UNIT
    widths = model.attention_width + model.kv_heads * model.head_dim + model.intermediate
    return _COMPILED_INPUTS + _COMPILED_WIDTHS * widths / model.hidden


def filled_tokens(work: Workload, plan: MemoryPlan) -> int:
    """Tokens of the largest micro-batch: a budget above a rank's share of an update changes nothing. A sequence is
    never split."""
    share = work.sequences_per_update * work.max_sequence_tokens
    return min(max(plan.micro_batch_tokens, work.max_sequence_tokens), share)


def evenly_filled(work: Workload, plan: MemoryPlan) -> MemoryPlan:
    """The plan with the micro-batches of a step whose sequences all have the maximum length: as few as possible, and
    balanced. Shorter sequences may fill the budget of a micro-batch."""
    most = max(plan.micro_batch_tokens // work.max_sequence_tokens, 1)
    count = -(-work.sequences_per_update // most)
    tokens = -(-work.sequences_per_update // count) * work.max_sequence_tokens
    return plan.model_copy(update={"micro_batch_tokens": tokens})


def filled_chunk_tokens(work: Workload, plan: MemoryPlan) -> int:
    """Tokens whose logits exist at a time."""
    return min(plan.logprob_chunk_tokens, plan.micro_batch_tokens, work.sequences_per_update * work.max_sequence_tokens)


def float32_logits_bytes(vocabulary: int, tokens: int) -> int:
    """One tensor of logits."""
    return _FLOAT32_BYTES * vocabulary * tokens


def logits_bytes(model: ModelShape, tokens: int, *, compiled: bool) -> int:
    """Peak memory while the log-probabilities of a chunk and their gradient are computed."""
    at_once = _COMPILED_LOGITS_AT_ONCE if compiled else _LOGITS_AT_ONCE
    return int(at_once * float32_logits_bytes(model.vocabulary, tokens))


def is_of_logits(requested_bytes: int, model: ModelShape, tokens: int) -> bool:
    """True if a request is of the size of the logits of so many tokens."""
    least, most = _OF_THE_SIZE_OF_LOGITS
    logits = float32_logits_bytes(model.vocabulary, tokens)
    return least * logits <= requested_bytes <= most * logits


def engine_weight_bytes(work: Workload, model: ModelShape) -> int:
    """Weights of an engine on one GPU. If they are quantized, embedding and output projection are not."""
    weights = model.weight_bytes
    if work.quantized_weights:
        kept = min(2 * model.largest_parameter_bytes, weights)
        weights = kept + (weights - kept) // model.bytes_per_parameter
    return weights // work.tensor_parallel_size


def kv_bytes(work: Workload, model: ModelShape, sequences: int) -> int:
    """KV cache for `sequences` of the longest length on one GPU: keys and values of every layer, in vLLM's blocks."""
    blocks = -(-work.max_sequence_tokens // _KV_BLOCK_TOKENS) * sequences + 1  # vLLM keeps one empty
    return blocks * _KV_BLOCK_TOKENS * kv_bytes_per_token(work, model)


def smallest_kv_cache_bytes(work: Workload, model: ModelShape) -> int:
    """One sequence of the longest length, in whole MiB: vLLM starts with nothing less."""
    return -(-max(kv_bytes(work, model, 1), SMALLEST_KV_CACHE_BYTES) // MIB) * MIB


def kv_bytes_per_token(work: Workload, model: ModelShape) -> int:
    heads = -(-model.kv_heads // work.tensor_parallel_size)
    number = 1 if work.quantized_kv_cache else model.bytes_per_parameter
    return 2 * model.layers * heads * model.head_dim * number


def sequences_in(work: Workload, model: ModelShape, kv_cache_bytes: int) -> int:
    """Sequences of the longest length that a KV cache holds, at most those of the step, at least one."""
    one, two = (kv_bytes(work, model, sequences) for sequences in (1, 2))
    return min(1 + max(kv_cache_bytes - one, 0) // (two - one), work.sequences_per_engine)
