"""Counters that a write of a job's status increases."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.plan_change import PlanChange
from rljob_api.status import RLJobStatus
from rljob_operator.apply.executor import status_object
from rljob_operator.metrics import REGISTRY
from rljob_operator.runtime.reconcile_loop import count
from tests.unit.operator.objects.builders import CHANGE

FAILURE = {"time": CHANGE.time, "step": 2, "diagnosis": CHANGE.diagnosis}


def counted(before: RLJobStatus, after: RLJobStatus) -> dict[str, float]:
    """The counters that the write increased, and by how much."""

    def values() -> dict[str, float]:
        samples = [sample for family in REGISTRY.collect() for sample in family.samples]
        return {
            "".join((sample.name.removeprefix("rljob_operator_"), *sample.labels.values())): sample.value
            for sample in samples
            if not sample.name.endswith("_bucket") and not sample.name.startswith("process_")
        }

    earlier = values()
    count(status_object(before), after)
    return {name: grown for name, value in values().items() if (grown := value - earlier.get(name, 0.0))}


def status(*changes: PlanChange, **fields: Any) -> RLJobStatus:
    return RLJobStatus(plan_changes=list(changes), **fields)


MADE_UP = CHANGE.model_copy(
    update={
        "diagnosis": CHANGE.diagnosis.model_copy(update={"class_name": "MadeUp"}),
        "remedy": CHANGE.remedy.model_copy(update={"setting": "madeUp"}),
    }
)
PREVENTIVE = CHANGE.model_copy(update={"preventive": True})
RECOVERED = CHANGE.model_copy(update={"seconds_to_recover": 12.5})
ADJUSTED, FAILED = {"adjustments_totalmicroBatchTokens": 1}, {"out_of_memory_totalActivationSpike": 1}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (status(), status(CHANGE, last_out_of_memory=FAILURE), ADJUSTED | FAILED),
        (status(), status(MADE_UP), {"adjustments_totalother": 1, "out_of_memory_totalUnknown": 1}),
        (status(), status(PREVENTIVE), ADJUSTED),
        (status(CHANGE), status(CHANGE, last_out_of_memory=FAILURE | {"step": 9}), FAILED),
        (status(CHANGE), status(RECOVERED), {"seconds_to_recover_count": 1, "seconds_to_recover_sum": 12.5}),
        (
            status(restarts=1),
            status(restarts=2, display={"phase": "Failed"}),
            {"job_restarts_total": 1, "jobs_finished_totalFailed": 1},
        ),
    ],
    ids=["failure and change", "made-up words", "preventive", "nothing changed", "recovered", "restart and end"],
)
def test_additions_of_a_status_write_are_counted_once(
    before: RLJobStatus, after: RLJobStatus, expected: dict[str, float]
) -> None:
    assert counted(before, after) == expected
    assert counted(after, after) == {}
