"""The memory plan at the start of an attempt, and its changes, also before memory runs out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from rljob_api.job import RLJobSpec
from rljob_api.memory_facts import MemoryFacts
from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import StartingProfile
from rljob_api.plan_change import PlanChange, Role
from rljob_api.step_report import MemoryPressure
from rljob_client.model_dimensions import ModelDimensions
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.records import PlanChangeRecord, plan_change_records
from rljob_memory.budget import facts_of
from rljob_memory.recovery import Changed, RecoveryState
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB
from rljob_trainer.hardware import Machine
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.recovery.early_warning import EarlyWarning
from rljob_trainer.recovery.plan_changes import PlanChanges, facts_of_plan, state_at_start
from rljob_trainer.run_listener import RunListener
from rljob_trainer.runtime import attempt_plan
from rljob_trainer.runtime.attempt_plan import Supervision
from rljob_trainer.runtime.placement import RoleHosts
from rljob_trainer.runtime.run_inputs import ModelInput
from tests.unit.ledger.samples import PLAN, plan_change, plan_change_record, step_record


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        yield ledger


def at_generation(generation: int, **changes: Any) -> MemoryPlan:
    return PLAN.model_copy(update={"generation": generation, **changes})


@pytest.mark.parametrize(
    ("recorded", "given", "expected"),
    [([], None, None), ([], 4, 4), ([2, 3], 2, 3), ([2, 3], 3, 3), ([2, 3], 5, 5), ([2, 3], None, 3)],
)
def test_an_attempt_begins_with_the_plan_of_the_highest_generation(
    recorded: list[int], given: int | None, expected: int | None, ledger: Ledger
) -> None:
    """`recorded`: changes of earlier attempts. `given`: the plan of the supervisor. None: it is to be computed."""
    for generation in recorded:
        ledger.record(plan_change_record(generation))
    plan = state_at_start(ledger, 10, at_generation(given) if given else None).plan
    assert (plan and plan.generation) == expected


@pytest.mark.parametrize(("supervised", "gpus"), [(True, None), (False, 2)])
def test_a_plan_has_grown_here_only_without_a_supervisor(supervised: bool, gpus: int | None, ledger: Ledger) -> None:
    ledger.record(plan_change_record(2).model_copy(update={"plan": at_generation(2, policy_gpus=2)}))
    plan = state_at_start(ledger, 10, supervised=supervised).plan
    assert plan is not None
    assert plan.policy_gpus == gpus


def test_the_facts_of_a_plan_are_those_at_its_last_change(ledger: Ledger, tmp_path: Path) -> None:
    assert facts_of_plan(ledger, PLAN) == {}
    ledger.begin_attempt(0.0, {}, {}, {}, plan_facts={"policy_ranks": 1})
    ledger.record(plan_change_record(2))
    assert facts_of_plan(ledger, at_generation(2)) == {"policy_ranks": 1}
    ledger.begin_attempt(0.0, {}, {}, {}, plan_facts={"policy_ranks": 8})
    with Ledger(tmp_path / "ledger.jsonl") as later:
        assert facts_of_plan(later, at_generation(2)) == {"policy_ranks": 1}
        assert facts_of_plan(later, at_generation(3)) == {"policy_ranks": 8}, "the supervisor's plan"


def adopting(ledger: Ledger, change: PlanChange) -> PlanChanges:
    changes = PlanChanges(ledger, RecoveryState(PLAN, 10))
    plan = plan_change_record(change.generation).plan
    state = changes.state.with_change(change, plan)
    changes.adopt(Changed(change, plan, state, frozenset(), ""), None)
    assert changes.plan.generation == change.generation
    return changes


def test_a_change_is_recorded_when_adopted_and_confirmed_once(ledger: Ledger, tmp_path: Path) -> None:
    changes = adopting(ledger, plan_change(2))
    assert changes.state.adjustments == 1
    with Ledger(tmp_path / "ledger.jsonl") as later:
        again = PlanChanges(later, state_at_start(later, 10))
        assert (again.own, again.state.adjustments) == ([plan_change(2)], 1)
        assert again.unconfirmed is not None
    changes.confirm(plan_change(2, seconds=3.5), {"policy": 2.0})
    assert changes.unconfirmed is None
    [written] = plan_change_records(ledger.records)
    assert (written.change.seconds_to_recover, written.seconds) == (3.5, {"policy": 2.0})
    assert changes.state.changes == (plan_change(2, seconds=3.5),)


def test_a_change_before_a_failure_costs_nothing(ledger: Ledger) -> None:
    changes = adopting(ledger, plan_change(2, preventive=True))
    assert changes.unconfirmed is None
    assert changes.state.adjustments == 0


def test_changes_of_the_supervisor_are_not_its_own(ledger: Ledger) -> None:
    ledger.record(plan_change_record(3, seconds=1.0))
    for step in (1, 2):
        ledger.commit(step_record(step))
    state = state_at_start(ledger, 10, at_generation(3), [plan_change(2), plan_change(3)])
    assert state.first_step == 3, "steps of earlier attempts are no progress of this one"
    changes = PlanChanges(ledger, state)
    assert [known.generation for known in changes.state.changes] == [2, 3]
    assert changes.state.changes[1].seconds_to_recover == 1.0, "the ledger knows more of its own"
    assert [own.generation for own in changes.own] == [3]
    ledger.commit(step_record(3))
    assert changes.state.committed_step == 3


# --- on another machine ---

SPEC = {"model": {"uri": "random://qwen3"}, "task": {"name": "digits"}, "algorithm": {"steps": 8}}
QWEN3_0_6B = ModelDimensions(596_000_000, 28, 1024, 16, 8, 128, 3072, 151_936, max_positions=40_960, tied=True)
QWEN3_8B = ModelDimensions(8_190_735_360, 36, 4096, 32, 8, 128, 12_288, 151_936, max_positions=40_960, tied=False)
facts: list[MemoryFacts] = []
"""Facts of each attempt that was planned."""


def begin(
    ledger: Ledger,
    gpu_gib: int,
    plan: MemoryPlan | None = None,
    profile: StartingProfile | None = None,
    model: ModelDimensions = QWEN3_0_6B,
    gpus: int = 1,
    size: int | Literal["Auto"] = "Auto",
) -> tuple[MemoryPlan, list[str]]:
    """Plan and record an attempt on GPUs of this size. Returns the plan, and what was displayed."""
    machine = Machine((gpu_gib * GIB,) * gpus, 512 * GIB, 16, (9, 0), "NVIDIA H200")
    hosts = RoleHosts(machine, machine, "cuda", gpus, gpus, "2.11.0", (), 64 * GIB, True)
    shown: list[str] = []
    sections = {"policy": {"gpusPerReplica": gpus}, "rollout": {"tensorParallelSize": size}}
    spec = RLJobSpec.model_validate(SPEC | sections)
    planned = attempt_plan.plan_attempt(
        spec,
        ModelInput(Path(), model, adapter_parameters=0),
        hosts,
        state=state_at_start(ledger, 8, plan, supervised=False),
        ledger=ledger,
        directory=OutputDirectory(ledger.path.parent),
        supervision=Supervision(plan=plan, profile=profile),
        display=cast(Any, SimpleNamespace(note=shown.append, warning=shown.append)),
        listener=RunListener(),
    )
    plan = planned.changes.plan
    facts.append(facts_of(planned.setup))
    ledger.begin_attempt(0.0, {}, plan.model_dump(by_alias=True), {}, plan_facts=planned.facts)
    predicted = [line for line in shown if line.startswith("predicted")]
    assert len(predicted) == 2, "the memory of each phase, and its seconds"
    return plan, [line for line in shown if line not in predicted]


def test_a_changed_plan_is_computed_again_on_another_machine_only(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_plan, "free_bytes", lambda _path: 1 << 50)
    with Ledger(tmp_path / "other.jsonl") as other:
        small, _ = begin(other, 16)
    first, _ = begin(ledger, 140)
    changed = first.model_copy(update={"generation": 2, "micro_batch_tokens": first.micro_batch_tokens // 2})
    ledger.record(PlanChangeRecord(change=plan_change(2), plan=changed))
    assert begin(ledger, 140) == (changed, [])
    moved, shown = begin(ledger, 16)
    assert shown == ["Computing the memory plan again: device_memory_bytes 140Gi, now 16Gi"]
    assert moved.kv_cache_bytes == small.kv_cache_bytes < changed.kv_cache_bytes
    assert moved.generation == 3


def test_a_job_that_starts_from_a_profile_keeps_within_it_on_every_start(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_plan, "free_bytes", lambda _path: 1 << 50)
    with Ledger(tmp_path / "earlier.jsonl") as earlier:
        first, _ = begin(earlier, 140)
    held = first.model_copy(update={"micro_batch_tokens": first.micro_batch_tokens // 2})
    remedy = {"setting": "microBatchTokens", "before": "2", "after": "1"}
    learned = {"class": "ActivationSpike", "role": "policy", "remedy": remedy}
    profile = StartingProfile.model_validate(
        {"name": "qwen3-1", "namespace": "team", "facts": facts[-1].model_dump(), "changes": [learned]}
    )
    for _ in range(2):
        plan, shown = begin(ledger, 140, held, profile)
        assert (plan, shown) == (
            held,
            [f"Settings of memory profile qwen3-1: microBatchTokens {plan.micro_batch_tokens}"],
        )
    with Ledger(tmp_path / "small.jsonl") as other:
        small, _ = begin(other, 16)
    with Ledger(tmp_path / "moved.jsonl") as moved:
        plan, shown = begin(moved, 16, held, profile)
    assert plan == small.model_copy(update={"generation": 2})
    assert shown == ["Ignoring memory profile qwen3-1: device_memory_bytes 140Gi, now 16Gi"]


def test_engines_that_the_first_plan_has_chosen_stay(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of an earlier version has engines of one GPU; another number of GPUs gets its own engines."""
    monkeypatch.setattr(attempt_plan, "free_bytes", lambda _path: 1 << 50)
    first, shown = begin(ledger, 140, model=QWEN3_8B, gpus=4)
    assert (first.tensor_parallel_size, shown) == (2, [])
    assert begin(ledger, 140, first, model=QWEN3_8B, gpus=4) == (first, [])
    earlier = first.model_copy(update={"tensor_parallel_size": 1})
    assert begin(ledger, 140, earlier, model=QWEN3_8B, gpus=4) == (earlier, [])
    assert begin(ledger, 140, first, model=QWEN3_8B, gpus=2)[0].tensor_parallel_size == 1


