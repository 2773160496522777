"""The settings of the roles and of the loop, derived from the manifest and the memory plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.roles import PolicySpec
from rljob_api.status import Role
from rljob_memory.allocator import allocator_environment
from rljob_memory.workload import Hardware, ModelShape, Workload
from rljob_trainer.algorithm.loss_config import Aggregation, ImportanceSampling, LossConfig
from rljob_trainer.errors import BadInput
from rljob_trainer.hardware import Device
from rljob_trainer.models.checkpoint import ModelDimensions
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.roles.colocated import RoleSettings
from rljob_trainer.rollout.config import RolloutConfig, engine_environment
from rljob_trainer.runtime.controller import LoopSettings
from rljob_trainer.runtime.placement import RoleHosts

Dtype = Literal["float32", "bfloat16"]

_AGGREGATION: dict[str, Aggregation] = {"TokenMean": "token-mean", "SequenceMean": "sequence-mean"}
_IMPORTANCE_SAMPLING: dict[str, ImportanceSampling] = {"Truncate": "truncate", "Mask": "mask", "Disabled": "off"}

_LARGEST_AUTO_CONCURRENCY = 256

# Below this number of parameters, a second thread costs more in synchronization than it saves.
_ONE_THREAD_PARAMETERS = 10_000_000


def loop_settings(algorithm: AlgorithmSpec) -> LoopSettings:
    return LoopSettings(
        steps=algorithm.steps,
        prompts_per_step=algorithm.prompts_per_step,
        group_size=algorithm.group_size,
        scale_advantages=algorithm.scale_advantages == "Group",
        seed=algorithm.seed,
    )


def require_supported(spec: RLJobSpec) -> None:
    """Raise `BadInput` if the job uses a feature that this trainer does not support."""
    if spec.topology == "Disaggregated":
        raise BadInput(
            "topology: expected Colocated, since this trainer supports no other, found Disaggregated; "
            "write topology: Colocated"
        )
    if spec.rollout.tensor_parallel_size > 1:
        raise BadInput(
            "rollout.tensorParallelSize: expected 1, since this trainer runs one engine on each GPU, "
            f"found {spec.rollout.tensor_parallel_size}; write 1"
        )


def ranks_per_replica(policy: PolicySpec) -> int:
    """Policy ranks, and engines, in one replica: one per GPU, or one if it requests no GPU."""
    return max(policy.gpus_per_replica, 1)


def policy_ranks(policy: PolicySpec) -> int:
    return policy.replicas * ranks_per_replica(policy)


def require_lengths_fit(algorithm: AlgorithmSpec, dimensions: ModelDimensions) -> None:
    """Raise `BadInput` if prompt and response together can exceed the model's maximum length."""
    longest = algorithm.max_prompt_tokens + algorithm.max_response_tokens
    if longest > dimensions.max_positions:
        raise BadInput(
            "expected algorithm.maxPromptTokens + algorithm.maxResponseTokens to be at most "
            f"{dimensions.max_positions}, the maximum length of the model, found {longest}; lower them"
        )


def hardware_of(hosts: RoleHosts) -> Hardware:
    return Hardware(
        device=hosts.device,
        device_memory_bytes=min(hosts.machine.gpu_memory_bytes) if hosts.device == "cuda" else 0,
        host_memory_bytes=hosts.machine.host_memory_bytes,
        torch_version=hosts.torch_version,
    )


def shape_for_plan(dimensions: ModelDimensions, spec: RLJobSpec, device: Device) -> ModelShape:
    return ModelShape(
        parameters=dimensions.parameters,
        layers=dimensions.layers,
        hidden=dimensions.hidden,
        kv_heads=dimensions.kv_heads,
        head_dim=dimensions.head_dim,
        vocabulary=dimensions.vocabulary,
        bytes_per_parameter=2 if _dtype(spec, device) == "bfloat16" else 4,
    )


def workload_of(spec: RLJobSpec, ranks: int) -> Workload:
    algorithm = spec.algorithm
    return Workload(
        prompts_per_step=algorithm.prompts_per_step,
        group_size=algorithm.group_size,
        max_prompt_tokens=algorithm.max_prompt_tokens,
        max_response_tokens=algorithm.max_response_tokens,
        max_concurrent_sequences=max_concurrent_sequences(spec, ranks),
        policy_ranks=ranks,
        engines=ranks,
        reference_model=algorithm.kl_coefficient > 0,
    )


