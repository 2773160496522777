"""Estimates of memory before a job runs. Each names its source."""

from __future__ import annotations

from rljob_memory.sizes import GIB
from rljob_memory.workload import ModelShape, Workload

POLICY_BESIDE_TORCH_BYTES = 2 * GIB
"""A rank's CUDA context (about 0.5 GiB), NCCL buffers (about 1 GiB with more than one rank) and cuBLAS workspaces."""

SLEEPING_ENGINE_BYTES = int(1.5 * GIB)
"""Memory of an engine that sleeps at level 1 or 2: 1.3 GiB measured on an H200 with vLLM 0.26 and CUDA graphs."""

AWAKE_ENGINE_BYTES = 4 * GIB
"""Memory of an engine beside weights and KV cache: context, CUDA graphs (0.5–2 GiB) and activations of a prefill."""

_NUMBERS_A_HIDDEN_UNIT, _FUSED_NUMBERS_A_HIDDEN_UNIT = 34, 22
"""Numbers that a layer keeps for the backward pass, per token and hidden unit."""

_LOGITS_AT_ONCE, _FUSED_LOGITS_AT_ONCE = 6.75, 2.0
"""Float32 tensors of the size of a chunk's logits that exist at once (`rljob_trainer.algorithm.logprobs`)."""

_KV_BLOCK_TOKENS = 32
"""vLLM's blocks have 16 tokens on a GPU, 32 on a CPU."""


def policy_state_bytes(model: ModelShape, workload: Workload, *, optimizer_offload: bool) -> int:
    """Memory of one rank between updates: float32 weights, and AdamW's two moments unless offloaded.

    4 + 8 bytes per parameter, sharded over the ranks (Rajbhandari et al. 2020, ZeRO, stage 3), and 4 for the reference.
    """
    a_parameter = 4 + (0 if optimizer_offload else 8) + (4 if workload.reference_model else 0)
    return model.parameters * a_parameter // workload.policy_ranks


def policy_update_bytes(model: ModelShape, workload: Workload) -> int:
    """Memory that an update adds for one rank, without activations.

    float32 gradients, and the weights that FSDP2 has gathered at a time: the root's (embedding and output projection)
    and two layers'.
    """
    gradients = 4 * model.parameters // workload.policy_ranks
    layer = max(model.weight_bytes - model.largest_parameter_bytes, 0) // model.layers
    return gradients + 2 * model.largest_parameter_bytes + 2 * layer


def optimizer_bytes(model: ModelShape) -> int:
    """AdamW's two float32 moments, all ranks together."""
    return 8 * model.parameters


def activation_bytes_per_token(model: ModelShape, *, checkpointing: bool, fused: bool = False) -> int:
    """Memory that a forward pass keeps for the backward pass, per token.

    Korthikanti et al. 2022 count 34 bytes per hidden unit and layer in 16 bits, without the attention matrix. The
    unfused RMSNorm (float32), rotary embeddings and gated MLP of today's Hugging Face models make it 34 numbers: 36
    were measured with Qwen3's shape on an H200 (tests/data/oom, a job's ActivationSpike). `fused`: layers are compiled;
    then 22 were (bench/results/memory_mitigation_cost.json, half the micro-batch).
    With checkpointing each layer keeps only its input, and one layer at a time keeps everything.
    """
    numbers = _FUSED_NUMBERS_A_HIDDEN_UNIT if fused else _NUMBERS_A_HIDDEN_UNIT
    whole_layer = numbers * model.hidden * model.bytes_per_parameter
    if not checkpointing:
        return model.layers * whole_layer
    return model.layers * model.hidden * model.bytes_per_parameter + whole_layer


def kv_bytes(model: ModelShape, workload: Workload, sequences: int) -> int:
    """KV cache for `sequences` of the longest length on one GPU: keys and values of every layer, in vLLM's blocks."""
    blocks = -(-workload.max_sequence_tokens // _KV_BLOCK_TOKENS) * sequences + 1  # vLLM keeps one empty
    heads = -(-model.kv_heads // workload.tensor_parallel_size)
    return blocks * _KV_BLOCK_TOKENS * 2 * model.layers * heads * model.head_dim * model.bytes_per_parameter


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
