"""Engines whose pods are lost: the others continue, and the new engines join at a weight sync."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from rljob_client.errors import RunError
from rljob_trainer.errors import DeviceOutOfMemory, PhaseDeadlineExceeded, WorkerLost
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.roles import absent_engines
from rljob_trainer.roles.absent_engines import AbsentEngines, has_place
from rljob_trainer.roles.disaggregated import DisaggregatedRoles
from rljob_trainer.roles.role_processes import RoleProcesses, RoleResources

BUNDLES = ({"CPU": 2, "worker-1": 0.001}, {"CPU": 2, "worker-2": 0.001}, {"CPU": 2, "worker-2": 0.001})
"""Engine 0 is in one pod, engines 1 and 2 in another."""


def processes(count: int = 3) -> RoleProcesses:
    found = RoleProcesses("rollout", "module:Class", count, RoleResources(None, 0.0), Path("logs"))
    found._handles = {f"rollout-{rank}": cast(Any, f"handle-{rank}") for rank in range(count)}
    return found


@dataclass
class Pods:
    """The pods of a cluster, and the engines that start in them."""

    lost: set[str] = field(default_factory=set)
    started: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    failure: RunError | None = None
    now: float = 100.0

    def start(self, engine: tuple[str, ...]) -> dict[str, Any]:
        self.started += engine
        return dict.fromkeys(engine, "call")

    def ended_calls(self, calls: dict[str, Any]) -> dict[str, Any]:
        return {name: call for name, call in calls.items() if name in self.ended}

    def wait_for(self, calls: dict[str, Any], _doing: str) -> None:
        if calls and self.failure:
            raise self.failure


@pytest.fixture
def pods(monkeypatch: pytest.MonkeyPatch) -> Pods:
    found = Pods()
    monkeypatch.setattr(absent_engines, "has_place", lambda bundle: not found.lost & set(bundle))
    monkeypatch.setattr(absent_engines, "_ended", found.ended_calls)
    monkeypatch.setattr(absent_engines, "wait_for", found.wait_for)
    monkeypatch.setattr(absent_engines, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


@pytest.fixture
def engines() -> RoleProcesses:
    return processes()


@pytest.fixture
def absent(engines: RoleProcesses, pods: Pods) -> AbsentEngines:
    absent = AbsentEngines(engines, BUNDLES, pods.start)
    pods.lost = {"worker-2"}
    absent.add(("rollout-1",))
    return absent


def test_a_lost_process_is_told_from_a_lost_pod(absent: AbsentEngines) -> None:
    assert absent.is_lost_with_its_place(("rollout-2",))
    assert not absent.is_lost_with_its_place(("rollout-0",))


def test_an_engine_starts_when_its_pod_is_back_and_joins_at_a_sync(
    absent: AbsentEngines, engines: RoleProcesses, pods: Pods
) -> None:
    absent.take_in()
    assert pods.started == [], "its pod is not there"
    pods.lost.clear()
    absent.start_returned()
    absent.start_returned()
    assert pods.started == ["rollout-1"]
    absent.take_in()
    assert engines.working == [("rollout-0",), ("rollout-2",)], "it has not started yet"
    pods.ended = {"rollout-1"}
    absent.start_returned()
    assert ("rollout-1",) not in engines.working, "it has no weights before a sync"
    absent.take_in()
    assert engines.working == [("rollout-0",), ("rollout-1",), ("rollout-2",)]


def test_a_pod_that_does_not_come_back_ends_the_attempt(absent: AbsentEngines, pods: Pods) -> None:
    pods.now += absent_engines.REJOIN_SECONDS - 1
    absent.take_in()
    pods.now += 2
    with pytest.raises(WorkerLost, match="expected a new pod for rollout-1 within 1800 s") as raised:
        absent.take_in()
    assert raised.value.actor == "rollout-1"


def test_an_engine_that_is_lost_again_starts_again(absent: AbsentEngines, engines: RoleProcesses, pods: Pods) -> None:
    pods.lost.clear()
    absent.start_returned()
    pods.ended, pods.failure = {"rollout-1"}, WorkerLost("rollout-1 died while starting")
    pods.lost = {"worker-2"}
    absent.take_in()
    assert ("rollout-1",) not in engines.working
    pods.failure = None
    pods.lost.clear()
    absent.start_returned()
    assert pods.started == ["rollout-1", "rollout-1"]


def test_a_process_lost_in_its_new_pod_starts_again_only_if_it_may(absent: AbsentEngines, pods: Pods) -> None:
    """Otherwise an engine that dies in each start would be started again for ever."""
    pods.lost.clear()
    absent.start_returned()
    pods.ended, pods.failure = {"rollout-1"}, WorkerLost("rollout-1 died while starting")
    with pytest.raises(WorkerLost):
        absent.take_in(lambda _failure: False)
    absent.take_in(allowed)
    assert pods.started == ["rollout-1", "rollout-1"]


def test_an_engine_that_does_not_fit_in_its_new_pod_is_a_failure(absent: AbsentEngines, pods: Pods) -> None:
    pods.lost.clear()
    absent.start_returned()
    pods.ended, pods.failure = {"rollout-1"}, DeviceOutOfMemory("CUDA out of memory").of("rollout-1")
    with pytest.raises(DeviceOutOfMemory):
        absent.take_in()


def test_engines_that_all_end_are_forgotten(absent: AbsentEngines, engines: RoleProcesses) -> None:
    absent.forget()
    assert len(engines.working) == 3


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
def test_a_place_is_there_if_all_nodes_that_claim_it_answer(
    nodes: list[tuple[str, bool, bool]], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nodes`: the place, whether Ray takes the node for alive, and whether it answers."""
    listed = [
        {"Resources": {name: 1, "CPU": 2}, "Alive": alive, "NodeManagerAddress": str(answers), "NodeManagerPort": 1}
        for name, alive, answers in nodes
    ]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    monkeypatch.setattr(absent_engines, "_answers", lambda host, _port: host == "True")
    assert has_place(BUNDLES[0]) == expected
    assert has_place({"CPU": 2, "GPU": 1}), "a place on this machine"


