"""The controller waits for the pods of its workers, and requests facts from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rljob_api.job import RLJobSpec
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import SharedMemoryExhausted, WorkerLost
from rljob_trainer.pods import pod_placement
from rljob_trainer.pods.environment import ControllerEnvironment
from rljob_trainer.pods.pod_placement import PodPlacement
from rljob_trainer.runtime.stop_request import StopNow, StopRequest
from tests.unit.pods.pod_variables import pod_variables

SPEC = RLJobSpec.model_validate(
    {
        "model": {"uri": "file:///model"},
        "task": {"name": "digits"},
        "algorithm": {"steps": 5},
        "policy": {"replicas": 3},
    }
)


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


def test_a_lost_worker_does_not_hide_kills_in_other_pods(placement: PodPlacement) -> None:
    assert placement.oom_kills() == 1


def test_a_worker_that_answers_again_counts_with_its_new_kills(placement: PodPlacement) -> None:
    """A pod that came back counted with kills of long ago, and the next loss was taken for another one."""
    seen = []
    for kills in ({0: 2, 1: 1, 2: 0}, {0: 2, 2: 0}, {0: 2, 1: 1, 2: 0}, {0: 2, 1: 0, 2: 0}, {0: 2, 1: 1, 2: 0}):
        Agents.kills = kills
        seen.append(placement.oom_kills())
    assert seen == [3, 3, 3, 3, 4], "the fourth is of a new container, in which the kernel then kills a process"


def test_pods_are_not_restarted_in_place_if_one_does_not_respond(placement: PodPlacement) -> None:
    assert placement.workers_answer
    placement.oom_kills()
    assert not placement.workers_answer


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
    placement.survey(SPEC, cast(RunDisplay, SimpleNamespace(phase=print, note=print)), cast(StopRequest, False))
    head, enough, small = node(1 << 30), node(1 << 30, **{"worker-0": 1}), node(576 << 20, **{"worker-2": 1})
    assert blamed(head, enough, small) == "policy-2"
    assert blamed(node(576 << 20), enough) is None, "the controller"


# --- pods that do not come ---

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
