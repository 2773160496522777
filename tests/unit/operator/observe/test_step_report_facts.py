"""The content of a StepReport is the job's own, and within bounds, or it is ignored."""

from __future__ import annotations

import json

from rljob_api.api_model import MAX_INTEGER
from rljob_operator.metrics import STEP_REPORTS_REFUSED
from rljob_operator.observe.observer import Observer
from rljob_operator.observe.step_report_facts import MAX_STEP_REPORT_BYTES, parse_step_report, step_report_fact
from tests.unit.operator.observe.objects import UID, job, step_report


def test_the_content_is_read_or_its_first_error_is_reported() -> None:
    report, problem = step_report_fact(step_report(step=4)).content(UID)
    assert report is not None
    assert (report.step, problem) == (4, None)
    report, problem = step_report_fact(step_report(step="four", memory=[{}] * 9)).content(UID)
    assert report is None
    assert problem is not None
    assert problem.startswith("step: ")
    assert len(problem) <= 1024


def test_a_report_that_is_not_the_jobs_is_not_believed() -> None:
    assert step_report_fact(step_report(owner="uid of a deleted job", step=4)).content(UID) == (None, None)
    made_by_hand = step_report(step=4)
    del made_by_hand["metadata"]["ownerReferences"]
    assert step_report_fact(made_by_hand).content(UID) == (None, None)


def test_a_foreign_report_wakes_no_job() -> None:
    woken: list[tuple[str, str]] = []
    observer = Observer(("nvidia.com/gpu",), woken.append)
    observer.step_reports.put(step_report(version=39, step=1))
    observer.jobs.put(job())
    woken.clear()
    observer.step_reports.put(step_report(version=40, owner="another", step=2))
    assert woken == [("research", "sums")], "the job's own report was replaced"
    observer.step_reports.put(step_report(version=41, owner="another", step=3))
    assert len(woken) == 1


def test_a_report_that_is_too_large_is_not_read() -> None:
    before = STEP_REPORTS_REFUSED._value.get()
    fact = step_report_fact(step_report(lastEvidence={"message": "x" * MAX_STEP_REPORT_BYTES}))
    assert fact.packed_text == b""
    report, problem = fact.content(UID)
    assert report is None
    assert "256 KiB" in (problem or "")
    assert STEP_REPORTS_REFUSED._value.get() == before + 1


def test_content_beyond_the_bounds_is_brought_within_them() -> None:
    numbers = {"limit_bytes": -(2**70), "n" * 65: 1} | {f"n{index}": index for index in range(40)}
    diagnosis = {"class": "c" * 99, "confidence": 7, "message": "m" * 3000, "numbers": numbers}
    content = {
        "step": -5,
        "attempt": 1,
        "later": {"field": 1},
        "seconds": {"rollout": 1e300},
        "memory": [{"role": "policy", "rank": 0, "peakRssBytes": 2**63}] * 300,
        "memoryPressure": {"diagnosis": diagnosis, "role": "policy", "stepsLeft": 2**80},
    }
    report, problem = parse_step_report(json.dumps(content).encode())
    assert problem is None
    assert report is not None
    assert report.memory_pressure is not None
    assert report.seconds is not None
    assert (report.step, report.seconds.rollout, len(report.memory)) == (0, 1e9, 256)
    assert report.memory[0].peak_rss_bytes == report.memory_pressure.steps_left == MAX_INTEGER
    found = report.memory_pressure.diagnosis
    assert (len(found.class_name), found.confidence, len(found.message), len(found.numbers)) == (64, 1, 2048, 32)
    assert found.numbers["limit_bytes"] == -MAX_INTEGER
    assert "n" * 65 not in found.numbers
