"""Injected faults are refused unless allowed, and injected as often as requested across attempts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
from pydantic import ValidationError

from rljob_api.fault_injection import Fault, FaultInjection
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.records import fault_records
from rljob_trainer.recovery.fault_schedule import FaultSchedule
from rljob_trainer.roles.actor import known_failure
from rljob_trainer.roles.faults import INJECTED, InjectedFault, target_role


class Processes:
    def __init__(self, role: str) -> None:
        self.role = role
        self.loading: dict[str, object] = {}
        self.injected: list[tuple[int, InjectedFault]] = []

    def __len__(self) -> int:
        return 1

    def inject(self, rank: int, fault: InjectedFault) -> None:
        self.injected.append((rank, fault))


class Roles:
    class settings:
        class policy:
            device = "cpu"

    def __init__(self) -> None:
        self.policy, self.engines = Processes("policy"), Processes("rollout")


def schedule(ledger: Ledger, roles: Roles, *faults: str) -> FaultSchedule:
    return FaultSchedule([Fault.parse(fault) for fault in faults], ledger, cast(Any, roles), lambda _text: None)


def test_a_fault_is_injected_from_its_step_on_as_often_as_requested(tmp_path: Path) -> None:
    roles = Roles()
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.begin_attempt(0.0, {}, {}, {})
        faults = schedule(ledger, roles, "ActivationSpike@update:3x2", "KVCacheOversized@rollout:3")
        for step in (1, 2, 3, 3, 3, 4):
            faults.inject(step, "update")
    assert [armed.method for _, armed in roles.policy.injected] == ["update", "update"]
    assert roles.engines.injected == []


def test_an_injected_fault_is_not_repeated_by_the_next_attempt(tmp_path: Path) -> None:
    for _ in range(2):
        roles = Roles()
        with Ledger(tmp_path / "ledger.jsonl") as ledger:
            ledger.begin_attempt(0.0, {}, {}, {})
            schedule(ledger, roles, "WorkerLost@update:1").inject(1, "update")
    assert roles.policy.injected == []


def test_faults_that_are_due_together_are_injected_one_after_the_other(tmp_path: Path) -> None:
    roles = Roles()
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.begin_attempt(0.0, {}, {}, {})
        faults = schedule(ledger, roles, "OptimizerState@optimizer:3", "HostMemory@update:3")
        for count in (1, 2, 2):
            faults.inject(3, "update")
            assert len(roles.policy.injected) == len(fault_records(ledger.records)) == count


def test_a_checkpoints_fault_waits_for_a_checkpoint(tmp_path: Path) -> None:
    roles = Roles()
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.begin_attempt(0.0, {}, {}, {})
        faults = schedule(ledger, roles, "ActivationSpike@checkpoint:3")
        faults.inject(4, "checkpoint")
        assert roles.policy.injected == []
        faults.inject_into_checkpoint(4)
    assert len(roles.policy.injected) == 1


def test_nothing_fails_at_a_start_that_is_over(tmp_path: Path) -> None:
    roles = Roles()
    roles.policy.loading = {"policy-0": object()}
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.begin_attempt(0.0, {}, {}, {})
        faults = schedule(ledger, roles, "ActivationSpike@load:1", "KVCacheOversized@load:1")
        faults.inject(1, None)
    assert roles.policy.injected == []
    assert [armed.method for _, armed in roles.engines.injected] == ["start"]


@pytest.mark.parametrize(
    "text", ["Nonsense@update:1", "WorkerLost@dinner:1", "WorkerLost@update", "WorkerLost@update:0"]
)
def test_an_unknown_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|Input should"):
        Fault.parse(text)


def test_faults_have_to_be_allowed() -> None:
    fault = Fault.parse("WorkerLost@update:1")
    with pytest.raises(ValidationError, match="write enabled: true"):
        FaultInjection(faults=[fault])
    assert FaultInjection(enabled=True, faults=[fault]).faults == [fault]


class FailingRole:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def begin_phase(self, phase: str) -> None:
        self.phases.append(phase)

    def fail(self, fail: Callable[[], NoReturn]) -> None:
        fail()


@pytest.mark.parametrize(
    "fault_class",
    ["Fragmentation", "AllocatorCache", "ActivationSpike", "KVCacheOversized", "WeightSyncSpike", "OptimizerState"],
)
def test_on_a_cpu_a_fault_has_torchs_message_and_is_marked_as_injected(fault_class: str) -> None:
    import torch

    phase = "rollout" if fault_class == "KVCacheOversized" else "sync"
    fault = Fault.parse(f"{fault_class}@{phase}:1")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        InjectedFault.of(fault, "cpu").fail_in(role := FailingRole())
    assert INJECTED in str(raised.value)
    assert role.phases == [phase], "as it would be where the phase fails by itself"
    assert type(known_failure(raised.value)).__name__ == "DeviceOutOfMemory"


def test_each_fault_happens_in_the_role_whose_memory_it_is() -> None:
    roles = {text: target_role(Fault.parse(text)) for text in ("KVCacheOversized@load:1", "ActivationSpike@load:1")}
    assert list(roles.values()) == ["rollout", "policy"]
    assert target_role(Fault.parse("WorkerLost@rollout:1")) == "rollout"


def test_host_memory_is_filled_only_below_a_container_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from rljob_client.errors import BadInput
    from rljob_memory.sample import MemorySample
    from rljob_trainer.roles import faults

    monkeypatch.setattr(faults, "host_memory", lambda: MemorySample(host_limit_bytes=1 << 62))
    with pytest.raises(BadInput, match="expected a container with a memory limit"):
        InjectedFault.of(Fault.parse("HostMemory@sync:1"), "cpu").fail_in(FailingRole())
