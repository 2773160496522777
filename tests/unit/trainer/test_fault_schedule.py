"""Injected faults are refused unless allowed, and injected as often as requested across attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import torch
from pydantic import ValidationError

from rljob_api.fault_injection import Fault, FaultInjection
from rljob_client.errors import BadInput
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.records import fault_records
from rljob_memory.sample import MemorySample
from rljob_trainer.recovery.fault_schedule import FaultSchedule
from rljob_trainer.roles import faults
from rljob_trainer.roles.actor import known_failure
from rljob_trainer.roles.faults import INJECTED, InjectedFault
from tests.unit.trainer.simulated_roles import SimulatedRoles


class Attempts:
    """Attempts of a job with these faults."""

    def __init__(self, directory: Path, *faults: str) -> None:
        self.roles = SimulatedRoles({})
        self._faults = [Fault.parse(fault) for fault in faults]
        self._ledger = directory / "ledger.jsonl"

    @contextmanager
    def begin(self) -> Iterator[FaultSchedule]:
        with Ledger(self._ledger) as ledger:
            ledger.begin_attempt(0.0, {}, {}, {})
            yield FaultSchedule(self._faults, ledger, cast(Any, self.roles), lambda _text: None)

    @property
    def injected(self) -> tuple[list[str], list[str]]:
        """The calls of the policy and of the engine that fail."""
        return self.roles.policy.faults, self.roles.engines.faults


def test_a_fault_is_injected_from_its_step_on_as_often_as_requested(tmp_path: Path) -> None:
    job = Attempts(tmp_path, "ActivationSpike@update:3x2", "KVCacheOversized@rollout:3")
    for steps, injected in (((1, 2, 3), 1), ((3, 3, 4), 2)):
        with job.begin() as faults:
            for step in steps:
                faults.inject(step, "update")
        assert job.injected == (["update"] * injected, []), "also across attempts"


def test_faults_that_are_due_together_are_injected_one_after_the_other(tmp_path: Path) -> None:
    job = Attempts(tmp_path, "OptimizerState@optimizer:3", "HostMemory@update:3")
    with job.begin() as faults:
        for count in (1, 2, 2):
            faults.inject(3, "update")
            assert len(job.injected[0]) == len(fault_records(faults.ledger.records)) == count


def test_a_checkpoints_fault_waits_for_a_checkpoint(tmp_path: Path) -> None:
    job = Attempts(tmp_path, "ActivationSpike@checkpoint:3")
    with job.begin() as faults:
        faults.inject(4, "checkpoint")
        assert job.injected == ([], [])
        faults.inject_into_checkpoint(4)
    assert job.injected == (["start_checkpoint"], [])


def test_nothing_fails_at_a_start_that_is_over(tmp_path: Path) -> None:
    job = Attempts(tmp_path, "ActivationSpike@load:1", "KVCacheOversized@load:1", "WorkerLost@rollout:1")
    job.roles.policy.loading = {"policy-0": object()}
    with job.begin() as faults:
        faults.inject(1, None)
        assert job.injected == ([], ["start"]), "in the role whose memory it is"
        faults.inject(1, "rollout")
    assert job.injected == ([], ["start", "generate_for_step"])


@pytest.mark.parametrize(
    "text", ["Nonsense@update:1", "WorkerLost@dinner:1", "WorkerLost@update", "WorkerLost@update:0"]
)
def test_an_unknown_or_forbidden_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|Input should"):
        Fault.parse(text)
    with pytest.raises(ValidationError, match="write enabled: true"):
        FaultInjection(faults=[Fault.parse("WorkerLost@update:1")])


# --- in the process ---


class FailingRole:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def begin_phase(self, phase: str) -> None:
        self.phases.append(phase)

    def fail(self, fail: Callable[[], NoReturn]) -> None:
        fail()


FAULTS = ("Fragmentation", "AllocatorCache", "ActivationSpike", "KVCacheOversized", "WeightSyncSpike", "OptimizerState")


@pytest.mark.parametrize("fault_class", FAULTS)
def test_on_a_cpu_a_fault_has_torchs_message_and_is_marked_as_injected(fault_class: str) -> None:
    phase = "rollout" if fault_class == "KVCacheOversized" else "sync"
    fault = Fault.parse(f"{fault_class}@{phase}:1")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        InjectedFault.of(fault, "cpu").fail_in(role := FailingRole())
    assert INJECTED in str(raised.value)
    assert role.phases == [phase], "as it would be where the phase fails by itself"
    assert type(known_failure(raised.value)).__name__ == "DeviceOutOfMemory"


def test_host_memory_is_filled_only_below_a_container_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "host_memory", lambda: MemorySample(host_limit_bytes=1 << 62))
    with pytest.raises(BadInput, match="expected a container with a memory limit"):
        InjectedFault.of(Fault.parse("HostMemory@sync:1"), "cpu").fail_in(FailingRole())
