"""Roles that are unusable after a failure."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rljob_api.plan_change import Phase, Role
from rljob_client.errors import RunError
from rljob_trainer.errors import DeviceOutOfMemory, HostOutOfMemory, SharedMemoryExhausted
from rljob_trainer.recovery.recovery import dead_roles
from tests.unit.trainer.simulated_roles import SimulatedRoles


def roles(ranks: int = 1, *, policy_at: int | None = 2) -> Any:
    """Running roles with the policy at a step; None if it was interrupted in its optimizer step."""
    simulated = SimulatedRoles({}, ranks)
    simulated.load()
    simulated.policy_at = policy_at
    return cast(Any, simulated)


@pytest.mark.parametrize(
    ("failure", "phase", "ranks", "policy_at", "expected"),
    [
        (DeviceOutOfMemory("").of("policy-0"), "update", 1, 2, set()),
        (DeviceOutOfMemory("").of("policy-0"), "update", 1, None, {"policy"}),
        (DeviceOutOfMemory("").of("policy-1"), "update", 2, 2, set()),
        (DeviceOutOfMemory("").of("policy-1"), "update", 2, None, {"policy"}),
        (DeviceOutOfMemory("").of("policy-0"), "sync", 1, 2, set()),
        (DeviceOutOfMemory("").of("rollout-0"), "rollout", 1, 2, {"rollout"}),
        (DeviceOutOfMemory("").of("rollout-0"), "rollout", 2, 2, {"rollout"}),
        (DeviceOutOfMemory("").of("rollout-0"), "sync", 2, 2, {"rollout"}),
        (DeviceOutOfMemory("").of("rollout-0"), "sync", 2, None, {"policy", "rollout"}),
        (HostOutOfMemory("").of("policy-0"), "update", 1, 2, {"policy"}),
        (SharedMemoryExhausted("").of("policy-0"), "sync", 1, 2, {"policy"}),
        (HostOutOfMemory(""), "reward", 1, 2, {"controller"}),
    ],
)
def test_a_role_is_dead_if_its_processes_or_its_weights_are_lost(
    failure: RunError, phase: Phase, ranks: int, policy_at: int | None, expected: set[Role]
) -> None:
    assert dead_roles(roles(ranks, policy_at=policy_at), failure, phase) == expected


def test_a_policy_that_failed_while_loading_is_dead() -> None:
    starting = cast(Any, SimulatedRoles({}))
    assert dead_roles(starting, DeviceOutOfMemory("").of("policy-0"), None) == {"policy"}
