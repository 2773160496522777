"""What bounds the memory plan and says what a change of it frees: reported by the trainer, which sees the model."""

from __future__ import annotations

from pydantic import Field

from rljob_api.api_model import ApiModel


class MemoryProfile(ApiModel):
    """Facts of model, step and machine that do not change during a job. Bytes a GPU (a process, on the CPU)."""

    policy_ranks: int = Field(ge=1)
    """Processes of the policy, over all pods."""

    colocated: bool = True
    """Whether policy and engines share the GPUs."""

    longest_sequence_tokens: int = Field(ge=1)
    """Prompt and response at their longest: the smallest micro-batch."""

    rank_tokens: int = Field(default=0, ge=0)
    """Tokens of a step that one rank learns from, at most. 0: not known."""

    smallest_kv_cache_bytes: int = Field(ge=0)
    """The KV cache of one such sequence, which vLLM does not start without."""

    largest_parameter_bytes: int = Field(ge=0)
    """The smallest buffer for the weight sync."""

    weight_bytes: int = Field(ge=0)
    """The engine's weights."""

    optimizer_bytes: int = Field(ge=0)
    """The optimizer's state of one rank."""

    activation_bytes_per_token: int = Field(ge=0)
    """What the forward pass keeps of a token for the backward pass."""

    checkpointed_activation_bytes_per_token: int = Field(ge=0)
    """The same, with activation checkpointing."""

    logits_bytes_per_token: int = Field(ge=0)
    """A token's logits over the vocabulary, and all that is made of them at once."""

    vocabulary: int = Field(default=0, ge=0)
    """Entries of the vocabulary: a token's logits alone have 4 bytes for each. 0: not known."""

    device_total_bytes: int = Field(default=0, ge=0)
    """Memory of one GPU; 0 on the CPU."""

    host_memory_bytes: int = Field(default=0, ge=0)
    """Host memory that a worker may use: its container's limit, or the machine's memory."""

    shared_memory_bytes: int = Field(default=0, ge=0)
    """Size of /dev/shm where the workers run."""
