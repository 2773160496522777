"""The controller waits for the pods of its workers, and places roles by the facts from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rljob_api.job import RLJobSpec
from rljob_api.roles import PolicySpec
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import BadInput, SharedMemoryExhausted, TrainerError, WorkerLost
from rljob_trainer.hardware import Machine
from rljob_trainer.pods import pod_placement
from rljob_trainer.pods.environment import ControllerEnvironment
from rljob_trainer.pods.pod_placement import PodPlacement
from rljob_trainer.pods.worker_facts import WorkerFacts, ray_cpus, require_engine_here, role_hosts, worker_of
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.stop_request import StopNow, StopRequest
from tests.unit.pods.pod_variables import pod_variables


class Agents:
    """Agents of three workers. Worker 1 is lost, and the kernel killed a process in the pod of worker 2."""

    kills: dict[int, int]

    def __init__(self, _workers: int) -> None:
        Agents.kills = {0: 0, 2: 1}

    def answers(self, _function: Callable[[], Any], _timeout_seconds: float) -> dict[int, int]:
        return self.kills


@pytest.fixture
def placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PodPlacement:
    monkeypatch.setattr(pod_placement, "WorkerAgents", Agents)
    environment = ControllerEnvironment.read(pod_variables(tmp_path, RLJOB_WORKERS="3"))
    return PodPlacement(environment, tmp_path / "log")


def test_kills_are_counted_beside_a_lost_worker(placement: PodPlacement) -> None:
    assert placement.workers_answer
    assert placement.oom_kills() == 1
    assert not placement.workers_answer, "pods are not restarted in place if one does not respond"


def test_a_worker_that_answers_again_counts_with_its_new_kills(placement: PodPlacement) -> None:
    """Kills of long ago in a pod that comes back do not explain the next loss."""
    seen = []
    for kills in ({0: 2, 1: 1, 2: 0}, {0: 2, 2: 0}, {0: 2, 1: 1, 2: 0}, {0: 2, 1: 0, 2: 0}, {0: 2, 1: 1, 2: 0}):
        Agents.kills = kills
        seen.append(placement.oom_kills())
    assert seen == [3, 3, 3, 3, 4], "the fourth is of a new container, in which the kernel then kills a process"


def test_a_dev_shm_that_is_too_small_is_attributed_to_a_process_of_its_pod(
    placement: PodPlacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    def node(memory: int, **resources: float) -> dict[str, Any]:
        return {"Resources": {"object_store_memory": memory, **resources}}

    def blamed(*nodes: dict[str, Any]) -> str | None:
        monkeypatch.setattr(pod_placement, "_alive_nodes", lambda: list(nodes))
        with pytest.raises(SharedMemoryExhausted, match=r"expected 640 MiB .*, found 576 MiB") as raised:
            placement.start_ray(cast(RunDisplay, None), 640 << 20)
        return raised.value.actor

    monkeypatch.setattr(placement, "_connect", lambda: None)
    monkeypatch.setattr(placement, "_agents", SimpleNamespace(call=lambda *_: [None] * 3))
    monkeypatch.setattr(pod_placement, "_wait_for_workers", lambda *_: None)
    monkeypatch.setattr(pod_placement, "role_hosts", lambda *_: SimpleNamespace(device="cuda"))
    display = cast(RunDisplay, SimpleNamespace(phase=print, note=print))
    placement.survey(spec_of(PolicySpec(replicas=3)), display, cast(StopRequest, False))
    head, enough, small = node(1 << 30), node(1 << 30, **{"worker-0": 1}), node(576 << 20, **{"worker-2": 1})
    assert blamed(head, enough, small) == "policy-2"
    assert blamed(node(576 << 20), enough) is None, "the controller"


PODS = ["sums-policy-0", "sums-rollout-0", "sums-rollout-1"]


class Time:
    """A clock that workers join by: `joins` maps their numbers to the second at which they do."""

    def __init__(self, joins: dict[int, float]) -> None:
        self.now, self._joins = 0.0, joins

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Resources": {f"worker-{worker}": 1}} for worker, at in self._joins.items() if at <= self.now]


def wait(monkeypatch: pytest.MonkeyPatch, joins: dict[int, float], stop: object = False) -> tuple[float, list[str]]:
    """Seconds that the wait took, and its notes."""
    time, notes = Time(joins), list[str]()
    monkeypatch.setattr(pod_placement, "time", SimpleNamespace(monotonic=time.monotonic, sleep=time.sleep))
    monkeypatch.setattr(pod_placement, "_alive_nodes", time.nodes)
    pod_placement._wait_for_workers(PODS, 1800.0, notes.append, cast(StopRequest, stop))
    return time.now, notes


def test_workers_are_waited_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, notes = wait(monkeypatch, {0: 1.0, 1: 20.0, 2: 100.0})
    assert waited == pytest.approx(100.0, abs=1.0)
    assert notes == [f"still waiting for sums-rollout-1 after {seconds} s" for seconds in (30, 90)]


def test_rollout_pods_that_never_come_end_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "expected all workers to join within 1800 s, sums-rollout-0, sums-rollout-1 did not; check them with"
    with pytest.raises(WorkerLost, match=expected):
        wait(monkeypatch, {0: 1.0})


def test_a_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StopNow):
        wait(monkeypatch, {0: 1.0}, stop=True)


# --- facts from the workers ---

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


def bundles_on(*pods: int, **gpus: float) -> tuple[dict[str, float], ...]:
    return tuple({"CPU": 2, **gpus, f"worker-{pod}": 0.001} for pod in pods)


APART: dict[str, Any] = {"topology": "Disaggregated", "rollout": {"replicas": 2, "gpusPerReplica": 2}}
ON_CPUS = {"topology": "Disaggregated", "rollout": {"replicas": 2, "gpusPerReplica": 0, "tensorParallelSize": 2}}


@pytest.mark.parametrize(
    ("policy", "workers", "changes", "ranks", "engine_processes", "bundles"),
    [
        ((2, 2), [worker(2), worker(2)], {}, 4, 4, bundles_on(0, 0, 1, 1, GPU=1)),
        ((2, 0), [worker(), worker()], {}, 2, 2, bundles_on(0, 1)),
        ((1, 2), [worker(2, image_for_gpus=False)], {}, 2, 2, bundles_on(0, 0)),  # an image for CPUs
        ((1, 2), [worker(2)] * 3, APART, 2, 4, bundles_on(0, 0, 1, 1, 2, 2, GPU=1)),
        ((1, 0), [worker()] * 3, ON_CPUS, 1, 4, bundles_on(0, 1, 1, 2, 2)),
    ],
)
def test_each_gpu_gets_a_rank_or_an_engine_or_both(
    policy: tuple[int, int],
    workers: list[WorkerFacts],
    changes: dict[str, Any],
    ranks: int,
    engine_processes: int,
    bundles: Any,
) -> None:
    """`policy`: replicas, and GPUs of each. Of CPUs, as many processes are used as the pods would have GPUs."""
    replicas, gpus = policy
    made = hosts(PolicySpec(replicas=replicas, gpus_per_replica=gpus), *workers, **changes)
    assert (made.ranks, made.engine_processes, made.bundles) == (ranks, engine_processes, bundles)
    assert made.device == ("cuda" if "GPU" in bundles[0] else "cpu")
    if made.device == "cuda":
        assert len(made.machine.gpu_memory_bytes) == ranks
        assert len(made.engine_machine.gpu_memory_bytes) == engine_processes


def test_a_workers_ray_has_room_for_all_its_bundles() -> None:
    policy = PolicySpec(replicas=1, gpus_per_replica=8)
    bundles = hosts(policy, worker(8)).bundles
    assert bundles is not None
    assert sum(bundle["CPU"] for bundle in bundles) <= ray_cpus(spec_of(policy), "policy")
    apart = spec_of(PolicySpec(gpus_per_replica=0), **ON_CPUS)
    assert ray_cpus(apart, "rollout") == 2 * ray_cpus(apart, "policy")


def test_settings_of_all_ranks_hold_in_every_worker() -> None:
    two = PolicySpec(replicas=2)
    assert hosts(two, worker(1), worker(1)).layers_compiled
    made = hosts(two, worker(1), worker(1, host_gib=8, cores=4, shared_memory_gib=1, may_compile=False))
    assert (made.machine.host_memory_bytes // made.ranks, made.machine.cores // made.ranks) == (8 * GIB, 4)
    assert made.shared_memory_bytes == GIB
    assert not made.layers_compiled


def test_a_pod_that_sees_fewer_gpus_than_it_asked_for_is_named() -> None:
    with pytest.raises(TrainerError, match=r"expected 2 GPUs in pod digits-policy-1 .*, found 1; check the driver"):
        hosts(PolicySpec(replicas=2, gpus_per_replica=2), worker(2), worker(1))
    with pytest.raises(TrainerError, match=r"2 GPUs in pod digits-rollout-1 \(rollout\.gpusPerReplica\), found 1"):
        hosts(PolicySpec(), worker(1), worker(2), worker(1), **APART)


@pytest.mark.parametrize(
    ("policy", "changes", "ranks", "of_policy", "of_rollout"),
    [
        ((3, 4), APART, (0, 3, 4, 11), [0, 0, 1, 2], [3, 3, 4, 4]),
        ((3, 4), {}, (0, 3, 4, 11), [0, 0, 1, 2], [0, 0, 1, 2]),
        ((1, 0), ON_CPUS, (0,), [0], [1, 1, 2, 2]),
        ((2, 4), {"rollout": {"tensorParallelSize": 4}}, (0, 1, 3, 4), [0, 0, 0, 1], [0, 0, 0, 1]),
    ],
)
def test_the_pods_of_engines_follow_those_of_the_policy(
    policy: tuple[int, int],
    changes: dict[str, Any],
    ranks: tuple[int, ...],
    of_policy: list[int],
    of_rollout: list[int],
) -> None:
    """Processes of an engine are in one pod."""
    spec = spec_of(PolicySpec(replicas=policy[0], gpus_per_replica=policy[1]), **changes)
    assert [worker_of(spec, "policy", rank) for rank in ranks] == of_policy
    engines = range(4) if spec.topology == "Disaggregated" else ranks
    assert [worker_of(spec, "rollout", rank) for rank in engines] == of_rollout


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
