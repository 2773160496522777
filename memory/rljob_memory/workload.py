"""Inputs of a memory plan: the machine, the shape of the model, and the work of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rljob_api.job import RLJobSpec
from rljob_api.topology import Topology, worker_pods


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine of a process."""

    device: Literal["cpu", "cuda"]
    device_memory_bytes: int
    """Memory of one GPU of the policy; 0 on a CPU."""
    host_memory_bytes: int
    """Host memory that the job may use."""
    torch_version: str
    engine_device_memory_bytes: int = 0
    """Memory of one GPU of the engines, if it differs from the policy's; 0: it does not."""


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
    heads: int = 0
    """Attention heads; 0: unknown."""
    intermediate: int = 0
    """Size of the gated MLP; 0: unknown."""
    adapter_parameters: int = 0
    """Parameters of low-rank adapters, which are trained instead of `parameters`. 0: there are none."""

    @property
    def trained_parameters(self) -> int:
        """Parameters with float32 values, gradients and optimizer state."""
        return self.adapter_parameters or self.parameters

    @property
    def frozen_bytes(self) -> int:
        """Weights beside the trained parameters: all, in the forward pass's dtype, if there are adapters."""
        return self.weight_bytes if self.adapter_parameters else 0

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
    """GPUs of an engine, or its processes on a CPU."""
    reference_model: bool = False
    """A frozen copy of the model is kept for the KL divergence."""
    moment_bytes: float = 4
    """Size of each of AdamW's two moments of a parameter: 4 for float32, 2 for bfloat16, 1 + 4/256 for int8."""
    quantized_weights: bool = False
    """The engine keeps the weights of linear layers in 8 bits."""
    quantized_kv_cache: bool = False
    """The engine keeps keys and values in 8 bits."""
    topology: Topology = "Colocated"
    partial_rollout_prompts: int = 0
    """Prompts that the engines hold beyond those of the step."""

    @property
    def engine_processes(self) -> int:
        return self.engines * self.tensor_parallel_size

    @property
    def max_sequence_tokens(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def sequences_per_engine(self) -> int:
        """Sequences that an engine holds at the same time, at most."""
        prompts = -(-(self.prompts_per_step + self.partial_rollout_prompts) // self.engines)
        return min(prompts * self.group_size, self.max_concurrent_sequences)

    @property
    def sequences_per_rank(self) -> int:
        return -(-self.prompts_per_step * self.group_size // self.policy_ranks)


_LARGEST_AUTO_CONCURRENCY = 256

_MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256}
"""A float32 scale for each 256 moments in 8 bits."""


def workload_of(spec: RLJobSpec) -> Workload:
    algorithm, pods = spec.algorithm, worker_pods(spec)
    size = spec.rollout.tensor_parallel_size
    ranks, engines = pods[0].processes, max(pods[-1].processes // size, 1)
    return Workload(
        prompts_per_step=algorithm.prompts_per_step,
        partial_rollout_prompts=algorithm.partial_rollout_prompts,
        group_size=algorithm.group_size,
        max_prompt_tokens=algorithm.max_prompt_tokens,
        max_response_tokens=algorithm.max_response_tokens,
        max_concurrent_sequences=max_concurrent_sequences(spec, engines),
        policy_ranks=ranks,
        engines=engines,
        tensor_parallel_size=size,
        reference_model=algorithm.kl_coefficient > 0,
        quantized_weights=spec.rollout.quantization != "Disabled",
        quantized_kv_cache=spec.rollout.kv_cache_dtype != "Auto",
        moment_bytes=_MOMENT_BYTES[spec.policy.optimizer.moments],
        topology=spec.topology,
    )


def max_concurrent_sequences(spec: RLJobSpec, engines: int) -> int:
    """Sequences that one engine generates concurrently. Auto: its share of the step, at most 256."""
    if spec.rollout.max_concurrent_sequences != "Auto":
        return spec.rollout.max_concurrent_sequences
    prompts = spec.algorithm.prompts_per_step + spec.algorithm.partial_rollout_prompts
    share = -(-prompts // engines) * spec.algorithm.group_size
    return min(share, _LARGEST_AUTO_CONCURRENCY)
