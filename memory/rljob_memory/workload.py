"""What a memory plan depends on: the machine, the model's shape, and what goes through the model in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rljob_api.topology import Topology


@dataclass(frozen=True, slots=True)
class Hardware:
    """`device_memory_bytes`: of one GPU, 0 on a CPU. `host_memory_bytes`: what the job may use of this machine's."""

    device: Literal["cpu", "cuda"]
    device_memory_bytes: int
    host_memory_bytes: int
    torch_version: str


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer. `parameters`: all of them, tied ones once. `bytes_per_parameter`: in the forward
    pass and in the engine (2 for bfloat16, 4 for float32)."""

    parameters: int
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    bytes_per_parameter: int

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.bytes_per_parameter

    @property
    def largest_parameter_bytes(self) -> int:
        """The embedding, or the output projection of the same shape."""
        return self.vocabulary * self.hidden * self.bytes_per_parameter


@dataclass(frozen=True, slots=True)
class Workload:
    """What goes through the model in a step, and how many processes share it.

    `policy_ranks`, `engines`: processes of each role, over all machines. `max_concurrent_sequences`: that one engine
    generates at a time, at most. `reference_model`: whether a frozen copy of the model is kept for the KL divergence.
    """

    prompts_per_step: int
    group_size: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_concurrent_sequences: int = 256
    policy_ranks: int = 1
    engines: int = 1
    tensor_parallel_size: int = 1
    reference_model: bool = False
    topology: Topology = "Colocated"

    @property
    def max_sequence_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def sequences_per_engine(self) -> int:
        """Sequences that an engine can have to hold at the same time."""
        prompts = -(-self.prompts_per_step // self.engines)
        return min(prompts * self.group_size, self.max_concurrent_sequences)

    @property
    def sequences_per_rank(self) -> int:
        return -(-self.prompts_per_step * self.group_size // self.policy_ranks)