def max_concurrent_sequences(spec: RLJobSpec, engines: int) -> int:
    """Sequences that one engine generates concurrently. Auto: its share of the step, at most 256."""
    if spec.rollout.max_concurrent_sequences != "Auto":
        return spec.rollout.max_concurrent_sequences
    share = -(-spec.algorithm.prompts_per_step // engines) * spec.algorithm.group_size
    return min(share, _LARGEST_AUTO_CONCURRENCY)


def role_settings(
    spec: RLJobSpec,
    plan: MemoryPlan,
    *,
    model_dir: Path,
    output_dir: Path,
    hosts: RoleHosts,
    parameters: int,
    allocator_environments: Mapping[Role, Mapping[str, str]],
) -> RoleSettings:
    """The settings of both roles.

    `allocator_environments`: environment variables of the CUDA allocator by role. A role without an entry gets the
    defaults of `rljob_memory`.
    """
    device, ranks = hosts.device, hosts.ranks
    dtype = _dtype(spec, device)
    threads = _threads(parameters, ranks, hosts.machine.cores)

    def allocator(role: Role) -> Mapping[str, str]:
        given = allocator_environments.get(role)
        return allocator_environment(role, hosts.torch_version) if given is None else given

    return RoleSettings(
        ranks=ranks,
        policy=_policy_config(spec.algorithm, plan, model_dir, output_dir, device, dtype),
        rollout=_rollout_config(spec, plan, model_dir, device, dtype, ranks),
        policy_environment={**threads, **allocator("policy")},
        rollout_environment={**engine_environment(device), **threads, **allocator("rollout")},
        output_dir=output_dir,
        bundles=hosts.bundles,
    )


def _policy_config(
    algorithm: AlgorithmSpec, plan: MemoryPlan, model_dir: Path, output_dir: Path, device: Device, dtype: Dtype
) -> PolicyConfig:
    return PolicyConfig(
        model_dir=model_dir,
        output_dir=output_dir,
        device=device,
        dtype=dtype,
        learning_rate=algorithm.learning_rate,
        warmup_steps=algorithm.warmup_steps,
        adam_beta1=algorithm.adam_beta1,
        adam_beta2=algorithm.adam_beta2,
        weight_decay=algorithm.weight_decay,
        max_grad_norm=algorithm.max_grad_norm,
        temperature=algorithm.temperature,
        updates_per_step=algorithm.updates_per_step,
        seed=algorithm.seed,
        memory=plan,
        loss=LossConfig(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip or None,
            aggregation=_AGGREGATION[algorithm.loss_aggregation],
            importance_sampling=_IMPORTANCE_SAMPLING[algorithm.importance_sampling.mode],
            importance_sampling_cap=algorithm.importance_sampling.cap,
            kl_coefficient=algorithm.kl_coefficient,
            entropy_coefficient=algorithm.entropy_coefficient,
        ),
    )


def _rollout_config(
    spec: RLJobSpec, plan: MemoryPlan, model_dir: Path, device: Device, dtype: Dtype, engines: int
) -> RolloutConfig:
    algorithm = spec.algorithm
    return RolloutConfig(
        model_dir=model_dir,
        device=device,
        dtype=dtype,
        max_model_len=algorithm.max_prompt_tokens + algorithm.max_response_tokens,
        max_num_seqs=max_concurrent_sequences(spec, engines),
        kv_cache_bytes=plan.kv_cache_bytes,
        max_response_tokens=algorithm.max_response_tokens,
        sleep_level=plan.rollout_sleep_level,
        temperature=algorithm.temperature,
        ignore_eos=algorithm.ignore_end_of_sequence,
        seed=algorithm.seed,
        engine_args=spec.rollout.engine_args,
    )


def _dtype(spec: RLJobSpec, device: Device) -> Dtype:
    if spec.model.dtype != "Auto":
        return spec.model.dtype
    return "bfloat16" if device == "cuda" else "float32"


def _threads(parameters: int, ranks: int, cores: int) -> dict[str, str]:
    """Policy and engine take turns: each may use all cores, but must not spin while it waits."""
    count = 1 if parameters < _ONE_THREAD_PARAMETERS else max(1, cores // ranks)
    return {"OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "PASSIVE"}