# --- in the roles ---


class Ranks:
    """One rank, whose sync fails for engines that are lost."""

    def __init__(self, lost: dict[str, RunError], on_sync: Callable[[], None] = lambda: None) -> None:
        self.lost = lost
        self.on_sync = on_sync
        self.synced: list[list[Any]] = []

    def call(self, _method: str, engines: list[Any], _version: int, *, doing: str) -> None:
        self.synced.append(engines)
        self.on_sync()
        for handle in engines:
            name = handle.replace("handle", "rollout")
            if name in self.lost:
                raise self.lost[name].of(name)


def roles(engines: RoleProcesses, pods: Pods, ranks: Ranks, policy_ranks: int = 1) -> DisaggregatedRoles:
    made = object.__new__(DisaggregatedRoles)
    made.settings = cast(Any, SimpleNamespace(first_engine_bundle=1))
    made.clock, made.engines, made.ranks = PartClock(), engines, cast(Any, ranks)
    made.policy = cast(Any, range(policy_ranks))
    made.absent = AbsentEngines(engines, BUNDLES, pods.start)
    made.policy_at, made.engines_at = 4, 3
    return made


def allowed(_failure: WorkerLost) -> bool:
    return True


def test_a_sync_goes_on_without_the_engines_of_a_lost_pod(engines: RoleProcesses, pods: Pods) -> None:
    lost: dict[str, RunError] = {name: WorkerLost("died") for name in ("rollout-1", "rollout-2")}
    ranks, asked = Ranks(lost), list[WorkerLost]()
    pods.lost = {"worker-2"}

    def may_replace(failure: WorkerLost) -> bool:
        asked.append(failure)
        return True

    made = roles(engines, pods, ranks)
    made.sync(4, may_replace)
    assert ranks.synced[-1] == ["handle-0"]
    assert made.engines_at == 4
    assert [(failure.actor, failure.place_lost) for failure in asked] == [("rollout-1", True), ("rollout-2", True)]
    pods.lost.clear()
    made.absent.start_returned()
    pods.ended, ranks.lost = {"rollout-1", "rollout-2"}, {}
    made.sync(5, may_replace)
    assert ranks.synced[-1] == ["handle-0", "handle-1", "handle-2"]


def test_several_ranks_leave_out_engines_that_were_lost_before_a_sync(engines: RoleProcesses, pods: Pods) -> None:
    ranks = Ranks({name: WorkerLost("died") for name in ("rollout-1", "rollout-2")})
    made = roles(engines, pods, ranks, policy_ranks=2)
    pods.lost = {"worker-2"}
    made.sync(4, allowed)
    assert ranks.synced == [["handle-0"]], "it could not be repeated"
    pods.lost = {"worker-1", "worker-2"}
    with pytest.raises(WorkerLost, match="rollout-0 died with its pod"):
        made.sync(5, allowed)


@pytest.mark.parametrize(
    ("lost", "pods_lost", "policy_ranks", "may_replace"),
    [
        ({"rollout-1": WorkerLost("died")}, set(), 1, allowed),  # a process alone
        ({"rollout-1": WorkerLost("died")}, {"worker-2"}, 2, allowed),  # the other rank waits in the sync
        ({"rollout-1": WorkerLost("died")}, {"worker-2"}, 1, lambda _failure: False),
        ({f"rollout-{n}": WorkerLost("died") for n in range(3)}, {"worker-1", "worker-2"}, 1, allowed),
        ({"rollout-1": PhaseDeadlineExceeded("hangs")}, {"worker-2"}, 1, allowed),
    ],
)
def test_otherwise_a_lost_engine_fails_the_sync(
    lost: dict[str, RunError],
    pods_lost: set[str],
    policy_ranks: int,
    may_replace: Callable[[WorkerLost], bool],
    engines: RoleProcesses,
    pods: Pods,
) -> None:
    made = roles(engines, pods, Ranks(lost, lambda: pods.lost.update(pods_lost)), policy_ranks)
    with pytest.raises(WorkerLost):
        made.sync(4, may_replace)
    assert made.engines_at is None


def test_a_replacement_waits_only_for_a_process_whose_pod_is_there(
    engines: RoleProcesses, pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = roles(engines, pods, Ranks({}))
    monkeypatch.setattr(made, "_start_again", pods.start)
    replacement = made._replacing(allowed)
    assert replacement(WorkerLost("died").of("rollout-0")) == {"rollout-0": "call"}
    assert made.engines_at is None, "it has no weights"
    made.engines_at = 3
    pods.lost = {"worker-2"}
    assert replacement(WorkerLost("died").of("rollout-2")) == {}
    assert made.engines_at == 3, "the others have theirs"
    assert made.engines.working == [("rollout-0",), ("rollout-1",)]