def test_a_plan_of_an_earlier_version_gets_the_engines_of_the_manifest(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_plan, "free_bytes", lambda _path: 1 << 50)
    first, _ = begin(ledger, 140, model=QWEN3_8B, gpus=4, size=4)
    assert first.tensor_parallel_size == 4
    stored = first.model_dump(by_alias=True)
    del stored["tensorParallelSize"]
    plan, _ = begin(ledger, 140, MemoryPlan.model_validate(stored), model=QWEN3_8B, gpus=4, size=4)
    assert plan == first.model_copy(update={"generation": 2})


def test_faster_engines_are_named_at_the_start(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_plan, "free_bytes", lambda _path: 1 << 50)
    [line] = begin(ledger, 140, model=QWEN3_8B, gpus=4, size=1)[1]
    assert re.fullmatch(r"with rollout.tensorParallelSize: 2, a step is predicted to take [\d.]+ s", line)


# --- before memory runs out ---


class GrowthListener(RunListener):
    """Watches a process whose tensors grow by 4 GiB per step on a GPU of 80 GiB."""

    def __init__(self, prevented: bool) -> None:
        self.pressures: list[MemoryPressure | None] = []
        self.warnings: list[str] = []
        self.requests: list[tuple[str, int]] = []
        self._prevented = prevented
        self._warning = EarlyWarning(1_000, self._prevent, self, self.warnings.append)

    def pressure(self, pressure: MemoryPressure | None) -> None:
        self.pressures.append(pressure)

    def _prevent(self, pressure: MemoryPressure, step: int) -> frozenset[Role] | None:
        self.requests.append((pressure.diagnosis.class_name, step))
        return frozenset() if self._prevented else None

    def look(self, step: int) -> None:
        allocated = (10 + 4 * step) * GIB
        sample = MemorySample(
            allocated_bytes=allocated,
            reserved_bytes=allocated,
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=allocated,
            device_free_bytes=80 * GIB - allocated,
            device_total_bytes=80 * GIB,
        )
        self._warning.look(step, {"policy-0": {"update": sample}})


def test_memory_pressure_warns_once_and_is_reported_every_step() -> None:
    watch = GrowthListener(prevented=False)
    for step in range(1, 15):
        watch.look(step)
    assert watch.pressures[0] is None
    assert watch.pressures[-1] is not None
    [warned] = watch.warnings
    assert warned.startswith("MemoryPressure: policy rank 0 is projected to run out of memory")
    assert "RetainedGraph" in warned
    assert watch.requests[-1] == ("RetainedGraph", 15), "the plan would be changed before the next step"


def test_a_change_resets_the_forecast() -> None:
    watch, step = GrowthListener(prevented=True), 0
    while not watch.requests:
        step += 1
        watch.look(step)
    watch.look(step + 1)
    assert watch.pressures[-1] is None
    assert watch.requests == [("RetainedGraph", step + 1)]
