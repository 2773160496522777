"""The work of a step, and the number of processes that share it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rljob_api.job import RLJobSpec
from rljob_api.topology import Topology, worker_pods


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
    auto_engines: bool = False
    """The plan has `tensor_parallel_size`, and with it the number of engines (`rollout.tensorParallelSize: Auto`)."""
    reference_model: bool = False
    """A frozen copy of the model is kept for the KL divergence."""
    moment_bytes: float = 4
    """Size of each of AdamW's two moments of a parameter: 4 for float32, 2 for bfloat16, 1 + 4/256 for int8."""
    master_bytes: int = 4
    """Size of a trained weight with all its bits, and of its gradient; 2: another trainer trains in 16 bits."""
    casts_weights: bool = False
    """All weights, also frozen ones, are float32, and forward passes cast them, as in torch's autocast."""
    keeps_cache: bool = False
    """The allocator keeps the memory of an update until an engine wakes up, or always if none sleeps."""
    quantized_weights: bool = False
    """The engine keeps the weights of linear layers in 8 bits."""
    quantized_kv_cache: bool = False
    """The engine keeps keys and values in 8 bits."""
    topology: Topology = "Colocated"
    partial_rollout_prompts: int = 0
    """Prompts that the engines hold beyond those of the step."""
    updates_per_step: int = 1
    """Parts of a step's sequences, with an optimizer step after each."""
    overlaps: bool = False
    """The engines generate the next step during an update (`algorithm.maxStaleness`)."""
    policy_pods: int = 1
    """Pods of the policy, each on a machine of its own in the worst case."""
    policy_copies: int = 1
    """Copies of the policy's state (`MemoryPlan.policy_copies`)."""
    rollout_pods: int = 1
    """Pods of the engines; with topology Colocated, those of the policy."""
    kept_checkpoints: int = 2
    """Checkpoints that are kept (`checkpoint.keep`)."""
    exports_adapters: bool = False
    """The trained model is written as adapters alone."""
    kept_models: int = 1
    """Exported models that are on disk at the same time: the trained one, that of the best evaluation, and the latest
    of `checkpoint.exportEverySteps`; one of them is being written."""
    caches_model: bool = False
    """A model of the hub is cached on the checkpoints' volume."""
    caches_compiled_code: bool = True
    """Compiled code is kept on the checkpoints' volume."""

    @property
    def ranks_per_pod(self) -> int:
        return -(-self.policy_ranks // self.policy_pods)

    @property
    def ranks_per_copy(self) -> int:
        """Policy ranks that share one copy of the state."""
        return max(self.policy_ranks // self.policy_copies, 1)

    @property
    def engine_processes_per_pod(self) -> int:
        return -(-self.engine_processes // self.rollout_pods)

    @property
    def is_colocated(self) -> bool:
        return self.topology == "Colocated"

    def with_engines_of(self, tensor_parallel_size: int) -> Workload:
        """The same work with the same number of processes in engines of another size, in one if that is larger."""
        return self.with_engines(max(self.engine_processes // tensor_parallel_size, 1), tensor_parallel_size)

    def with_engines(self, engines: int, tensor_parallel_size: int) -> Workload:
        """The same work with other engines. Their concurrency follows if it is the automatic one."""
        most = self.max_concurrent_sequences
        held = self.prompts_per_step + self.partial_rollout_prompts
        if most == _auto_concurrency(held, self.group_size, self.engines):
            most = _auto_concurrency(held, self.group_size, engines)
        return replace(self, engines=engines, tensor_parallel_size=tensor_parallel_size, max_concurrent_sequences=most)

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
    def sequences_of_an_engine(self) -> int:
        """Sequences that one engine generates in a step."""
        return -(-self.prompts_per_step // self.engines) * self.group_size

    @property
    def sequences_per_rank(self) -> int:
        return -(-self.prompts_per_step * self.group_size // self.policy_ranks)

    @property
    def sequences_per_update(self) -> int:
        """Sequences of one rank between two optimizer steps."""
        return -(-self.sequences_per_rank // self.updates_per_step)


_LARGEST_AUTO_CONCURRENCY = 256

MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256}
"""A float32 scale for each 256 moments in 8 bits."""


def workload_of(spec: RLJobSpec) -> Workload:
    algorithm, pods = spec.algorithm, worker_pods(spec)
    size = spec.rollout.given_tensor_parallel_size
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
        auto_engines=spec.rollout.tensor_parallel_size == "Auto",
        reference_model=algorithm.kl_coefficient > 0,
        quantized_weights=spec.rollout.quantization != "Disabled",
        quantized_kv_cache=spec.rollout.kv_cache_dtype != "Auto",
        moment_bytes=MOMENT_BYTES[spec.policy.optimizer.moments],
        topology=spec.topology,
        updates_per_step=algorithm.updates_per_step,
        overlaps=algorithm.max_staleness > 0,
        policy_pods=pods[0].replicas,
        rollout_pods=pods[-1].replicas,
        kept_checkpoints=spec.checkpoint.keep,
        exports_adapters=spec.policy.lora is not None and spec.policy.lora.export == "Adapter",
        kept_models=_kept_models(spec),
        caches_model=spec.model.uri.startswith("hf://") and spec.model.cache is None,
        caches_compiled_code=spec.model.cache is None or not spec.model.cache.compiled,
    )


def _kept_models(spec: RLJobSpec) -> int:
    best = spec.evaluation is not None and spec.evaluation.keep_best
    of_steps = spec.checkpoint.keep_exports if spec.checkpoint.export_every_steps else 0
    replaced = 1 if best or of_steps else 0  # an earlier one, while the next is written
    return 1 + best + of_steps + replaced


def max_concurrent_sequences(spec: RLJobSpec, engines: int) -> int:
    """Sequences that one engine generates concurrently. Auto: its share of the step, at most 256."""
    if spec.rollout.max_concurrent_sequences != "Auto":
        return spec.rollout.max_concurrent_sequences
    prompts = spec.algorithm.prompts_per_step + spec.algorithm.partial_rollout_prompts
    return _auto_concurrency(prompts, spec.algorithm.group_size, engines)


def _auto_concurrency(prompts: int, group_size: int, engines: int) -> int:
    return min(-(-prompts // engines) * group_size, _LARGEST_AUTO_CONCURRENCY)
