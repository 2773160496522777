"""Evaluations between two steps: when they run, that they recover, and that they leave the training as it is."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_api.checkpoint import CheckpointSpec
from rljob_api.evaluation import EvaluationSpec
from rljob_client.errors import BadInput
from rljob_client.run_directory.ledger import read_ledger
from rljob_client.run_directory.records import EvaluationRecord, evaluation_records
from rljob_trainer.errors import WorkerLost
from rljob_trainer.tasks.rewards import Reward
from tests.unit.trainer.simulated_roles import DEAD, WHOLE, SimulatedGeneration, SimulatedRoles
from tests.unit.trainer.test_controller_recovers import HOW, ResumedJob, undisturbed

EVALUATED = EvaluationSpec(args={}, every_steps=2, samples_per_prompt=2, temperature=1.0, keep_best=True)
STEPS_EVALUATED = [0, 2, 4, 6]
EXPORTED = CheckpointSpec(export_every_steps=2, keep_exports=2)


def reward_of(function: Callable[..., float]) -> Reward:
    return Reward("reward", function, frozenset({"completion_ids"}), label="reward")


def evaluations(job: ResumedJob) -> list[EvaluationRecord]:
    records = read_ledger(job.directory / "ledger.jsonl").records
    found = [record for record in records if isinstance(record, EvaluationRecord)]
    assert len(found) == len(evaluation_records(records)), "a step was evaluated twice"
    return found


@pytest.fixture(scope="module", params=[0, 1], ids=["fresh", "stale"])
def without_evaluation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ResumedJob:
    return undisturbed(tmp_path_factory.mktemp("jobs") / "whole", staleness=request.param)


@pytest.fixture(scope="module")
def with_evaluation(without_evaluation: ResumedJob, tmp_path_factory: pytest.TempPathFactory) -> ResumedJob:
    directory = tmp_path_factory.mktemp("jobs") / "evaluated"
    return undisturbed(directory, staleness=without_evaluation.staleness, evaluation=EVALUATED, checkpoint=EXPORTED)


def test_evaluations_leave_the_training_as_it_is(with_evaluation: ResumedJob, without_evaluation: ResumedJob) -> None:
    assert (with_evaluation.model, with_evaluation.rewards) == (without_evaluation.model, without_evaluation.rewards)
    records = evaluations(with_evaluation)
    assert [record.step for record in records] == STEPS_EVALUATED
    assert {record.prompts for record in records} == {5}
    assert len({record.metrics["reward_mean"] for record in records}) == 4, "each with its own weights"


def test_the_best_model_and_the_latest_exports_are_kept(with_evaluation: ResumedJob) -> None:
    directory, records = with_evaluation.directory, evaluations(with_evaluation)
    best = max(records, key=lambda record: record.metrics["reward_mean"])
    stored = json.loads((directory / "best" / "evaluation.json").read_text())
    assert stored == {"step": best.step, "metric": "reward_mean", "score": best.metrics["reward_mean"]}
    assert records[-1].best is not None
    assert records[-1].best.step == best.step
    assert [path.name for path in sorted((directory / "models").iterdir())] == ["step-000004", "step-000006"]
    assert (directory / "models/step-000006/weights").read_text() == with_evaluation.model
    if best.step in (4, 6):
        of_step = directory / f"models/step-{best.step:06d}"
        assert (directory / "best/weights").read_text() == (of_step / "weights").read_text()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    failures=st.dictionaries(st.integers(1, 60), HOW | st.just(DEAD), min_size=1, max_size=6),
    ranks=st.sampled_from([1, 2]),
)
def test_no_failure_changes_an_evaluation_or_a_step(
    failures: dict[int, str], ranks: int, with_evaluation: ResumedJob
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        job = ResumedJob(
            Path(directory), staleness=with_evaluation.staleness, evaluation=EVALUATED, checkpoint=EXPORTED
        )
        for _ in range(12):
            try:
                job.attempt(SimulatedRoles(failures, ranks))
                break
            except WorkerLost:
                failures = {call: how for call, how in failures.items() if how != DEAD}
        assert (job.model, job.rewards) == (with_evaluation.model, with_evaluation.rewards)
        metrics = [(record.step, record.metrics, record.best) for record in evaluations(job)]
        assert metrics == [(record.step, record.metrics, record.best) for record in evaluations(with_evaluation)]
        for name in ("best/evaluation.json", "best/weights", "models/step-000004/weights"):
            assert (job.directory / name).read_text() == (with_evaluation.directory / name).read_text()


def test_an_engine_that_fails_repeats_the_evaluation_and_no_step(tmp_path: Path) -> None:
    class RecordedRoles(SimulatedRoles):
        def generate(self, step: int, *arguments: Any) -> SimulatedGeneration:
            calls.append(step)
            if calls == [1, 2, 3, 3]:  # the second is that of the evaluation
                self.failures["generate 3"] = WHOLE
            return super().generate(step, *arguments)

    calls: list[int] = []
    job = ResumedJob(tmp_path, evaluation=EvaluationSpec(args={}, every_steps=3, at_start=False))
    roles, listener, _ = job.attempt(RecordedRoles({}))
    assert calls == [1, 2, 3, 3, 3, 4, 5, 6, 6]
    assert roles.updates == [1, 2, 3, 4, 5, 6]
    assert listener.evaluated_steps == [3, 6]


def test_an_evaluation_has_a_time_limit_by_its_work_and_no_fault_of_a_step(tmp_path: Path) -> None:
    from rljob_trainer.roles.time_limit import current_limit

    class LimitsOfEvaluations(SimulatedRoles):
        def generate(self, step: int, *arguments: Any) -> SimulatedGeneration:
            limit = current_limit()
            assert limit is not None
            limits.append((step, limit.seconds))
            return super().generate(step, *arguments)

    limits: list[tuple[int, float]] = []
    job = ResumedJob(tmp_path, steps=2, evaluation=EvaluationSpec(args={}, samples_per_prompt=4, temperature=1.0))
    job.attempt(LimitsOfEvaluations({}))
    assert limits == [(0, 5 * 3600), (1, 600), (2, 600), (2, 5 * 600)], "20 responses; a step has 4"


def test_a_stop_during_an_evaluation_leaves_it_to_the_next_attempt(tmp_path: Path) -> None:
    class Stopping(SimulatedRoles):
        def generate(self, step: int, *arguments: Any) -> SimulatedGeneration:
            if len(self.updates) == 6:
                job.stop.handle(signal.SIGTERM, None)
            return super().generate(step, *arguments)

    job = ResumedJob(tmp_path, evaluation=EvaluationSpec(args={}, at_start=False))
    job.attempt(Stopping({}))
    assert (evaluations(job), len(job.rewards)) == ([], 6)
    assert not (tmp_path / "model").exists(), "it is written after the evaluation"
    job.stop = ResumedJob(tmp_path).stop
    roles, _, _ = job.attempt(SimulatedRoles({}))
    assert roles.updates == []
    assert [record.step for record in evaluations(job)] == [6]
    assert (tmp_path / "model").exists()


def test_a_reward_function_that_fails_ends_the_job_before_the_record(tmp_path: Path) -> None:
    def fails(completion_ids: Any) -> float:
        raise ValueError("no digit")

    job = ResumedJob(tmp_path, evaluation=EVALUATED, functions=[reward_of(fails)])
    with pytest.raises(BadInput, match="ValueError: no digit"):
        job.attempt(SimulatedRoles({}))
    assert evaluations(job) == []


@pytest.mark.parametrize(
    ("spec", "due"),
    [
        (EvaluationSpec(held_out=1), [0, 6]),
        (EvaluationSpec(held_out=1, at_start=False, at_end=False, every_steps=4), [4]),
        (EvaluationSpec(held_out=1, at_start=False, every_steps=3), [3, 6]),
    ],
)
def test_the_steps_that_are_evaluated(spec: EvaluationSpec, due: list[int]) -> None:
    assert [step for step in range(7) if spec.is_due(step, steps=6)] == due


def test_of_equal_evaluations_the_first_is_the_best(tmp_path: Path) -> None:
    job = ResumedJob(tmp_path, evaluation=EVALUATED, functions=[reward_of(lambda completion_ids: 0.5)])
    job.attempt(SimulatedRoles({}))
    assert [record.best.step for record in evaluations(job) if record.best] == [0, 0, 0, 0]
    assert json.loads((tmp_path / "best" / "evaluation.json").read_text())["step"] == 0
