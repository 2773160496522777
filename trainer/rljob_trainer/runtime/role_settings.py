"""The settings of the roles, derived from the manifest and the memory plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.roles import LoraSpec
from rljob_api.status import Role
from rljob_memory.allocator import allocator_environment
from rljob_memory.workload import max_concurrent_sequences
from rljob_trainer.hardware import Device
from rljob_trainer.models.lora_targets import all_targets
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.roles.actor import JOB_VARIABLE
from rljob_trainer.roles.role_processes import RoleSettings
from rljob_trainer.rollout.config import RolloutConfig, engine_environment, peer_environment
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.requirements import KV_CACHE_DTYPE, QUANTIZATION

Dtype = Literal["float32", "bfloat16"]

# Below this number of parameters, a second thread costs more in synchronization than it saves.
_ONE_THREAD_PARAMETERS = 10_000_000


def role_settings(
    spec: RLJobSpec,
    plan: MemoryPlan,
    *,
    model_dir: Path,
    output_dir: Path,
    task_directory: Path = Path(),
    hosts: RoleHosts,
    parameters: int,
    allocator_environments: Mapping[Role, Mapping[str, str]],
    snapshots: bool = False,
    checkpoint_copy: bool = True,
    compile_ahead: bool = False,
    copy_frozen_weights: bool = True,
    job: str = "",
) -> RoleSettings:
    """The settings of both roles.

    `task_directory`: that of the user's Python modules, on the machines of the ranks.
    `snapshots`, `checkpoint_copy`, `copy_frozen_weights`: copies that policy ranks keep in host memory, to undo an
    update, for a checkpoint, and of weights that are not trained (`rljob_memory.budget.Copies`).
    `compile_ahead`: they compile while the engines start (`compiles_ahead`).
    `allocator_environments`: environment variables of the CUDA allocator by role. A role without an entry gets the
    defaults of `rljob_memory`. `job`: its name, for the titles of the processes.
    """
    device = hosts.device
    dtype = dtype_of(spec, device)
    named = {JOB_VARIABLE: job} if job else {}
    threads = _threads(parameters, max(hosts.ranks, hosts.engine_processes), hosts.machine.cores)

    def allocator(role: Role) -> Mapping[str, str]:
        given = allocator_environments.get(role)
        return allocator_environment(role, hosts.torch_version) if given is None else given

    return RoleSettings(
        topology=spec.topology,
        ranks=hosts.ranks,
        engine_processes=hosts.engine_processes,
        policy=PolicyConfig(
            model_dir=model_dir,
            output_dir=output_dir,
            device=device,
            dtype=dtype,
            algorithm=spec.algorithm,
            moments=spec.policy.optimizer.moments,
            lora=adapters(spec, model_dir),
            base_model=base_model(spec, model_dir),
            memory=plan,
            snapshots=snapshots,
            checkpoint_copy=checkpoint_copy,
            compile_ahead=compile_ahead,
            copy_frozen_weights=copy_frozen_weights,
            task_directory=task_directory,
        ),
        rollout=_rollout_config(spec, plan, model_dir, hosts, dtype),
        policy_environment={**named, **threads, **allocator("policy"), **nccl_environment(device, hosts.ranks)},
        rollout_environment={
            **named,
            **engine_environment(device),
            **peer_environment(device, plan.tensor_parallel_size),
            **threads,
            **allocator("rollout"),
        },
        output_dir=output_dir,
        bundles=hosts.bundles,
    )


def nccl_environment(device: Device, ranks: int) -> dict[str, str]:
    """Variables with which several ranks survive that NCCL's communicators are aborted.

    torch's watchdog must not end the process; `_abort_process_group` and NVIDIA's nvidia-resiliency-ext require these.
    A hanging collective ends at the deadline of its phase.
    """
    if device == "cpu" or ranks == 1:
        return {}
    return {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "NCCL_NVLS_ENABLE": "0"}


def adapters(spec: RLJobSpec, model_dir: Path) -> LoraSpec | None:
    """Settings of the adapters, with their targets; None without. `model_dir`: the initial model."""
    if (lora := spec.policy.lora) is None:
        return None
    return lora.model_copy(update={"targets": lora.targets or list(all_targets(model_dir))})


def base_model(spec: RLJobSpec, model_dir: Path) -> str:
    """`PolicyConfig.base_model`. `model_dir`: the initial model."""
    return spec.model.uri.removeprefix("hf://") if spec.model.uri.startswith("hf://") else str(model_dir)


def _rollout_config(
    spec: RLJobSpec, plan: MemoryPlan, model_dir: Path, hosts: RoleHosts, dtype: Dtype
) -> RolloutConfig:
    algorithm = spec.algorithm
    return RolloutConfig(
        model_dir=model_dir,
        device=hosts.device,
        dtype=dtype,
        max_model_len=algorithm.max_prompt_tokens + algorithm.max_response_tokens,
        max_num_seqs=max_concurrent_sequences(spec, hosts.engine_processes // plan.tensor_parallel_size),
        kv_cache_bytes=plan.kv_cache_bytes,
        algorithm=algorithm,
        sleep_level=plan.rollout_sleep_level,
        quantization=QUANTIZATION[spec.rollout.quantization],
        kv_cache_dtype=KV_CACHE_DTYPE[spec.rollout.kv_cache_dtype],
        tensor_parallel_size=plan.tensor_parallel_size,
        engine_args=spec.rollout.engine_args,
    )


def dtype_of(spec: RLJobSpec, device: Device) -> Dtype:
    if spec.model.dtype != "Auto":
        return spec.model.dtype
    return "bfloat16" if device == "cuda" else "float32"


def _threads(parameters: int, ranks: int, cores: int) -> dict[str, str]:
    """Policy and engine take turns: each may use all cores, but must not spin while it waits."""
    count = 1 if parameters < _ONE_THREAD_PARAMETERS else max(1, cores // ranks)
    return {"OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "PASSIVE"}
