"""Estimates of memory before a job runs. Each names its source."""

from __future__ import annotations

from rljob_memory.sizes import GIB
from rljob_memory.workload import ModelShape, Workload

POLICY_BESIDE_TORCH_BYTES = 2 * GIB
"""A rank's CUDA context (about 0.5 GiB), NCCL buffers (about 1 GiB with more than one rank) and cuBLAS workspaces."""

_SLEEPING_ENGINE_BYTES = int(1.5 * GIB)
"""Memory of an engine that sleeps at level 1 or 2: 1.3 GiB measured on an H200 with vLLM 0.26 and CUDA graphs."""

_AWAKE_ENGINE_BYTES = 4 * GIB
"""Memory of an engine beside weights and KV cache: context, CUDA graphs (0.5–2 GiB) and activations of a prefill."""

_TENSOR_PARALLEL_BYTES = GIB
"""NCCL buffers of an engine on several GPUs, on each of them, also while it sleeps (vllm-project/vllm#51485)."""

_NUMBERS_A_HIDDEN_UNIT, _FUSED_NUMBERS_A_HIDDEN_UNIT = 34, 22
"""Numbers that a layer keeps for the backward pass, per token and hidden unit."""

_LOGITS_AT_ONCE, _FUSED_LOGITS_AT_ONCE = 6.75, 2.0
"""Float32 tensors of the size of a chunk's logits that exist at once (`rljob_trainer.algorithm.logprobs`)."""

_BFLOAT16_BYTES = 2

_STREAM_BYTES_PER_SECOND = 40e9
"""Each way, both ways at once, between pinned host memory and a GPU on PCIe 5: three quarters of one way alone."""

_FILE_BYTES_PER_SECOND = 5e9
"""Weights from the model's files to a GPU, if the files are in the page cache or in memory. Assumed, not measured."""

OPTIMIZER_STEP_BYTES = int(1.5 * GIB)
"""Memory of an optimizer step beside state and gradients: three buckets of the state and the masters of one."""

_KV_BLOCK_TOKENS = 32
"""vLLM's blocks have 16 tokens on a GPU, 32 on a CPU."""


def awake_engine_bytes(workload: Workload) -> int:
    """Memory of an engine on each of its GPUs, beside weights and KV cache."""
    return _AWAKE_ENGINE_BYTES + _tensor_parallel_bytes(workload)


def sleeping_engine_bytes(workload: Workload) -> int:
    """Memory that a sleeping engine keeps on each of its GPUs."""
    return _SLEEPING_ENGINE_BYTES + _tensor_parallel_bytes(workload)


def _tensor_parallel_bytes(workload: Workload) -> int:
    return _TENSOR_PARALLEL_BYTES if workload.tensor_parallel_size > 1 else 0


def policy_state_bytes(model: ModelShape, workload: Workload, *, optimizer_offload: bool) -> int:
    """Memory of one rank between updates: weights with their float32 masters, AdamW's moments, the reference model.

    Per trained parameter 4 bytes for the master and 4, 2 or 1 + 4/256 for each of two moments, sharded over the ranks
    (Rajbhandari et al. 2020, ZeRO, stage 3). A single rank splits the master into a bfloat16 weight and a remainder of
    2 bytes. With offload the moments, the remainders and the reference are in host memory. With low-rank adapters, the
    frozen weights are also the reference.
    """
    bytes_per_parameter = 4 + 2 * workload.moment_bytes
    if optimizer_offload:
        bytes_per_parameter -= _offloaded_bytes_per_parameter(model, workload)
    reference = 0 if optimizer_offload else reference_bytes(model, workload)
    return (
        model.frozen_bytes + int(model.trained_parameters * bytes_per_parameter) + reference
    ) // workload.policy_ranks


def policy_weight_bytes(model: ModelShape, workload: Workload, *, optimizer_offload: bool) -> int:
    """The part of `policy_state_bytes` that `policyOffload` moves to host memory: weights, and the reference model."""
    reference = 0 if optimizer_offload else reference_bytes(model, workload)
    return (trained_weight_bytes(model, workload) + model.frozen_bytes + reference) // workload.policy_ranks


