"""Each topology calls only the operations that it needs."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch

from rljob_testing.memory_plans import memory_plan
from rljob_trainer.errors import DeviceOutOfMemory
from rljob_trainer.phase_clock import PartClock
from rljob_trainer.policy.exporting_rank import ExportingRank
from rljob_trainer.policy.memory_mitigations.expandable_segments import ExpandableSegments
from rljob_trainer.policy.memory_mitigations.weight_export import WeightExport
from rljob_trainer.roles import colocated, disaggregated, policy_actor, roles
from rljob_trainer.roles.colocated import ColocatedRoles
from rljob_trainer.roles.disaggregated import DisaggregatedRoles
from rljob_trainer.roles.policy_actor import ColocatedPolicyActor, DisaggregatedPolicyActor, PolicyActor
from rljob_trainer.roles.settings import RoleSettings
from rljob_trainer.roles.topologies import roles_of
from rljob_trainer.rollout import disaggregated_engine, engine
from rljob_trainer.rollout.config import RolloutConfig
from rljob_trainer.weight_sync import broadcast, broadcast_engine, broadcast_group


def settings(topology: Any, device: Any, *, policy_offload: bool = False) -> RoleSettings:
    rollout = RolloutConfig(Path("/model"), device, "bfloat16", 64, 8, 1 << 20, 8)
    policy: Any = SimpleNamespace(device=device, memory=memory_plan(policy_offload=policy_offload))
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
    calls: list[str] = []
    monkeypatch.setattr(colocated, "wait_for", lambda _calls, _doing: {})
    colocated_roles = roles_of(
        replace_rollout(settings("Colocated", device), sleep_level=2 if device == "cuda" else 0), PartClock()
    )
    monkeypatch.setattr(colocated_roles.engines, "call", lambda method, *_: calls.append(method))
    monkeypatch.setattr(colocated_roles, "_of_all_ranks", lambda method, *_, **__: calls.append(method))
    colocated_roles.sync(0)
    assert calls == expected
    assert colocated_roles.engines_at == 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of roles that were made by `recording`."""
    monkeypatch.setattr(colocated, "wait_for", lambda _calls, _doing: {})
    return []


def recording(calls: list[str], device: str, monkeypatch: pytest.MonkeyPatch, *, policy_offload: bool = True) -> Any:
    sleep_level = 2 if device == "cuda" else 0
    given = settings("Colocated", device, policy_offload=policy_offload)
    made = roles_of(replace_rollout(given, sleep_level=sleep_level), PartClock())
    monkeypatch.setattr(made.engines, "call", lambda method, *_: calls.append(method))
    monkeypatch.setattr(made, "_of_all_ranks", lambda method, *_, **__: calls.append(method))
    for name in ("_begin_loading_policy", "_load_engines", "_finish_loading_policy"):
        monkeypatch.setattr(made, name, lambda name=name: calls.append(name.strip("_")))
    return made


