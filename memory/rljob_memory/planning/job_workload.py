"""The work of a step, and the processes that share it, from a job's spec."""

from __future__ import annotations

from rljob_api.job import RLJobSpec
from rljob_api.topology import worker_pods
from rljob_memory.workload import Workload

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
