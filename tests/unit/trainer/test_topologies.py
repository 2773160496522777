"""A topology has no code for what it does not need."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_trainer.phase_clock import PartClock
from rljob_trainer.policy.exporting_rank import ExportingRank
from rljob_trainer.roles import colocated, disaggregated, roles
from rljob_trainer.roles.colocated import ColocatedRoles
from rljob_trainer.roles.disaggregated import DisaggregatedRoles
from rljob_trainer.roles.policy_actor import ColocatedPolicyActor, DisaggregatedPolicyActor
from rljob_trainer.roles.settings import RoleSettings
from rljob_trainer.roles.topologies import roles_of
from rljob_trainer.rollout import disaggregated_engine, engine
from rljob_trainer.rollout.config import RolloutConfig
from rljob_trainer.weight_sync import broadcast, broadcast_engine, broadcast_group


def settings(topology: Any, device: Any) -> RoleSettings:
    rollout = RolloutConfig(Path("/model"), device, "bfloat16", 64, 8, 1 << 20, 8)
    policy: Any = SimpleNamespace(device=device)
    return RoleSettings(topology, 2, 3, policy, rollout, {}, {}, Path("/out"), None)


def replace_rollout(given: RoleSettings, **values: Any) -> RoleSettings:
    return replace(given, rollout=replace(given.rollout, **values))


def test_each_topology_has_roles_of_its_own() -> None:
    assert type(roles_of(settings("Colocated", "cpu"), PartClock())) is ColocatedRoles
    apart = roles_of(settings("Disaggregated", "cpu"), PartClock())
    assert type(apart) is DisaggregatedRoles
    assert (len(apart.policy), len(apart.engines)) == (2, 3)


def test_only_colocated_processes_share_gpus_and_bundles() -> None:
    shared, apart = settings("Colocated", "cuda"), settings("Disaggregated", "cuda")
    assert (shared.gpus_per_process, shared.first_engine_bundle) == (0.5, 0)
    assert (apart.gpus_per_process, apart.first_engine_bundle) == (1.0, 2)
    assert settings("Disaggregated", "cpu").gpus_per_process == 0


@pytest.mark.parametrize(
    ("device", "expected"), [("cuda", ["sleep", "wake_weights", "sync", "wake_kv_cache"]), ("cpu", ["sync"])]
)
def test_a_sync_has_only_the_weights_of_an_engine_on_the_gpu(
    device: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(colocated, "wait_for", lambda _calls, _doing: {})
    colocated_roles = roles_of(
        replace_rollout(settings("Colocated", device), sleep_level=2 if device == "cuda" else 0), PartClock()
    )
    monkeypatch.setattr(colocated_roles.engines, "call", lambda method, *_: told.append(method))
    monkeypatch.setattr(colocated_roles, "_of_all_ranks", lambda method, *_, **__: told.append(method))
    colocated_roles.sync(0)
    assert told == expected
    assert colocated_roles.engines_at == 0


@pytest.mark.parametrize("module", [roles, disaggregated, engine, disaggregated_engine])
def test_an_engine_with_a_gpu_of_its_own_has_no_code_to_sleep(module: Any) -> None:
    code = inspect.getsource(module).lower()
    assert not [word for word in ("sleep_level", "wake", ".sleep(", "_asleep") if word in code]


@pytest.mark.parametrize("module", [broadcast, broadcast_engine, broadcast_group])
def test_a_broadcast_shares_no_memory_and_switches_no_segments(module: Any) -> None:
    code = inspect.getsource(module)
    assert not [word for word in ("ipc", "expandable", "empty_cache", "object_store", "ray.put") if word in code]


def test_a_policy_with_a_gpu_of_its_own_exports_no_memory() -> None:
    assert issubclass(ColocatedPolicyActor, ExportingRank)
    assert not issubclass(DisaggregatedPolicyActor, ExportingRank)
    assert not hasattr(DisaggregatedPolicyActor, "weights_for_export")
