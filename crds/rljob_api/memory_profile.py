"""Memory needs of a job's model, step and machine, reported by the trainer."""

from __future__ import annotations

from rljob_api.api_model import ApiModel, Count, PositiveCount


class MemoryProfile(ApiModel):
    """Memory needs of model, step and machine. They do not change during a job, bound the memory plan, and predict the
    effect of a change. Sizes are bytes per GPU, or per process on the CPU."""

    policy_ranks: PositiveCount
    """Processes of the policy in all pods."""

    colocated: bool = True
    """True if policy and engines share the GPUs."""

    longest_sequence_tokens: PositiveCount
    """Tokens of the longest sequence, prompt and response: the smallest micro-batch."""

    rank_tokens: Count = 0
    """Maximum tokens of a step that one rank trains on. 0: unknown."""

    smallest_kv_cache_bytes: Count
    """KV cache of one sequence of that length, in bytes. vLLM does not start with less."""

    largest_parameter_bytes: Count
    """Largest parameter, in bytes: the smallest buffer for the weight sync."""

    weight_bytes: Count
    """Weights of the engine, in bytes."""

    optimizer_bytes: Count
    """Optimizer state of one rank that optimizerOffload moves to host memory, in bytes."""

    trained_bytes: Count = 0
    """Trained weights of one rank that stay on the GPU, with their gradients, in bytes. 0: unknown, taken as
    optimizerBytes."""

    smaller_moments_bytes: Count = 0
    """GPU memory of one rank that policy.optimizer.moments: bfloat16 would save, in bytes. 0: none, or unknown."""

    adapter_policy_bytes: Count = 0
    """Weights, gradients and optimizer state of one rank if the job trained adapters (policy.lora) of the default rank,
    in bytes. 0: the job already trains adapters, or unknown."""

    policy_weight_bytes: Count = 0
    """Weights of one rank that policyOffload moves to host memory, without a reference model, in bytes. 0: unknown."""

    activation_bytes_per_token: Count
    """Activations that the forward pass stores per token for the backward pass, in bytes."""

    checkpointed_activation_bytes_per_token: Count
    """Activations per token with activation checkpointing, in bytes."""

    logits_bytes_per_token: Count
    """Logits of one token over the vocabulary and their simultaneous copies, in bytes."""

    vocabulary: Count = 0
    """Size of the vocabulary; a token's logits take 4 bytes per entry. 0: unknown."""

    device_total_bytes: Count = 0
    """Memory of one GPU, in bytes. 0 on the CPU."""

    host_memory_bytes: Count = 0
    """Host memory available to a worker, in bytes: its container's limit, or the machine's memory."""

    predicted_host_memory_bytes: Count = 0
    """Host memory that a worker is predicted to need, in bytes. 0: unknown."""

    shared_memory_bytes: Count = 0
    """Size of /dev/shm of a worker, in bytes."""
