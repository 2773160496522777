"""The memory plan at the start of an attempt, on the machine of the previous one and on another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rljob_api.job import RLJob
from rljob_api.memory_plan import MemoryPlan
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.records import PlanChangeRecord
from rljob_memory.sizes import GIB
from rljob_trainer.hardware import Machine
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.models.checkpoint import ModelDimensions
from rljob_trainer.recovery.plan_changes import state_at_start
from rljob_trainer.run_listener import RunListener
from rljob_trainer.runtime import free_disk
from rljob_trainer.runtime.attempt import Attempt
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.supervision import Supervision
from tests.unit.ledger.samples import plan_change

SPEC = {"model": {"uri": "random://qwen3"}, "task": {"name": "digits"}, "algorithm": {"steps": 8}}
JOB = RLJob.model_validate({"metadata": {"name": "job"}, "spec": SPEC})
DIMENSIONS = ModelDimensions(
    parameters=596_000_000,
    layers=28,
    hidden=1024,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate=3072,
    vocabulary=151_936,
    max_positions=40_960,
    tied=True,
)


@pytest.fixture(autouse=True)
def free_disk_of_a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_disk, "free_bytes", lambda _path: 1 << 50)


def begin(ledger: Ledger, gpu_gib: int) -> tuple[MemoryPlan, list[str]]:
    """Plan and record an attempt on a GPU of this size. Returns the plan, and what was displayed."""
    machine = Machine((gpu_gib * GIB,), 512 * GIB, 16, (9, 0))
    hosts = RoleHosts(machine, machine, "cuda", 1, 1, "2.11.0", None, 64 * GIB, True)
    shown: list[str] = []
    attempt = SimpleNamespace(
        job=JOB,
        ledger=ledger,
        supervision=Supervision(),
        display=SimpleNamespace(note=shown.append, warning=shown.append),
        listener=RunListener(),
        state=state_at_start(ledger, 8, supervised=False),
        _warn_of_host_memory=lambda *_: None,
        directory=OutputDirectory(ledger.path.parent),
    )
    changes, _, facts = Attempt._plan(cast(Any, attempt), DIMENSIONS, 0, hosts)
    ledger.begin_attempt(0.0, {}, changes.plan.model_dump(by_alias=True), {}, plan_facts=facts)
    return changes.plan, shown


def test_a_changed_plan_is_computed_again_on_another_machine_only(tmp_path: Path) -> None:
    with Ledger(tmp_path / "other.jsonl") as ledger:
        small, _ = begin(ledger, 24)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        first, _ = begin(ledger, 140)
        changed = first.model_copy(update={"generation": 2, "micro_batch_tokens": first.micro_batch_tokens // 2})
        ledger.record(PlanChangeRecord(change=plan_change(2), plan=changed))
        assert begin(ledger, 140) == (changed, [])
        moved, shown = begin(ledger, 24)
    assert shown == ["Computing the memory plan again: device_memory_bytes 140Gi, now 24Gi"]
    assert moved.kv_cache_bytes == small.kv_cache_bytes < changed.kv_cache_bytes
    assert moved.generation == 3
