"""A process that is lost while it imports its libraries: the cause is known before the controller runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rljob_trainer.errors import HostOutOfMemory, WorkerLost
from rljob_trainer.runtime.attempt import Attempt


def construct(kills: list[int]) -> Any:
    """Construct roles of which one is lost; `kills` are the kernel's counts before and after."""

    def lost() -> None:
        raise WorkerLost("rollout-0 died while starting").of("rollout-0")

    attempt = SimpleNamespace(placement=SimpleNamespace(oom_kills=lambda: kills.pop(0)))
    return Attempt._construct(cast(Attempt, attempt), cast(Any, SimpleNamespace(construct=lost)))


def test_a_process_killed_for_its_memory_is_a_failure_of_host_memory() -> None:
    with pytest.raises(HostOutOfMemory, match="OOMKilled") as raised:
        construct([3, 4])
    assert raised.value.actor == "rollout-0"


def test_a_process_lost_without_a_kill_stays_a_lost_process() -> None:
    with pytest.raises(WorkerLost, match="died while starting"):
        construct([3, 3])