def trained_weight_bytes(model: ModelShape, workload: Workload) -> int:
    """Trained weights as they are on the GPU, all ranks together: float32, or bfloat16 beside their remainders."""
    return (2 if _splits_masters(model, workload) else 4) * model.trained_parameters


def weight_sync_bytes(model: ModelShape, sync_bucket_bytes: int) -> int:
    """Memory that a sync adds for one rank: a bucket, gathered and packed, and a weight in float32 with its adapter."""
    merged = 4 * model.hidden * model.intermediate if model.adapter_parameters else 0
    return 2 * sync_bucket_bytes + merged


def policy_offload_seconds(
    model: ModelShape, workload: Workload, *, optimizer_offload: bool, reads_files: bool
) -> float:
    """Time that `policyOffload` adds to a step. Trained weights move both ways; the others only back to the GPU, from
    their copy in host memory or, with `reads_files`, from the model's files."""
    trained = trained_weight_bytes(model, workload) // workload.policy_ranks
    others = policy_weight_bytes(model, workload, optimizer_offload=optimizer_offload) - trained
    rate = _FILE_BYTES_PER_SECOND if reads_files else _STREAM_BYTES_PER_SECOND
    return 2 * trained / _STREAM_BYTES_PER_SECOND + others / rate


def policy_update_bytes(model: ModelShape, workload: Workload) -> int:
    """Memory that an update adds for one rank, without activations.

    float32 gradients, and the head's gradient before it is added to them: in float32 and in the weights' dtype. With
    several ranks, also the input of its reduction, and the weights that FSDP2 has gathered at a time: the root's
    (embedding and output projection) and two layers'.
    """
    gradients = 4 * model.trained_parameters // workload.policy_ranks
    float32_head = 4 * model.vocabulary * model.hidden
    if not model.adapter_parameters:
        gradients += float32_head + model.largest_parameter_bytes
    if workload.policy_ranks == 1:
        return gradients
    layer = max(model.weight_bytes - model.largest_parameter_bytes, 0) // model.layers
    reduction = 0 if model.adapter_parameters else float32_head
    return gradients + reduction + 2 * model.largest_parameter_bytes + 2 * layer


def optimizer_bytes(model: ModelShape, workload: Workload) -> int:
    """State that `optimizerOffload` moves to host memory, all ranks together: AdamW's moments, and remainders."""
    return int(_offloaded_bytes_per_parameter(model, workload) * model.trained_parameters)


def snapshot_bytes(model: ModelShape, workload: Workload) -> int:
    """Host memory of a copy of all that an update changes, all ranks together: float32 masters and AdamW's moments."""
    return int((4 + 2 * workload.moment_bytes) * model.trained_parameters)


def reference_bytes(model: ModelShape, workload: Workload) -> int:
    """The reference model, all ranks together: on the GPUs, or in host memory with `optimizerOffload`. 0 if there is
    none, or if it is the trained model without its adapters."""
    return model.weight_bytes if workload.reference_model and not model.adapter_parameters else 0


def trained_bytes(model: ModelShape, workload: Workload) -> int:
    """Trained weights that stay on the GPU with `optimizerOffload`, and their float32 gradients, all ranks together."""
    gradients = 4 * model.trained_parameters
    return snapshot_bytes(model, workload) - optimizer_bytes(model, workload) + gradients


def streamed_seconds(model: ModelShape, workload: Workload) -> float:
    """Time that `optimizerOffload` adds to each update: the state passes through the GPU, in and out at once."""
    return optimizer_bytes(model, workload) / workload.policy_ranks / _STREAM_BYTES_PER_SECOND


