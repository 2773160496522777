"""The controller waits for the pods of its workers, and places roles by the facts from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rljob_api.job import RLJobSpec
from rljob_api.roles import PolicySpec
from rljob_client.errors import BadInput, RunError
from rljob_memory.sample import MemorySample
from rljob_testing.patience import PATIENCE_SECONDS
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import SharedMemoryExhausted, WorkerLost
from rljob_trainer.hardware import Machine
from rljob_trainer.pods import pod_placement
from rljob_trainer.pods.environment import ControllerEnvironment
from rljob_trainer.pods.pod_placement import PodPlacement
from rljob_trainer.pods.worker_facts import WorkerFacts, ray_cpus, require_engine_here, role_hosts, workers_of_processes
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.stop_request import StopNow, StopRequest
from tests.unit.pods.pod_variables import pod_variables


class Agents:
    """Agents of three workers, of which the second is lost. `kills`: processes that the kernel killed in their pods."""

    kills: dict[int, int]

    def __init__(self, _workers: int) -> None:
        Agents.kills = {0: 2, 2: 1}

    def answers(self, _function: Callable[[], Any], _timeout_seconds: float) -> dict[int, int]:
        return self.kills


@pytest.fixture
def placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PodPlacement:
    monkeypatch.setattr(pod_placement, "WorkerAgents", Agents)
    environment = ControllerEnvironment.read(pod_variables(tmp_path, RLJOB_WORKERS="3"))
    return PodPlacement(environment, tmp_path / "log", lambda _samples: None)


def test_a_worker_that_answers_again_counts_with_its_new_kills(placement: PodPlacement) -> None:
    """Kills of long ago in a pod that comes back do not explain the next loss."""
    assert placement.workers_answer
    assert placement.oom_kills() == 3
    assert not placement.workers_answer, "pods are not restarted in place if one does not respond"
    seen = []
    for kills in ({0: 2, 1: 1, 2: 1}, {0: 2, 2: 1}, {0: 2, 1: 1, 2: 1}, {0: 2, 1: 0, 2: 1}, {0: 2, 1: 1, 2: 1}):
        Agents.kills = kills
        seen.append(placement.oom_kills())
    assert seen == [4, 4, 4, 4, 5], "the fourth is of a new container, in which the kernel then kills a process"


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


def test_host_memory_of_all_containers_is_looked_at_until_the_attempt_ends(
    placement: PodPlacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of the second worker does not answer."""
    seen: Queue[Mapping[str | None, MemorySample]] = Queue()
    sample = MemorySample(host_used_bytes=1, host_limit_bytes=2)
    agents = SimpleNamespace(call=lambda *_: [None] * 3, answers=lambda *_: {0: sample, 2: sample})
    monkeypatch.setattr(pod_placement, "LOOK_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(placement, "_on_host_memory", seen.put)
    monkeypatch.setattr(placement, "_connect", lambda: None)
    monkeypatch.setattr(placement, "_agents", agents)
    monkeypatch.setattr(placement, "_starting", SimpleNamespace(kill=lambda: None, wait=lambda: None), raising=False)
    monkeypatch.setattr(pod_placement, "_wait_for_workers", lambda *_: None)
    monkeypatch.setattr(pod_placement, "role_hosts", lambda *_: SimpleNamespace(device="cuda"))
    display = cast(RunDisplay, SimpleNamespace(phase=print, note=print))
    placement.survey(spec_of(PolicySpec(replicas=3)), display, cast(StopRequest, False))
    found = seen.get(timeout=PATIENCE_SECONDS)
    assert found.keys() == {None, "policy-0", "policy-2"}
    assert found["policy-2"] == sample
    placement.__exit__(None, None, None)
    assert placement._watch is not None
    assert not placement._watch.is_alive()


def wait(monkeypatch: pytest.MonkeyPatch, joins: dict[int, float], stop: object = False) -> tuple[float, list[str]]:
    """Wait for three workers. `joins`: the second at which they join. Returns the seconds that it took, and notes."""
    now, notes = [0.0], list[str]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def nodes() -> list[dict[str, Any]]:
        return [{"Resources": {f"worker-{worker}": 1}} for worker, at in joins.items() if at <= now[0]]

    monkeypatch.setattr(pod_placement, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(pod_placement, "_alive_nodes", nodes)
    pods = ["sums-policy-0", "sums-rollout-0", "sums-rollout-1"]
    pod_placement._wait_for_workers(pods, 1800.0, notes.append, cast(StopRequest, stop))
    return now[0], notes


def test_workers_are_waited_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, notes = wait(monkeypatch, {0: 1.0, 1: 20.0, 2: 100.0})
    assert waited == pytest.approx(100.0, abs=1.0)
    assert notes == [f"still waiting for sums-rollout-1 after {seconds} s" for seconds in (30, 90)]


def test_pods_that_never_come_or_a_stop_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "expected all workers to join within 1800 s, sums-rollout-0, sums-rollout-1 did not; check them with"
    with pytest.raises(WorkerLost, match=expected):
        wait(monkeypatch, {0: 1.0})
    with pytest.raises(StopNow):
        wait(monkeypatch, {0: 1.0}, stop=True)


GIB = 2**30


def worker(gpus: int = 0, *, host_gib: int = 64, cores: int = 8, capability: Any = None, **facts: Any) -> WorkerFacts:
    machine = Machine((80 * GIB,) * gpus, host_gib * GIB, cores, capability)
    usual = {"engine_needs_gpu": True, "shared_memory_bytes": 4 * GIB, "may_compile": True}
    return WorkerFacts(machine, "2.11.0", **usual | facts)


def policy(replicas: int = 1, gpus: int = 1) -> PolicySpec:
    return PolicySpec(replicas=replicas, gpus_per_replica=gpus)


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
    ("made", "ranks", "engines", "bundles"),
    [
        (hosts(policy(2, gpus=2), worker(2), worker(2)), 4, 4, bundles_on(0, 0, 1, 1, GPU=1)),
        (hosts(policy(2, gpus=0), worker(), worker()), 2, 2, bundles_on(0, 1)),
        (hosts(policy(gpus=2), worker(2, engine_needs_gpu=False)), 2, 2, bundles_on(0, 0)),
        (hosts(policy(gpus=2), worker(2), worker(2), worker(2), **APART), 2, 4, bundles_on(0, 0, 1, 1, 2, 2, GPU=1)),
        (hosts(policy(gpus=0), worker(), worker(), worker(), **ON_CPUS), 1, 4, bundles_on(0, 1, 1, 2, 2)),
    ],
    ids=["on GPUs", "on CPUs", "an image for CPUs", "apart on GPUs", "apart on CPUs"],
)
def test_each_gpu_gets_a_rank_or_an_engine_or_both(made: RoleHosts, ranks: int, engines: int, bundles: Any) -> None:
    assert (made.ranks, made.engine_processes, made.bundles) == (ranks, engines, bundles)
    assert made.device == ("cuda" if "GPU" in bundles[0] else "cpu")
    if made.device == "cuda":
        assert (len(made.machine.gpu_memory_bytes), len(made.engine_machine.gpu_memory_bytes)) == (ranks, engines)


def test_a_workers_ray_has_room_for_all_its_bundles() -> None:
    bundles = hosts(policy(gpus=8), worker(8)).bundles
    assert sum(bundle["CPU"] for bundle in bundles) <= ray_cpus(spec_of(policy(gpus=8)), "policy")
    apart = spec_of(policy(gpus=0), **ON_CPUS)
    assert ray_cpus(apart, "rollout") == 2 * ray_cpus(apart, "policy")


def test_settings_of_all_ranks_hold_in_every_worker() -> None:
    assert hosts(policy(2), worker(1), worker(1)).layers_compiled
    small = worker(1, host_gib=8, cores=4, shared_memory_bytes=GIB, may_compile=False)
    made = hosts(policy(2), worker(1), small)
    assert (made.machine.host_memory_bytes // made.ranks, made.machine.cores // made.ranks) == (8 * GIB, 4)
    assert (made.shared_memory_bytes, made.layers_compiled) == (GIB, False)


def test_a_pod_that_sees_fewer_gpus_than_it_asked_for_is_named() -> None:
    with pytest.raises(RunError, match=r"expected 2 GPUs in pod digits-policy-1 .*, found 1; check the driver"):
        hosts(policy(2, gpus=2), worker(2), worker(1))
    with pytest.raises(RunError, match=r"2 GPUs in pod digits-rollout-1 \(rollout\.gpusPerReplica\), found 1"):
        hosts(policy(), worker(1), worker(2), worker(1), **APART)


@pytest.mark.parametrize(
    ("spec", "of_policy", "of_rollout"),
    [
        (spec_of(policy(3, gpus=4), **APART), {0: 0, 3: 0, 4: 1, 11: 2}, {0: 3, 1: 3, 2: 4, 3: 4}),
        (spec_of(policy(3, gpus=4)), {0: 0, 3: 0, 4: 1, 11: 2}, {0: 0, 3: 0, 4: 1, 11: 2}),
        (spec_of(policy(gpus=0), **ON_CPUS), {0: 0}, {0: 1, 1: 1, 2: 2, 3: 2}),
        (spec_of(policy(2, gpus=4), rollout={"tensorParallelSize": 4}), {3: 0, 4: 1}, {3: 0, 4: 1}),
    ],
)
def test_the_pods_of_engines_follow_those_of_the_policy(
    spec: RLJobSpec, of_policy: dict[int, int], of_rollout: dict[int, int]
) -> None:
    """Pods by process. Those of an engine are in one pod."""
    workers = workers_of_processes(spec)
    assert {rank: workers[f"policy-{rank}"] for rank in of_policy} == of_policy
    assert {rank: workers[f"rollout-{rank}"] for rank in of_rollout} == of_rollout


def test_a_worker_refuses_an_engine_that_its_gpus_cannot_run() -> None:
    colocated = spec_of(policy(), rollout={"kvCacheDtype": "Fp8"})
    require_engine_here(colocated, "policy", worker(1, capability=(9, 0)))
    older = worker(1, capability=(8, 0))
    for facts, found in ((older, "8.0"), (worker(1, engine_needs_gpu=False), "vLLM on the CPU")):
        with pytest.raises(BadInput, match=rf"rollout\.kvCacheDtype: .*{found}"):
            require_engine_here(colocated, "policy", facts)
    apart = spec_of(policy(), topology="Disaggregated", rollout={"quantization": "Fp8PerTensor"})
    require_engine_here(apart, "policy", older)
    with pytest.raises(BadInput, match=r"rollout\.quantization: expected Disabled on a GPU of compute capability 8\.0"):
        require_engine_here(apart, "rollout", older)
