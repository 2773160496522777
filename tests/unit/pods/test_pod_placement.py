"""Facts that the controller requests from the pods of its workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rljob_api.job import RLJobSpec
from rljob_trainer.pods import pod_placement
from rljob_trainer.pods.environment import ControllerEnvironment
from rljob_trainer.pods.pod_placement import PodPlacement
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

    def __init__(self, _workers: int) -> None: ...

    def answers(self, _function: Callable[[], Any], _timeout_seconds: float) -> dict[int, int]:
        return {0: 0, 2: 1}


@pytest.fixture
def placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PodPlacement:
    monkeypatch.setattr(pod_placement, "WorkerAgents", Agents)
    environment = ControllerEnvironment.read(pod_variables(tmp_path, RLJOB_WORKERS="3"))
    return PodPlacement(environment, tmp_path / "log")


def test_a_lost_worker_does_not_hide_kills_in_other_pods(placement: PodPlacement) -> None:
    assert placement.oom_kills() == 1


def test_pods_are_not_restarted_in_place_if_one_does_not_respond(placement: PodPlacement) -> None:
    assert placement.workers_answer
    placement.oom_kills()
    assert not placement.workers_answer