def reference_seconds(model: ModelShape, workload: Workload, micro_batches: int) -> float:
    """Time that a reference model in host memory (`optimizerOffload`) adds to an update: each micro-batch takes it
    through the GPU. FSDP2 overlaps none of it on a single GPU, where it gathers nothing (torch 2.11,
    `FSDPParamGroup.wait_for_unshard`); on several it may."""
    return micro_batches * reference_bytes(model, workload) / workload.policy_ranks / _STREAM_BYTES_PER_SECOND


def _offloaded_bytes_per_parameter(model: ModelShape, workload: Workload) -> float:
    return 2 * workload.moment_bytes + (2 if _splits_masters(model, workload) else 0)


def _splits_masters(model: ModelShape, workload: Workload) -> bool:
    return workload.policy_ranks == 1 and model.bytes_per_parameter == _BFLOAT16_BYTES


def activation_bytes_per_token(model: ModelShape, *, checkpointing: bool, fused: bool = False) -> int:
    """Memory that a forward pass keeps for the backward pass, per token.

    Korthikanti et al. 2022 count 34 bytes per hidden unit and layer in 16 bits, without the attention matrix. The
    unfused RMSNorm (float32), rotary embeddings and gated MLP of today's Hugging Face models make it 34 numbers: 36
    were measured with Qwen3's shape on an H200 (tests/data/oom, a job's ActivationSpike). `fused`: layers are compiled;
    then 22 were with the shape of Qwen3-0.6B (bench/results/memory_mitigation_cost.json, half the micro-batch), of
    which five are as wide as the layer's input, three as queries, as keys and values, and as the MLP.
    With checkpointing each layer keeps only its input, and one layer at a time keeps everything.
    """
    numbers = _fused_numbers(model) if fused else _NUMBERS_A_HIDDEN_UNIT
    whole_layer = int(numbers * model.hidden) * model.bytes_per_parameter
    if not checkpointing:
        return model.layers * whole_layer
    return model.layers * model.hidden * model.bytes_per_parameter + whole_layer


def _fused_numbers(model: ModelShape) -> float:
    if not model.heads or not model.intermediate:
        return _FUSED_NUMBERS_A_HIDDEN_UNIT
    widths = model.heads * model.head_dim + model.kv_heads * model.head_dim + model.intermediate
    return 5 + 3 * widths / model.hidden


def kv_bytes(model: ModelShape, workload: Workload, sequences: int) -> int:
    """KV cache for `sequences` of the longest length on one GPU: keys and values of every layer, in vLLM's blocks."""
    blocks = -(-workload.max_sequence_tokens // _KV_BLOCK_TOKENS) * sequences + 1  # vLLM keeps one empty
    heads = -(-model.kv_heads // workload.tensor_parallel_size)
    number = 1 if workload.quantized_kv_cache else model.bytes_per_parameter
    return blocks * _KV_BLOCK_TOKENS * 2 * model.layers * heads * model.head_dim * number


def engine_weight_bytes(model: ModelShape, workload: Workload) -> int:
    """Weights of an engine on one GPU. If they are quantized, embedding and output projection are not."""
    weights = model.weight_bytes
    if workload.quantized_weights:
        kept = min(2 * model.largest_parameter_bytes, weights)
        weights = kept + (weights - kept) // model.bytes_per_parameter
    return weights // workload.tensor_parallel_size


def logits_bytes_per_token(model: ModelShape) -> int:
    """Float32 logits of one token."""
    return 4 * model.vocabulary


def logprob_bytes_per_token(model: ModelShape, *, fused: bool) -> int:
    """Peak memory per token of a chunk while its log-probabilities and their gradient are computed.

    `fused`: logits, their gradient in 16 bits, and the gradient of the chunk before it. Otherwise, instead of the
    gradient, the normalized logits, the softmax, a mask, and three float32 tensors on the way to it: on an H200, over a
    vocabulary of 151,936, an update allocated 90.5 GB with chunks of 16,384 tokens, and reserved 60.9 GB with 8,192.
    """
    return int((_FUSED_LOGITS_AT_ONCE if fused else _LOGITS_AT_ONCE) * logits_bytes_per_token(model))
