"""The one wording of failures, changes, recoveries and warnings."""

from __future__ import annotations

import pytest

from rljob_api.plan_change import Phase, PlanChange, RemedyStatus, Role
from rljob_api.step_report import MemoryPressure
from rljob_memory.recovery import messages
from rljob_memory.sizes import GIB
from tests.unit.memory.recovery.failures import (
    FIRST_PLAN,
    FRAGMENTED,
    change_after,
    constraints,
    diagnosis,
    failure,
)

SPIKE = diagnosis("ActivationSpike", requested_bytes=2 * GIB, free_bytes=GIB)


def a_change(setting: str, before: str, after: str, expected: int | None = None, **more: object) -> PlanChange:
    change = change_after(failure(SPIKE, step=41), FIRST_PLAN, constraints()).change
    remedy = RemedyStatus(setting=setting, before=before, after=after, expected_bytes=expected)
    return change.model_copy(update={"remedy": remedy, **more})


@pytest.mark.parametrize(
    ("role", "rank", "phase", "expected"),
    [
        ("policy", 3, "update", "policy rank 3 in update, step 7"),
        (
            "controller",
            0,
            None,
            "the controller at startup, step 7",
        ),
    ],
)
def test_an_out_of_memory_failure_names_process_place_cause_and_numbers(
    role: Role, rank: int, phase: Phase | None, expected: str
) -> None:
    message = messages.out_of_memory_message(role, rank, phase, 7, SPIKE)
    assert message == f"{expected}: ActivationSpike (2.00 GiB requested, 1.00 GiB free)"


def test_fragmentation_first_names_the_memory_that_could_not_be_used() -> None:
    message = messages.out_of_memory_message("policy", 0, "update", 7, FRAGMENTED)
    assert message.endswith(": Fragmentation (6.00 GiB reserved but unusable, 2.00 GiB requested)")


def test_a_failure_without_numbers_names_its_class() -> None:
    message = messages.out_of_memory_message("policy", 1, "update", 4, diagnosis("HostMemory"))
    assert message == "policy rank 1 in update, step 4: HostMemory"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            a_change("microBatchTokens", "192", "96", 2 << 20),
            "microBatchTokens 192 → 96 (generation 2, expected to free 2 MiB)",
        ),
        (
            a_change("hostMemory", "default", "6Gi", 2 * GIB),
            "hostMemory default → 6Gi (generation 2)",
        ),
        (
            a_change("sharedMemory", "1Gi", "2Gi", GIB),
            "sharedMemory 1Gi → 2Gi (generation 2)",
        ),
        (
            a_change("processes", "kept", "fresh", 3 * GIB),
            "restarting processes, the memory plan is unchanged (generation 2, expected to free 3.00 GiB)",
        ),
        (
            a_change("detachMetrics", "Disabled", "Enabled", preventive=True),
            "detachMetrics Disabled → Enabled (generation 2, before a failure)",
        ),
    ],
)
def test_a_change_names_both_values_and_the_memory_that_it_frees(change: PlanChange, expected: str) -> None:
    assert messages.changed_message(change) == expected


def test_a_recovery_names_the_step_the_seconds_and_the_freed_memory() -> None:
    recovered = a_change("microBatchTokens", "192", "96", seconds_to_recover=38.2)
    assert messages.recovered_message(recovered) == "resumed at step 41 after 38 s"
    remedy = recovered.remedy.model_copy(update={"observed_bytes": 6 * GIB})
    message = messages.recovered_message(recovered.model_copy(update={"remedy": remedy}))
    assert message == "resumed at step 41 after 38 s; freed 6.00 GiB"


def test_a_warning_names_the_process_and_the_steps_left() -> None:
    pressure = MemoryPressure(diagnosis=diagnosis("RetainedGraph"), role="policy", steps_left=12)
    expected = "policy rank 0 is projected to run out of memory in 12 steps: RetainedGraph: It was RetainedGraph."
    assert messages.pressure_message(pressure) == expected