def test_a_policy_makes_room_before_the_kv_cache_wakes(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = recording(calls, "cuda", monkeypatch)
    made.sync(3)
    assert calls == ["sleep", "wake_weights", "sync", "offload_weights", "wake_kv_cache"]
    assert made.engines_at == 3
    calls.clear()
    recording(calls, "cpu", monkeypatch).sync(3)
    assert calls == ["sync", "offload_weights"]


def test_a_policy_makes_room_before_an_engine_starts(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = recording(calls, "cuda", monkeypatch)
    made.load()
    assert calls == [
        "begin_loading_policy",
        "finish_loading_policy",
        "offload_weights",
        "load_engines",
        "finish_loading_policy",
    ]
    calls.clear()
    made.engines.loaded = True  # the policy was lost: the engine sleeps, and has no KV cache
    made.load()
    assert calls == ["sleep", "begin_loading_policy", "finish_loading_policy", "load_engines", "finish_loading_policy"]
    calls.clear()
    recording(calls, "cuda", monkeypatch, policy_offload=False).load()
    assert calls == ["begin_loading_policy", "load_engines", "finish_loading_policy"], "side by side"


def test_engines_that_cannot_be_put_to_sleep_end_with_the_policy(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed sync leaves their weights on the GPU, where the next policy would load and replay beside them."""
    made = recording(calls, "cuda", monkeypatch)
    made.sync(3)
    made.end("policy")
    assert made.engines_ended == 0, "these sleep before the next policy loads"

    def fails(method: str, *_: Any, **__: Any) -> None:
        raise DeviceOutOfMemory(method)

    monkeypatch.setattr(made, "_of_all_ranks", fails)
    with pytest.raises(DeviceOutOfMemory):
        made.sync(4)
    made.end("policy")
    assert made.engines_ended == 1
    made.end("policy")
    assert made.engines_ended == 1


def test_weights_return_beside_an_engine_that_sleeps(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = recording(calls, "cuda", monkeypatch)
    monkeypatch.setattr(made.policy, "call", lambda method, *_: calls.append(method))
    monkeypatch.setattr(roles, "wait_for", lambda _calls, _doing: {})
    made.engines_at = 2
    made.load_checkpoint(tmp_path, 2)
    made.export_pretrained(tmp_path)
    assert calls == ["sleep", "load_checkpoint", "sleep", "export_pretrained"]
    assert made.engines_at is None
    calls.clear()
    made.start_checkpoint(tmp_path)  # which reads the weights in host memory
    assert calls == ["start_checkpoint"]


@pytest.mark.parametrize("module", [roles, disaggregated, engine, disaggregated_engine])
def test_an_engine_with_a_gpu_of_its_own_has_no_code_to_sleep(module: Any) -> None:
    code = inspect.getsource(module).lower()
    assert not [word for word in ("sleep_level", "wake", ".sleep(", "_asleep") if word in code]


@pytest.mark.parametrize("module", [broadcast, broadcast_engine, broadcast_group])
def test_a_broadcast_shares_no_memory_and_switches_no_segments(module: Any) -> None:
    code = inspect.getsource(module)
    assert not [word for word in ("ipc", "expandable", "empty_cache", "object_store", "ray.put") if word in code]


@pytest.mark.parametrize(("actor", "expected"), [(ColocatedPolicyActor, [False, True]), (DisaggregatedPolicyActor, [])])
def test_the_log_of_a_sync_shows_switches_only_on_a_shared_gpu(
    actor: type[PolicyActor], expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda _settings: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(policy_actor, "send_weights", lambda *_: None)
    rank: Any = object.__new__(actor)
    rank.rank, rank._step, rank._on_gpu = 0, 3, True
    rank.config = SimpleNamespace(memory=memory_plan(expandable_segments=True, empty_cache=False))
    rank._membership = SimpleNamespace(collective=nullcontext)
    rank._memory_log = SimpleNamespace(begin_phase=lambda *_: None, record=lambda *_: None)
    rank._broadcaster = SimpleNamespace(send=lambda *_: None)
    rank._segments = ExpandableSegments()
    rank._segments.enable()
    rank._weight_export = WeightExport(rank._segments, largest_unit_bytes=1)
    monkeypatch.setattr(rank, "named_full_parameters", lambda: iter(()))
    with structlog.testing.capture_logs() as logs:
        rank.sync([], 3)
    assert [(entry["event"], entry["enabled"]) for entry in logs] == [
        ("expandable segments switched", enabled) for enabled in expected
    ]


def test_a_policy_with_a_gpu_of_its_own_exports_no_memory() -> None:
    assert issubclass(ColocatedPolicyActor, ExportingRank)
    assert not issubclass(DisaggregatedPolicyActor, ExportingRank)
    assert not hasattr(DisaggregatedPolicyActor, "weights_for_export")


@pytest.mark.parametrize("topology", ["Colocated", "Disaggregated"])
def test_a_damaged_checkpoint_leaves_the_policy_in_no_known_state(
    topology: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = roles_of(settings(topology, "cpu"), PartClock())
    found: dict[str, str | None] = {"policy-0": None, "policy-1": "__1_0.distcp is corrupt"}
    monkeypatch.setattr(made.policy, "call", lambda *_: {})
    monkeypatch.setattr(roles, "wait_for", lambda _calls, _doing: found)
    assert made.load_checkpoint(tmp_path, 2) == "__1_0.distcp is corrupt"
    assert made.policy_at is None
    found["policy-1"] = None
    assert made.load_checkpoint(tmp_path, 2) is None
    assert made.policy_at == 2
