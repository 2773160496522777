"""Roles and resources from the pods of the workers."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.job import RLJobSpec
from rljob_api.roles import PolicySpec
from rljob_client.errors import BadInput, RunError
from rljob_trainer.hardware import Machine
from rljob_trainer.pods.worker_facts import WorkerFacts, ray_cpus, require_engine_here, role_hosts, worker_of
from rljob_trainer.runtime.placement import RoleHosts

GIB = 2**30


def worker(
    gpus: int = 0,
    *,
    host_gib: int = 64,
    cores: int = 8,
    image_for_gpus: bool = True,
    shared_memory_gib: int = 4,
    may_compile: bool = True,
    capability: tuple[int, int] | None = None,
) -> WorkerFacts:
    machine = Machine((80 * GIB,) * gpus, host_gib * GIB, cores, capability)
    return WorkerFacts(machine, "2.11.0", image_for_gpus, shared_memory_gib * GIB, may_compile)


def spec_of(policy: PolicySpec, **changes: Any) -> RLJobSpec:
    sections = {"model": {"uri": "file:///model"}, "task": {"name": "digits"}, "algorithm": {"steps": 5}}
    return RLJobSpec.model_validate({**sections, "policy": policy.model_dump(by_alias=True), **changes})


def hosts(policy: PolicySpec, *workers: WorkerFacts, **changes: Any) -> RoleHosts:
    names = [f"digits-policy-{index}" for index in range(policy.replicas)]
    names += [f"digits-rollout-{index}" for index in range(len(workers) - policy.replicas)]
    return role_hosts(spec_of(policy, **changes), workers, names)


def test_each_gpu_of_each_worker_gets_a_rank_and_its_engine() -> None:
    made = hosts(PolicySpec(replicas=2, gpus_per_replica=2), worker(2), worker(2))
    assert (made.device, made.ranks) == ("cuda", 4)
    assert made.bundles == (
        {"CPU": 2, "GPU": 1, "worker-0": 0.001},
        {"CPU": 2, "GPU": 1, "worker-0": 0.001},
        {"CPU": 2, "GPU": 1, "worker-1": 0.001},
        {"CPU": 2, "GPU": 1, "worker-1": 0.001},
    )
    assert made.machine.gpu_memory_bytes == (80 * GIB,) * 4


def test_a_worker_without_gpus_gets_one_of_each() -> None:
    made = hosts(PolicySpec(replicas=2, gpus_per_replica=0), worker(), worker())
    assert (made.device, made.ranks) == ("cpu", 2)
    assert made.bundles == ({"CPU": 2, "worker-0": 0.001}, {"CPU": 2, "worker-1": 0.001})


def test_a_workers_ray_has_room_for_all_its_bundles() -> None:
    policy = PolicySpec(replicas=1, gpus_per_replica=8)
    bundles = hosts(policy, worker(8)).bundles
    assert bundles is not None
    assert sum(bundle["CPU"] for bundle in bundles) <= ray_cpus(spec_of(policy), "policy")


def test_ranks_share_the_resources_of_the_smallest_worker() -> None:
    made = hosts(PolicySpec(replicas=2, gpus_per_replica=0), worker(host_gib=64, cores=16), worker(host_gib=8, cores=4))
    assert made.machine.host_memory_bytes // made.ranks == 8 * GIB
    assert made.machine.cores // made.ranks == 4


def test_settings_of_all_ranks_hold_in_every_worker() -> None:
    two = PolicySpec(replicas=2)
    assert hosts(two, worker(1), worker(1)).layers_compiled
    made = hosts(two, worker(1), worker(1, shared_memory_gib=1, may_compile=False))
    assert made.shared_memory_bytes == GIB
    assert not made.layers_compiled


def test_an_image_for_cpus_trains_on_the_cpu_with_as_many_ranks() -> None:
    made = hosts(PolicySpec(replicas=1, gpus_per_replica=2), worker(2, image_for_gpus=False))
    assert (made.device, made.ranks) == ("cpu", 2)
    assert made.bundles == ({"CPU": 2, "worker-0": 0.001},) * 2


def test_a_pod_that_sees_fewer_gpus_than_it_asked_for_is_named() -> None:
    with pytest.raises(RunError, match=r"expected 2 GPUs in pod digits-policy-1 .*, found 1; check the driver"):
        hosts(PolicySpec(replicas=2, gpus_per_replica=2), worker(2), worker(1))


APART: dict[str, Any] = {"topology": "Disaggregated", "rollout": {"replicas": 2, "gpusPerReplica": 2}}


def test_engines_get_the_gpus_of_the_rollout_pods() -> None:
    made = hosts(PolicySpec(replicas=1, gpus_per_replica=2), worker(2), worker(2), worker(2), **APART)
    assert (made.device, made.ranks, made.engine_processes) == ("cuda", 2, 4)
    assert [name for bundle in made.bundles or () for name in bundle if name.startswith("worker")] == [
        *["worker-0"] * 2,
        *["worker-1"] * 2,
        *["worker-2"] * 2,
    ]
    assert (len(made.machine.gpu_memory_bytes), len(made.engine_machine.gpu_memory_bytes)) == (2, 4)


def test_the_pod_of_an_engine_follows_those_of_the_policy() -> None:
    spec = spec_of(PolicySpec(replicas=3, gpus_per_replica=4), **APART)
    assert [worker_of(spec, "policy", rank) for rank in (0, 3, 4, 11)] == [0, 0, 1, 2]
    assert [worker_of(spec, "rollout", rank) for rank in (0, 1, 2, 3)] == [3, 3, 4, 4]
    colocated = spec_of(PolicySpec(replicas=3, gpus_per_replica=4))
    assert [worker_of(colocated, "rollout", rank) for rank in (0, 3, 4, 11)] == [0, 0, 1, 2]


def test_a_rollout_pod_with_too_few_gpus_is_named() -> None:
    with pytest.raises(RunError, match=r"2 GPUs in pod digits-rollout-1 \(rollout\.gpusPerReplica\), found 1"):
        hosts(PolicySpec(), worker(1), worker(2), worker(1), **APART)


def test_processes_of_an_engine_are_in_one_pod() -> None:
    on_cpus = {"topology": "Disaggregated", "rollout": {"replicas": 2, "gpusPerReplica": 0, "tensorParallelSize": 2}}
    spec = spec_of(PolicySpec(gpus_per_replica=0), **on_cpus)
    assert [worker_of(spec, "rollout", rank) for rank in (0, 1, 2, 3)] == [1, 1, 2, 2]
    made = hosts(PolicySpec(gpus_per_replica=0), worker(), worker(), worker(), **on_cpus)
    assert (made.ranks, made.engine_processes, len(made.bundles or ())) == (1, 4, 5)
    assert ray_cpus(spec, "rollout") == 2 * ray_cpus(spec, "policy")
    colocated = spec_of(PolicySpec(replicas=2, gpus_per_replica=4), rollout={"tensorParallelSize": 4})
    assert [worker_of(colocated, "rollout", rank) for rank in (3, 4)] == [0, 1]


def test_a_worker_refuses_an_engine_that_its_gpus_cannot_run() -> None:
    colocated = spec_of(PolicySpec(), rollout={"kvCacheDtype": "Fp8"})
    require_engine_here(colocated, "policy", worker(1, capability=(9, 0)))
    for facts, found in ((worker(1, capability=(8, 0)), "8.0"), (worker(1, image_for_gpus=False), "vLLM on the CPU")):
        with pytest.raises(BadInput, match=rf"rollout\.kvCacheDtype: .*{found}"):
            require_engine_here(colocated, "policy", facts)
    apart = spec_of(PolicySpec(), topology="Disaggregated", rollout={"quantization": "Fp8PerTensor"})
    require_engine_here(apart, "policy", worker(1, capability=(8, 0)))
    with pytest.raises(BadInput, match=r"rollout\.quantization: expected Disabled on a GPU of compute capability 8\.0"):
        require_engine_here(apart, "rollout", worker(1, capability=(8, 0)))
