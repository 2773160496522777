"""Memory needs of a job's model, step and machine, reported by the trainer."""

from __future__ import annotations

from pydantic import Field

from rljob_api.api_model import ApiModel


class MemoryProfile(ApiModel):
    """Memory needs of model, step and machine. They do not change during a job, bound the memory plan, and predict the
    effect of a change. Sizes are bytes per GPU, or per process on the CPU."""

    policy_ranks: int = Field(ge=1)
    """Processes of the policy in all pods."""

    colocated: bool = True
    """True if policy and engines share the GPUs."""

    longest_sequence_tokens: int = Field(ge=1)
    """Tokens of the longest sequence, prompt and response: the smallest micro-batch."""

    rank_tokens: int = Field(default=0, ge=0)
    """Maximum tokens of a step that one rank trains on. 0: unknown."""

    smallest_kv_cache_bytes: int = Field(ge=0)
    """KV cache of one sequence of that length, in bytes. vLLM does not start with less."""

    largest_parameter_bytes: int = Field(ge=0)
    """Largest parameter, in bytes: the smallest buffer for the weight sync."""

    weight_bytes: int = Field(ge=0)
    """Weights of the engine, in bytes."""

    optimizer_bytes: int = Field(ge=0)
    """Optimizer state of one rank, in bytes."""

    activation_bytes_per_token: int = Field(ge=0)
    """Activations that the forward pass stores per token for the backward pass, in bytes."""

    checkpointed_activation_bytes_per_token: int = Field(ge=0)
    """Activations per token with activation checkpointing, in bytes."""

    logits_bytes_per_token: int = Field(ge=0)
    """Logits of one token over the vocabulary and their simultaneous copies, in bytes."""

    vocabulary: int = Field(default=0, ge=0)
    """Size of the vocabulary; a token's logits take 4 bytes per entry. 0: unknown."""

    device_total_bytes: int = Field(default=0, ge=0)
    """Memory of one GPU, in bytes. 0 on the CPU."""

    host_memory_bytes: int = Field(default=0, ge=0)
    """Host memory available to a worker, in bytes: its container's limit, or the machine's memory."""

    shared_memory_bytes: int = Field(default=0, ge=0)
    """Size of /dev/shm of a worker, in bytes."""
