"""Counters that a write of a job's status increases."""

from __future__ import annotations

from typing import Any

from rljob_api.plan_change import PlanChange
from rljob_api.status import RLJobStatus
from rljob_operator.apply.status_patch import status_object
from rljob_operator.metrics import REGISTRY
from rljob_operator.runtime.job_metrics import count
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


def test_a_change_and_its_failure_are_counted_once() -> None:
    after = status(CHANGE, last_out_of_memory=FAILURE)
    assert counted(status(), after) == {"adjustments_totalmicroBatchTokens": 1, "out_of_memory_totalActivationSpike": 1}
    assert counted(after, after) == {}


def test_words_that_pods_made_up_are_no_labels() -> None:
    diagnosis = CHANGE.diagnosis.model_copy(update={"class_name": "MadeUp"})
    remedy = CHANGE.remedy.model_copy(update={"setting": "madeUp"})
    after = status(CHANGE.model_copy(update={"diagnosis": diagnosis, "remedy": remedy}))
    assert counted(status(), after) == {"adjustments_totalother": 1, "out_of_memory_totalUnknown": 1}


def test_a_preventive_change_is_no_failure() -> None:
    after = status(CHANGE.model_copy(update={"preventive": True}))
    assert counted(status(), after) == {"adjustments_totalmicroBatchTokens": 1}


def test_a_failure_that_nothing_was_changed_after_is_counted_too() -> None:
    after = status(CHANGE, last_out_of_memory=FAILURE | {"step": 9})
    assert counted(status(CHANGE), after) == {"out_of_memory_totalActivationSpike": 1}


def test_the_time_to_recover_is_observed_when_it_is_known() -> None:
    recovered = CHANGE.model_copy(update={"seconds_to_recover": 12.5})
    assert counted(status(CHANGE), status(recovered)) == {"seconds_to_recover_count": 1, "seconds_to_recover_sum": 12.5}
    assert counted(status(recovered), status(recovered)) == {}


def test_restarts_and_ends_are_counted_once() -> None:
    failed = status(restarts=2, display={"phase": "Failed"})
    assert counted(status(restarts=1), failed) == {"job_restarts_total": 1, "jobs_finished_totalFailed": 1}
    assert counted(failed, failed) == {}
