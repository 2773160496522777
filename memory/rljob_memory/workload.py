"""Inputs of a memory plan: the machine, the shape of the model, and the work of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rljob_api.topology import Topology


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine of a process."""

    device: Literal["cpu", "cuda"]
    device_memory_bytes: int
    """Memory of one GPU; 0 on a CPU."""
    host_memory_bytes: int
    """Host memory that the job may use."""
    torch_version: str


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer."""

    parameters: int
    """All parameters; tied ones count once."""
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    bytes_per_parameter: int
    """In the forward pass and in the engine: 2 for bfloat16, 4 for float32."""

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.bytes_per_parameter

    @property
    def largest_parameter_bytes(self) -> int:
        """The embedding, or the output projection of the same shape."""
        return self.vocabulary * self.hidden * self.bytes_per_parameter


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of a step, and the number of processes that share it."""

    prompts_per_step: int
    group_size: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_concurrent_sequences: int = 256
    """Sequences that one engine generates at a time, at most."""
    policy_ranks: int = 1
    """Policy processes on all machines."""
    engines: int = 1
    """Rollout engines on all machines."""
    tensor_parallel_size: int = 1
    reference_model: bool = False
    """A frozen copy of the model is kept for the KL divergence."""
    topology: Topology = "Colocated"

    @property
    def max_sequence_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def sequences_per_engine(self) -> int:
        """Sequences that an engine holds at the same time, at most."""
        prompts = -(-self.prompts_per_step // self.engines)
        return min(prompts * self.group_size, self.max_concurrent_sequences)

    @property
    def sequences_per_rank(self) -> int:
        return -(-self.prompts_per_step * self.group_size // self.policy_ranks)
