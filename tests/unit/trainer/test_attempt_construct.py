"""A process that is lost or hangs while it imports its libraries: the cause is known before the controller runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rljob_trainer.errors import HostOutOfMemory, WorkerLost
from rljob_trainer.recovery.phase_deadlines import PhaseDeadlines
from rljob_trainer.roles.time_limit import current_limit
from rljob_trainer.runtime.attempt import Attempt


def construct(kills: list[int], construct_roles: Callable[[], Any], deadline_seconds: float = 600) -> Any:
    """Construct roles; `kills` are the kernel's counts before and after."""
    attempt = SimpleNamespace(placement=SimpleNamespace(oom_kills=lambda: kills.pop(0)))
    roles = SimpleNamespace(construct=construct_roles)
    return Attempt._construct(cast(Attempt, attempt), cast(Any, roles), PhaseDeadlines(deadline_seconds, []))


def lost() -> None:
    raise WorkerLost("rollout-0 died while starting").of("rollout-0")


def test_a_process_killed_for_its_memory_is_a_failure_of_host_memory() -> None:
    with pytest.raises(HostOutOfMemory, match="OOMKilled") as raised:
        construct([3, 4], lost)
    assert raised.value.actor == "rollout-0"


def test_a_process_lost_without_a_kill_stays_a_lost_process() -> None:
    with pytest.raises(WorkerLost, match="died while starting"):
        construct([3, 3], lost)


def test_the_first_start_of_the_processes_has_a_deadline_too() -> None:
    limit = construct([0], current_limit)
    assert limit.seconds == 12 * 600
    assert construct([0], current_limit, deadline_seconds=0) is None
