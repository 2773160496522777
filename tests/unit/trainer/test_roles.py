"""Roles of both topologies, on processes that only record their calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rljob_api.algorithm import AlgorithmSpec
from rljob_client.errors import RunError
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.errors import DeviceOutOfMemory, PhaseDeadlineExceeded, WorkerLost
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.roles import engine_processes, generation, role_processes
from rljob_trainer.roles import roles as roles_module
from rljob_trainer.roles.engine_processes import has_place
from rljob_trainer.roles.role_processes import RoleSettings
from rljob_trainer.roles.roles import Roles
from rljob_trainer.roles.topologies import ColocatedRoles, roles_of
from rljob_trainer.rollout.config import RolloutConfig
from rljob_trainer.rollout.lots import WholeGroups

TOPOLOGIES = ("Colocated", "Disaggregated")
BUNDLES = ({"CPU": 2, "worker-1": 0.001}, {"CPU": 2, "worker-2": 0.001}, {"CPU": 2, "worker-2": 0.001})
"""Engine 0 is in one pod, engines 1 and 2 in another."""


class SmallGpu:
    """Has room for 10 units: for the policy and the weights of an engine, or for these and a KV cache, but not for all
    three if the policy is to be offloaded."""

    def __init__(self, cache: int) -> None:
        self.held: dict[str, int] = {}
        policy, asleep = {"policy": 4}, {"weights": 0, "cache": 0}
        self._held_by_call = {
            "load": policy,
            "load_checkpoint": policy,
            "export_pretrained": policy,
            "offload_weights": {"policy": 0},
            "update": policy | {"activations": 6},
            "sync": policy | {"bucket": 3},
            "start": {"weights": 2, "cache": cache},
            "sleep": asleep,
            "wake_weights": {"weights": 2},
            "wake_kv_cache": {"cache": cache},
            "killed policy": {"policy": 0},
            "forget_policy": {"opened": 0},
            "killed rollout": asleep,
        }

    def during(self, call: str) -> None:
        if call == "killed policy" and self.held.get("weights") is not None:
            self.held["opened"] = self.held["policy"]  # by the engine, which keeps it allocated
        self.held |= self._held_by_call.get(call, {})
        assert sum(self.held.values()) <= 10, f"out of memory during {call}: {self.held}"
        assert call != "sync" or self.held["weights"], "the engine has no weights to write to"
        self.held |= {"activations": 0, "bucket": 0}


class Process:
    def __init__(self, machine: SimulatedMachine, name: str) -> None:
        self.machine, self.name = machine, name
        self.received: list[tuple[str, tuple[Any, ...]]] = []

    @property
    def actor(self) -> Process:
        return self

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return SimpleNamespace(remote=lambda *arguments: self.machine.called(self, method, arguments))


@dataclass
class SimulatedMachine:
    """Starts processes. A call to one ends at once, and stands for its result."""

    started: list[Process] = field(default_factory=list)
    killed: list[Process] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    """By process and method; an error is raised where the call is waited for."""
    waits: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    """Places that are not there."""
    lost_in_sync: dict[str, RunError] = field(default_factory=dict)
    """Failures of engines, each of which fails the sync, and places that are lost at that time."""
    lost_meanwhile: set[str] = field(default_factory=set)
    still_starting: set[str] = field(default_factory=set)
    now: float = 100.0
    gpu: SmallGpu | None = None

    def spawn(self, name: str, *_: Any) -> Process:
        self.started.append(Process(self, name))
        return self.started[-1]

    def kill(self, process: Process, no_restart: bool) -> None:
        self.killed.append(process)
        self._during(f"killed {process.name.partition('-')[0]}")

    def called(self, process: Process, method: str, arguments: tuple[Any, ...]) -> Any:
        process.received.append((method, arguments))
        self._during(method)
        if method == "sync":
            self.lost |= self.lost_meanwhile
            for engine in arguments[0]:
                if engine.name in self.lost_in_sync:
                    return self.lost_in_sync[engine.name].of(engine.name)
        default = {"rendezvous": ("host", 1), "load_checkpoint": None}.get(method, f"{method} of {process.name}")
        return self.results.get(f"{process.name} {method}", default)

    def _during(self, call: str) -> None:
        if self.gpu is not None:
            self.gpu.during(call)

    def wait_for(self, calls: dict[str, Any], doing: str) -> dict[str, Any]:
        self.waits.append(doing)
        for name, result in calls.items():
            if isinstance(result, RunError):
                raise result.of(result.actor or name)
        return calls

    def ended(self, calls: dict[str, Any]) -> dict[str, Any]:
        return {name: call for name, call in calls.items() if name not in self.still_starting}

    @property
    def synced(self) -> list[str]:
        """The engines of the last sync."""
        of_rank = [process for process in self.started if process.name == "policy-0"][-1]
        return [engine.name for engine in [args for method, args in of_rank.received if method == "sync"][-1][0]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimulatedMachine:
    machine = SimulatedMachine()
    monkeypatch.setattr(role_processes, "spawn", machine.spawn)
    monkeypatch.setattr(ray, "kill", machine.kill)
    monkeypatch.setattr(ray, "put", lambda given: given)
    for module in (engine_processes, generation, role_processes, roles_module):
        monkeypatch.setattr(module, "wait_for", machine.wait_for)
    monkeypatch.setattr(roles_module, "placement_group", lambda _bundles: None)
    monkeypatch.setattr(engine_processes, "has_place", lambda bundle: not machine.lost & set(bundle))
    monkeypatch.setattr(engine_processes, "_ended", machine.ended)
    monkeypatch.setattr(engine_processes, "time", SimpleNamespace(monotonic=lambda: machine.now))
    return machine


def settings(
    topology: Any, device: Any = "cpu", ranks: int = 1, engines: int = 1, size: int = 1, offload: bool = False
) -> RoleSettings:
    sleep_level: Any = 2 if device == "cuda" else 0
    rollout = RolloutConfig(
        *(Path("/model"), device, "bfloat16", 64, 8, 1 << 20, AlgorithmSpec(steps=1)),
        sleep_level=sleep_level,
        tensor_parallel_size=size,
    )
    policy: Any = SimpleNamespace(device=device, memory=memory_plan(policy_offload=offload), checkpoint_copy=None)
    return RoleSettings(
        topology, ranks, engines, policy, rollout, {}, {}, Path("/out"), ({"CPU": 2},) * (ranks + engines)
    )


def started(given: RoleSettings | Roles) -> Any:
    roles = given if isinstance(given, Roles) else roles_of(given, PartClock())
    roles.construct()
    roles.load()
    return roles


def allowed(_failure: WorkerLost) -> bool:
    return True


@pytest.mark.usefixtures("machine")
def test_only_colocated_processes_share_gpus_and_bundles() -> None:
    shared, apart = settings("Colocated", "cuda", ranks=2), settings("Disaggregated", "cuda", ranks=2)
    assert type(roles_of(shared, PartClock())) is ColocatedRoles
    assert type(roles_of(apart, PartClock())) is Roles
    assert (shared.gpus_per_process, shared.first_engine_bundle) == (0.5, 0)
    assert (apart.gpus_per_process, apart.first_engine_bundle) == (1.0, 2)
    assert settings("Disaggregated", "cpu").gpus_per_process == 0


@pytest.mark.parametrize("offload", [False, True])
def test_a_policy_and_its_engine_share_a_gpu_in_every_phase(
    machine: SimulatedMachine, offload: bool, tmp_path: Path
) -> None:
    gpu = machine.gpu = SmallGpu(cache=6 if offload else 4)
    roles = started(settings("Colocated", "cuda", offload=offload))
    first_wait = next(wait for wait in machine.waits if wait.startswith("loading"))
    assert first_wait == "loading the policy" + ("" if offload else " and starting the engine"), "side by side"
    for step in (0, 1):
        roles.sync(step)
        assert roles.engines_at == step
        assert gpu.held["weights"] > 0 < gpu.held["cache"]
        assert bool(gpu.held["policy"]) is not offload
        roles.update(SimpleNamespace(step=step + 1))
    roles.sync(2)
    roles.start_checkpoint(tmp_path)  # reads weights in host memory
    assert (roles.policy_at, roles.engines_at) == (2, 2)
    for uses_weights in (lambda: roles.load_checkpoint(tmp_path, 2), lambda: roles.export_pretrained(tmp_path)):
        uses_weights()
        assert (roles.policy_at, roles.engines_at) == (2, None if offload else 2)
        roles.sync(2)
    roles.end("policy")
    assert roles.engines_ended == 0, "they sleep before the next policy loads"
    roles.construct()
    roles.load()
    roles.sync(0)


def test_engines_that_cannot_be_put_to_sleep_end_with_the_policy(machine: SimulatedMachine) -> None:
    """A failed sync leaves their weights on the GPU, where the next policy would load and replay."""
    machine.gpu = SmallGpu(cache=4)
    roles = started(settings("Colocated", "cuda"))
    machine.results["policy-0 sync"] = DeviceOutOfMemory("")
    with pytest.raises(DeviceOutOfMemory):
        roles.sync(4)
    for _ in range(2):
        roles.end("policy")
        assert (roles.engines_ended, roles.engines_at) == (1, None)
        assert machine.gpu.held["weights"] == 0


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_engines_that_do_not_start_are_replaced_beside_a_policy_that_loads(
    machine: SimulatedMachine, topology: str
) -> None:
    machine.results["rollout-0 start"] = DeviceOutOfMemory("")
    with pytest.raises(DeviceOutOfMemory):
        started(roles := roles_of(settings(topology), PartClock()))
    machine.results.clear()
    roles.end("rollout")
    started(roles)
    assert (roles.up, roles.policy_at) == (True, 0)
    assert [method for method, _ in machine.started[0].received].count("load") == 1


@pytest.mark.parametrize(("topology", "device"), [("Colocated", "cpu"), ("Disaggregated", "cuda")])
def test_an_engine_that_shares_no_gpu_never_sleeps(machine: SimulatedMachine, topology: str, device: str) -> None:
    roles = started(settings(topology, device))
    for step in (0, 1):
        roles.sync(step)
        roles.update(SimpleNamespace(step=step + 1))
    [engine] = [process for process in machine.started if process.name == "rollout-0"]
    assert {method for method, _ in engine.received} == {"construct", "import_engine", "start"}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_damaged_checkpoint_leaves_an_unknown_policy(
    topology: str, machine: SimulatedMachine, tmp_path: Path
) -> None:
    roles = started(settings(topology, ranks=2))
    machine.results["policy-1 load_checkpoint"] = "__1_0.distcp is corrupt"
    assert (roles.load_checkpoint(tmp_path, 2), roles.policy_at) == ("__1_0.distcp is corrupt", None)
    machine.results.clear()
    assert (roles.load_checkpoint(tmp_path, 2), roles.policy_at) == (None, 2)


@pytest.mark.parametrize("is_undone", [True, False])
def test_a_failure_in_a_part_is_one_of_the_update(
    machine: SimulatedMachine, is_undone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_processes, "all_returned", lambda *_calls, **_limit: True)
    roles = started(settings("Disaggregated", ranks=2))
    machine.results["policy-1 update"] = DeviceOutOfMemory("")
    machine.results["policy-1 can_undo_update"] = is_undone
    adding = roles.add_part(SimpleNamespace(step=1), 0)
    assert roles.policy_at == 0, "it has not changed"
    del machine.results["policy-1 update"]
    with pytest.raises(DeviceOutOfMemory):
        roles.update(SimpleNamespace(step=1), 1, adding)
    assert (roles.policy_at, roles.policy.scattered) == (0 if is_undone else None, True)
    roles.rejoin_policy()
    [_, policy] = [process for process in machine.started if process.name.startswith("policy")]
    assert policy.received[-1] == ("rejoin", ("host", 1, True)), "it drops the part"


def test_parts_are_dropped_with_a_failed_rollout(machine: SimulatedMachine) -> None:
    roles = started(settings("Disaggregated"))
    roles.drop_parts(roles.add_part(SimpleNamespace(step=1), 0))
    [policy] = [process for process in machine.started if process.name == "policy-0"]
    assert policy.received[-1] == ("drop_update", ())
    machine.results["policy-0 update"] = DeviceOutOfMemory("")
    roles.drop_parts(roles.add_part(SimpleNamespace(step=1), 0))  # raises no second failure
    assert roles.policy_at == 0


def starts(processes: list[Process]) -> list[tuple[Any, ...]]:
    return [arguments for process in processes for method, arguments in process.received if method == "start"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    ("size", "lost", "replaced"), [(1, 2, [2]), (2, 0, [0, 1]), (2, 3, [2, 3]), (4, 2, [0, 1, 2, 3])]
)
def test_a_lost_process_is_replaced_with_those_of_its_engine(
    size: int, lost: int, replaced: list[int], topology: str, machine: SimulatedMachine
) -> None:
    roles = started(settings(topology, engines=8, size=size))
    before = list(machine.started)
    firsts = [f"rollout-{rank // size * size}" for rank in range(8)]
    ports = [(f"serve_store of {first}",) if size > 1 else () for first in firsts]
    assert starts(before) == ports, "processes of an engine meet at a port of its first"
    calls = replacement(roles)(WorkerLost("died").of(f"rollout-{lost}"))
    names = [f"rollout-{rank}" for rank in replaced]
    assert [process.name for process in machine.killed] == names, "peers wait for the lost one in a collective"
    new = machine.started[len(before) :]
    assert list(calls) == [process.name for process in new] == names
    assert [process.received[0][1][0] for process in new] == replaced, "a rank is constructed as before"
    assert starts(new) == [ports[rank] for rank in replaced]
    assert list(roles.engines.handles) == [f"rollout-{rank}" for rank in range(8)]


def replacement(roles: Any) -> Callable[[WorkerLost], dict[str, Any]]:
    """Begins to replace an engine that is lost during a generation."""
    roles.may_replace = allowed
    queue = generation.WorkQueue([1.0], concurrent_sequences=1)
    begin: Callable[[WorkerLost], dict[str, Any]] = roles.generate(
        1, queue, lambda places: WholeGroups(places, [[0]], 1, [0]), print
    ).replacement
    return begin


def in_pods(machine: SimulatedMachine, ranks: int = 1) -> Any:
    bundles = ({"CPU": 2, "worker-0": 0.001},) * ranks + BUNDLES
    roles = started(replace(settings("Disaggregated", ranks=ranks, engines=3), bundles=bundles))
    roles.policy_at, roles.engines_at = 4, 3
    machine.started = machine.started[:1]
    return roles


def new_engines(machine: SimulatedMachine) -> list[str]:
    return [process.name for process in machine.started[1:]]


def test_a_sync_continues_without_the_engines_of_a_lost_pod(machine: SimulatedMachine) -> None:
    roles, asked = in_pods(machine), list[WorkerLost]()

    def may_replace(failure: WorkerLost) -> bool:
        asked.append(failure)
        return True

    machine.lost = {"worker-2"}
    machine.lost_in_sync = {name: WorkerLost("died") for name in ("rollout-1", "rollout-2")}
    roles.may_replace = may_replace
    roles.sync(4)
    assert (machine.synced, roles.engines_at) == (["rollout-0"], 4)
    assert [(failure.actor, failure.place_lost) for failure in asked] == [("rollout-1", True), ("rollout-2", True)]
    machine.lost_in_sync = {}
    roles.sync(5)
    assert new_engines(machine) == [], "their pod is not there"
    machine.lost.clear()
    roles.engines.start_returned()
    roles.engines.start_returned()
    assert new_engines(machine) == ["rollout-1", "rollout-2"]
    machine.still_starting = {"rollout-1", "rollout-2"}
    roles.sync(6)
    assert machine.synced == ["rollout-0"]
    machine.still_starting = {"rollout-1"}
    assert roles.engines.working == [("rollout-0",)], "the other has no weights before a sync"
    roles.sync(7)
    assert machine.synced == ["rollout-0", "rollout-2"]
    roles.end("rollout")
    roles.construct()
    assert len(roles.engines.working) == 3, "engines that all end are absent no more"


def test_several_ranks_leave_out_engines_that_were_lost_before_a_sync(machine: SimulatedMachine) -> None:
    roles = in_pods(machine, ranks=2)
    machine.lost = {"worker-2"}
    machine.lost_in_sync = {name: WorkerLost("died") for name in ("rollout-1", "rollout-2")}
    roles.may_replace = allowed
    roles.sync(4)
    assert machine.synced == ["rollout-0"], "it could not be repeated"
    machine.lost = {"worker-1", "worker-2"}
    with pytest.raises(WorkerLost, match="rollout-0 died with its pod"):
        roles.sync(5)


@pytest.mark.parametrize(
    ("lost", "failure", "pods_lost", "ranks", "replaced"),
    [
        ([1], WorkerLost, set(), 1, True),  # a process alone
        ([1], WorkerLost, {"worker-2"}, 2, True),  # the other rank waits in the sync
        ([1], WorkerLost, {"worker-2"}, 1, False),
        ([0, 1, 2], WorkerLost, {"worker-1", "worker-2"}, 1, True),
        ([1], PhaseDeadlineExceeded, {"worker-2"}, 1, True),
    ],
)
def test_otherwise_a_lost_engine_fails_the_sync(
    lost: list[int], failure: type[RunError], pods_lost: set[str], ranks: int, replaced: bool, machine: SimulatedMachine
) -> None:
    roles = in_pods(machine, ranks)
    machine.lost_in_sync, machine.lost_meanwhile = {f"rollout-{n}": failure("") for n in lost}, pods_lost
    roles.may_replace = lambda _failure: replaced
    with pytest.raises(WorkerLost):
        roles.sync(4)
    assert roles.engines_at is None


def test_a_replacement_waits_only_for_a_process_whose_pod_is_there(machine: SimulatedMachine) -> None:
    roles = in_pods(machine)
    begin = replacement(roles)
    assert begin(WorkerLost("died").of("rollout-0")) == {"rollout-0": "start of rollout-0"}
    assert roles.engines_at is None, "it has no weights"
    roles.engines_at = 3
    machine.lost = {"worker-2"}
    assert begin(WorkerLost("died").of("rollout-2")) == {}
    assert roles.engines_at == 3, "the others have theirs"
    assert roles.engines.working == [("rollout-0",), ("rollout-1",)]


@pytest.fixture
def without_engine_1(machine: SimulatedMachine) -> Any:
    """Roles whose engine 1 is absent, since its pod was lost."""
    roles = in_pods(machine)
    machine.lost = {"worker-2"}
    replacement(roles)(WorkerLost("died").of("rollout-1"))
    return roles


def test_a_pod_that_does_not_come_back_ends_the_attempt(without_engine_1: Any, machine: SimulatedMachine) -> None:
    machine.now += engine_processes.REJOIN_SECONDS - 1
    without_engine_1.sync(4)
    machine.now += 2
    with pytest.raises(WorkerLost, match="expected a new pod for rollout-1 within 1800 s") as raised:
        without_engine_1.sync(5)
    assert raised.value.actor == "rollout-1"


@pytest.mark.parametrize(
    ("failure", "pod_is_lost", "replaced", "starts_again"),
    [
        (WorkerLost, True, False, True),
        (WorkerLost, False, True, True),
        (WorkerLost, False, False, False),  # one that dies in each start would be started again and again
        (DeviceOutOfMemory, False, True, False),
    ],
)
def test_an_engine_that_fails_in_its_new_pod_may_start_again(
    failure: Any,
    pod_is_lost: bool,
    replaced: bool,
    starts_again: bool,
    without_engine_1: Any,
    machine: SimulatedMachine,
) -> None:
    machine.lost.clear()
    machine.results["rollout-1 start"] = failure("while starting")
    without_engine_1.engines.start_returned()
    machine.results.clear()
    machine.lost = {"worker-2"} if pod_is_lost else set()
    without_engine_1.may_replace = lambda _failure: replaced
    if not starts_again:
        with pytest.raises(failure):
            without_engine_1.sync(4)
        return
    without_engine_1.sync(4)
    assert ("rollout-1" in machine.synced) is not pod_is_lost
    machine.lost.clear()
    without_engine_1.engines.start_returned()
    assert new_engines(machine) == ["rollout-1", "rollout-1"]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([("worker-1", True, True)], True),
        ([("worker-1", True, False)], False),
        ([("worker-1", False, True)], False),
        ([("worker-2", True, True)], False),
        ([("worker-1", True, False), ("worker-1", True, True)], False),  # the new pod has joined before Ray knows
        ([("worker-1", False, False), ("worker-1", True, True)], True),
        ([], False),
    ],
)
def test_a_place_exists_if_all_nodes_that_claim_it_answer(
    nodes: list[tuple[str, bool, bool]], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nodes`: the place, whether Ray takes the node for alive, and whether it answers."""
    listed = [
        {"Resources": {name: 1, "CPU": 2}, "Alive": alive, "NodeManagerAddress": str(answers), "NodeManagerPort": 1}
        for name, alive, answers in nodes
    ]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    monkeypatch.setattr(engine_processes, "_answers", lambda host, _port: host == "True")
    assert has_place(BUNDLES[0]) == expected
    assert has_place({"CPU": 2, "GPU": 1}), "a place on this machine"
