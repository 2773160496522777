"""Steps that trained on nothing, as the ledger has them and in the loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rljob_client.errors import BadInput
from rljob_client.run_directory.records import ResponseStatistics, StepRecord
from rljob_trainer.errors import WorkerLost
from rljob_trainer.runtime.step_health import findings, require_learning
from rljob_trainer.tasks.rewards import Reward
from tests.unit.ledger.samples import step_record
from tests.unit.trainer.simulated_roles import DEAD
from tests.unit.trainer.test_controller_recovers import STEPS, Measured, ResumedJob

NAN, INF = math.nan, math.inf
HEALTHY = {"loss": 0.1, "grad_norm": 0.5, "tokens": 128.0, "dropped_tokens": 0.0, "uniform_groups": 0.5}
LOST = {"grad_norm": NAN, "skipped_updates": 1.0}
ALL_SKIPPED = {"grad_norm": NAN, "skipped_updates": 2.0}
ALL_DROPPED = {"grad_norm": 0.0, "dropped_tokens": 128.0}
UNIFORM = {"grad_norm": 0.0, "uniform_groups": 1.0}


def step(number: int, reward: float = 0.5, response: Any = None, **metrics: float) -> StepRecord:
    """`response`: the longest one, in tokens, and the share of those that were cut."""
    changes: dict[str, Any] = {"metrics": HEALTHY | metrics}
    if response is not None:
        most, clipped = response
        changes["response"] = ResponseStatistics(mean_tokens=most, max_tokens=most, clipped_ratio=clipped)
    return step_record(number, reward, **changes)


def end_of(steps: Sequence[StepRecord], limit: int = 0, total: int = 60) -> str:
    """Reason to end the run after `steps`; empty if it continues. `limit`: steps without learning."""
    try:
        require_learning(steps, max_steps_without_learning=limit, total_steps=total)
    except BadInput as reason:
        return str(reason)
    return ""


def run_of(*steps: dict[str, float], reward: float = 0.5) -> list[StepRecord]:
    return [step(number, reward, **metrics) for number, metrics in enumerate(steps, start=1)]


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (ALL_SKIPPED, "not finite: grad_norm, updates skipped because their gradient is not finite: 2"),
        (ALL_DROPPED, "without a finite log-probability from the engine: 128 of 128"),
        ({"dropped_tokens": 3.0}, "from the engine: 3 of 128"),
        *(({"loss": value}, "metrics that are not finite: loss") for value in (NAN, INF, -INF)),
    ],
)
def test_each_number_that_is_not_finite_is_found(metrics: dict[str, float], expected: str) -> None:
    [found] = findings(run_of({}, metrics), responses_may_end=True)
    assert found.reason == "NumbersNotFinite"
    assert expected in found.message
    assert found.message.startswith("step 2: ")


@pytest.mark.parametrize(
    ("response", "may_end", "reasons"),
    [
        ((8, 0.25), True, []),
        ((8, 1.0), True, ["ResponsesTruncated"]),
        ((8, 1.0), False, []),
        ((0, 0.0), True, ["ResponsesEmpty"]),
        ((0, 0.5), True, ["ResponsesEmpty"]),
        ((1, 0.0), True, ["ResponsesEmpty"]),
        ((1, 0.5), True, []),
        ((1, 1.0), True, ["ResponsesTruncated"]),
        ((2, 0.0), True, []),
    ],
)
def test_responses_that_are_empty_or_never_end(response: Any, may_end: bool, reasons: list[str]) -> None:
    found = findings([step(1, response=response)], responses_may_end=may_end)
    assert [each.reason for each in found] == reasons


def test_the_gravest_problem_of_a_step_comes_first() -> None:
    found = findings([step(1, response=(8, 1.0), **ALL_SKIPPED | UNIFORM)], responses_may_end=True)
    assert [each.reason for each in found] == ["NumbersNotFinite", "RewardsEqual", "ResponsesTruncated"]
    solved = [*run_of(*[{}] * 6), step(7, 1.0, **UNIFORM)]
    for steps in ([], run_of({}), run_of(UNIFORM, {}), [step_record(1, metrics={})], solved):
        assert findings(steps, responses_may_end=True) == []
        assert not end_of(steps, limit=1)


def test_a_warning_is_repeated_at_growing_distances() -> None:
    steps = run_of(*[UNIFORM, UNIFORM, {}] * 8)
    warned = [n for n in range(1, 25) for each in findings(steps[:n], responses_may_end=True) if each.is_due]
    assert warned == [1, 2, 5, 11, 23], "the steps 1, 2, 4, 8 and 16 of those that are uniform"
    [last] = findings(steps[:23], responses_may_end=True)
    assert "(16 of 23 steps so far)" in last.message


@pytest.mark.parametrize("lost", [ALL_SKIPPED, ALL_DROPPED, {"grad_norm": INF, "skipped_updates": 1.0}])
def test_three_steps_in_a_row_without_a_finite_number_end_the_run(lost: dict[str, float]) -> None:
    for steps in (run_of({}, lost, lost), run_of(lost, lost, {}, lost, lost), run_of(lost, lost, lost, {})):
        assert not end_of(steps)
    reason = end_of(run_of({}, lost, lost, lost))
    assert "found 3 steps in a row (2 to 4) that learned nothing: " in reason
    assert "lower algorithm" in reason
    for steps in (run_of(lost), run_of(lost, lost)):
        assert "learned nothing" in end_of(steps, total=len(steps)), "a short job without a finite step"
    assert not end_of(run_of({}, lost), total=2)
    only_a_part = {"skipped_updates": 1.0, "dropped_tokens": 127.0, "loss": NAN}
    assert not end_of(run_of(*[only_a_part] * 9), limit=1)


def test_uniform_rewards_end_the_run_after_the_limit() -> None:
    steps = run_of({}, *[UNIFORM] * 50, reward=0.0)
    for going_on, limit in ((steps[:50], 50), (steps, 51), (steps, 0), ([*steps, step(52)], 50)):
        assert not end_of(going_on, limit, total=99)
    reason = end_of(steps, limit=50, total=99)
    assert "found 50 steps in a row (2 to 51)" in reason
    assert "recovery.maxStepsWithoutLearning, or 0" in reason


@pytest.mark.parametrize(("reward", "ends"), [(1.0, False), (0.3, False), (0.2, True), (0.0, True), (NAN, True)])
def test_a_task_that_is_solved_ends_no_run(reward: float, ends: bool) -> None:
    steps = [step(number, 0.1 * (number % 3)) for number in range(1, 6)]
    steps += [step(number, reward, **UNIFORM) for number in range(6, 10)]
    assert ("4 steps in a row" in end_of(steps, limit=4)) is bool(end_of(steps, limit=4)) is ends


# --- in the loop ---


def test_weights_that_become_nan_end_the_run_also_across_attempts(tmp_path: Path) -> None:
    job = ResumedJob(tmp_path)
    roles = Measured(range(2, STEPS + 1), **LOST)
    roles.failures, roles.ray_ended = {"generate 3": DEAD}, True
    with pytest.raises(WorkerLost):
        job.attempt(roles)
    assert "warning: step 2: metrics that are not finite: grad_norm" in job.printed
    for found in (r"3 steps in a row \(2 to 4\)", r"4 steps in a row \(2 to 5\)"):
        with pytest.raises(BadInput, match=f"found {found} that learned nothing"):
            job.attempt(Measured(range(2, STEPS + 1), **LOST))
    assert len(job.rewards) == 5


def test_a_job_whose_last_steps_learned_nothing_exports_no_model(tmp_path: Path) -> None:
    job = ResumedJob(tmp_path)
    for _ in range(2):  # the second attempt has no step left
        with pytest.raises(BadInput, match=r"found 3 steps in a row \(4 to 6\)"):
            job.attempt(Measured([4, 5, 6], **LOST))
    assert len(job.rewards) == STEPS
    assert not (tmp_path / "model").exists()


def test_a_replay_that_skips_an_update_is_refused(tmp_path: Path) -> None:
    job, lost = ResumedJob(tmp_path), Measured([])
    lost.failures, lost.ray_ended = {"generate 4": DEAD}, True
    with pytest.raises(WorkerLost):
        job.attempt(lost)
    expected = r"replay of step 3 to skip 0 updates .* found 1: the restored weights are damag"
    with pytest.raises(BadInput, match=expected):
        job.attempt(Measured([3], **LOST))
    assert len(job.rewards) == 3


def test_each_step_reports_its_warning_or_none(tmp_path: Path) -> None:
    _, listener, _ = ResumedJob(tmp_path).attempt(Measured([2, 3, 5], **LOST))
    lost = "NumbersNotFinite"
    assert listener.warnings == [None, lost, lost, None, lost, None]


def test_failed_rewards_are_warned_of_at_growing_distances(tmp_path: Path) -> None:
    job = ResumedJob(tmp_path, functions=[Reward("failing", lambda answer, record: 1 / 0)])
    _, listener, printed = job.attempt(Measured([]))
    warned = [n for n in range(1, STEPS + 1) if f"warning: step {n}: 4 of 4 rewards are 0" in printed]
    assert warned == [1, 2, 4]
    assert set(listener.warnings) == {"RewardsEqual"}
