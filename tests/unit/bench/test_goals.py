"""The table of goals: results and outcomes come from the records."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from bench.report import goal_readings as readings
from bench.report.goal_readings import Reading
from bench.report.goals import GOALS, NO, NOT_MEASURED, YES, Bound, Goal, outcome, reading_of, rendered
from bench.report.markdown import has_result

AT_MOST_FIVE, AT_LEAST_FIVE = Bound(5), Bound(5, is_minimum=True)


def result(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"rows": list(rows)}


def goal(**fields: Any) -> Goal:
    """A goal that reads the record of topologies, if not changed by `fields`."""
    known = Goal("A step", "≤ 5 s", AT_MOST_FIVE, ("topologies",), lambda _: Reading(4, "4.0 s"), "[steps](#steps)")
    return replace(known, **fields)


@pytest.mark.parametrize(
    ("bound", "reading", "expected"),
    [
        (AT_MOST_FIVE, Reading(5, ""), YES),
        (AT_MOST_FIVE, Reading(5.01, ""), NO),
        (AT_LEAST_FIVE, Reading(5, ""), YES),
        (AT_LEAST_FIVE, Reading(4.99, ""), NO),
        (AT_MOST_FIVE, Reading(4, "", highest=6), NOT_MEASURED),
        (AT_LEAST_FIVE, Reading(4, "", highest=6), NOT_MEASURED),
        (AT_MOST_FIVE, Reading(6, "", highest=7), NO),
        (AT_MOST_FIVE, None, NOT_MEASURED),
    ],
)
def test_a_bound_decides_only_what_the_record_determines(bound: Bound, reading: Reading, expected: str) -> None:
    assert outcome(bound, reading) == expected


def test_the_cause_is_listed_only_if_a_goal_is_not_met() -> None:
    text = rendered(
        [
            goal(cause="Not shown."),
            goal(subject="A rollout", reading=lambda _: Reading(6, "6.0 s")),
            goal(subject="A sync", results=("topologies", "no_such_result"), cause="Never run."),
        ]
    )
    assert "Met: 1 of 3 goals.\n" in text
    assert "| A step | ≤ 5 s | 4.0 s | yes | [steps](#steps) |" in text
    assert "| A rollout | ≤ 5 s | 6.0 s | no | [steps](#steps) |" in text
    assert "| A sync | ≤ 5 s | – | not measured | [steps](#steps) |" in text
    assert text.endswith(
        "\nMissed, and why:\n\n- **A rollout.** Cause not examined.\n"
        "\nNot measured, and why:\n\n- **A sync.** Never run.\n"
    )


@pytest.mark.parametrize("known", GOALS, ids=lambda known: known.subject)
def test_the_aim_in_words_is_the_bound(known: Goal) -> None:
    words = re.match(r"([≤<≥]) ([\d.]+)", known.aim)
    if words is None:
        assert known.aim in ("trains", "all", "none")
    else:
        assert (words[1] == "≥", float(words[2])) == (known.bound.is_minimum, known.bound.limit)


@pytest.mark.parametrize("known", GOALS, ids=lambda known: known.subject)
def test_a_recorded_result_has_a_reading_and_causes_are_sentences(known: Goal) -> None:
    if all(map(has_result, known.results)):
        assert reading_of(known) is not None
    assert known.cause.endswith(".")


def test_an_arm_that_is_not_recorded_has_no_reading() -> None:
    for read in (
        readings.of_arm("8b", readings.step),
        readings.of_arm("8b", readings.trains),
        readings.of_arm("8b", readings.peak_gpu),
        readings.of_arm("8b", readings.first_step),
    ):
        assert read(result({"arm": "14b"})) is None
    assert readings.speed_up("overlapped", "disaggregated")(result({"arm": "overlapped", "exit_code": 80})) is None


def test_a_failed_arm_does_not_train() -> None:
    failed = result({"arm": "32b", "message": "WeightSyncSpike: the copies of the weights did not fit"})
    assert outcome(Bound(1, is_minimum=True), readings.of_arm("32b", readings.trains)(failed)) == NO


@pytest.mark.parametrize(("seconds", "expected"), [(4.9, YES), (7.9, NOT_MEASURED), (8.1, NO)])
def test_a_live_recovery_may_include_the_retried_phase(seconds: float, expected: str) -> None:
    rows = [
        {"arm": "live", "failure": failure, "seconds_lost": lost, "calm_phase_seconds": 3}
        for failure, lost in (("update", 4.0), ("sync", seconds))
    ]
    assert outcome(AT_MOST_FIVE, readings.live_recoveries(result(*rows))) == expected


@pytest.mark.parametrize(("percent", "expected"), [(0.05, YES), (0.2, NO), (-0.05, YES), (-0.2, NOT_MEASURED)])
def test_a_negative_cost_hides_costs_of_its_size(percent: float, expected: str) -> None:
    rows = (
        {"arm": "default plan, again", "without_generation_seconds": 100},
        {"arm": "none of them", "without_generation_seconds": 100 - percent},
        {"arm": "generation", "generate_seconds": 0},
    )
    assert outcome(Bound(0.1), readings.mitigations(result(*rows))) == expected


@pytest.mark.parametrize(("percent", "expected"), [(0.08, YES), (0.2, NO)])
def test_the_cost_of_the_probe_is_its_share_on_a_gpu(percent: float, expected: str) -> None:
    reading = readings.probe(result({"step_percent": percent}))
    assert reading.text == f"{percent:.3f} % of a step on a GPU (calculated)"
    assert outcome(Bound(0.1), reading) == expected


def failure(name: str, first: str, exit_codes: list[int]) -> dict[str, Any]:
    attempts = [{"class": first, "exit_code": 1}, *({"exit_code": code} for code in exit_codes)]
    return {"failure": name, "attempts": attempts}


def test_a_failure_counts_if_every_measurement_recovered_at_once() -> None:
    h200 = result(failure("update", "ActivationSpike", [0]), failure("engine-too-large", "KVCacheOversized", [0]))
    h100 = result(failure("engine-too-large", "ForeignProcess", [0]), failure("awake", "EngineNotAsleep", [1, 0]))
    assert readings.recovered_failures(h200).text == "2 of 3"
    assert readings.recovered_failures(h200, h100).text == "1 of 3"


def test_the_highest_reward_is_a_mean_of_five_steps() -> None:
    rewards = [0.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    row = {"steps": 7, "rewards": rewards, "last_reward": 0.7}
    found = readings.highest_reward(result(row))
    assert (found.value, found.text) == (0.9, "0.90; 0.70 in the last five of 7 steps")
