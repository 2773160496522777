"""A process that is lost or hangs while it imports its libraries: the cause is known before the controller runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rljob_trainer.errors import HostOutOfMemory, WorkerLost
from rljob_trainer.recovery.kernel_kills import KernelKills
from rljob_trainer.recovery.phase_deadlines import PhaseDeadlines
from rljob_trainer.roles.time_limit import current_limit
from rljob_trainer.runtime.attempt import _construct


def construct(kills: list[int], construct_roles: Callable[[], Any], deadline_seconds: float = 600) -> Any:
    """Construct roles; `kills` are the kernel's counts before and after."""
    roles = SimpleNamespace(construct=construct_roles)
    return _construct(cast(Any, roles), PhaseDeadlines(deadline_seconds, []), KernelKills(lambda: kills.pop(0)))


def lost() -> None:
    raise WorkerLost("rollout-0 died while starting").of("rollout-0")


def test_a_process_killed_for_its_memory_is_a_failure_of_host_memory() -> None:
    with pytest.raises(HostOutOfMemory, match="OOMKilled") as raised:
        construct([3, 4], lost)
    assert raised.value.actor == "rollout-0"


def test_a_kill_explains_the_loss_that_is_noticed_later() -> None:
    """The policy was killed while it waited for an engine that still imported, and the next call noticed."""
    count = 3
    kills = KernelKills(lambda: count)
    count = 4
    assert _construct(cast(Any, SimpleNamespace(construct=dict)), PhaseDeadlines(600, []), kills) == {}
    assert kills.any_new
    assert isinstance(kills.explain(WorkerLost("policy-0 died while starting")), HostOutOfMemory)
    assert not kills.any_new
    assert type(kills.explain(WorkerLost("policy-0 died while updating"))) is WorkerLost


def test_a_process_lost_without_a_kill_stays_a_lost_process() -> None:
    with pytest.raises(WorkerLost, match="died while starting"):
        construct([3, 3], lost)


def test_the_first_start_of_the_processes_has_a_deadline_too() -> None:
    limit = construct([0], current_limit)
    assert limit.seconds == 12 * 600
    assert construct([0], current_limit, deadline_seconds=0) is None
