"""Calls of the policy to engines, of which some are lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from rljob_trainer.errors import WorkerLost
from rljob_trainer.weight_sync.transfer import EngineCalls


def engine(name: str) -> Any:
    return SimpleNamespace(name=name, update_weights=SimpleNamespace(remote=lambda: f"call to {name}"))


def test_a_lost_engine_ends_the_wait_although_another_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL, an engine that forwards weights to a lost one waits until the policy leaves the group."""

    def wait(calls: list[str], **_options: Any) -> tuple[list[str], list[str]]:
        return ["call to rollout-1"], [call for call in calls if call != "call to rollout-1"]

    def get(call: str) -> None:
        assert call == "call to rollout-1", "it waits for an engine that waits for the policy"
        raise RayActorError

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    calls = EngineCalls([engine("rollout-0"), engine("rollout-1")])
    calls.begin("update_weights")
    with pytest.raises(WorkerLost, match="rollout-1 died while receiving the weights") as lost:
        calls.wait()
    assert lost.value.actor == "rollout-1"
