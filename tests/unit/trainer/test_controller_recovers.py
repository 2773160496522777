"""A run with any failures has the same weights and rewards as a run without a failure."""

from __future__ import annotations

import io
import itertools
import math
import tempfile
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from rljob_api.algorithm import AlgorithmSpec, DynamicSamplingSpec, OverlongPenaltySpec
from rljob_api.checkpoint import CheckpointSpec
from rljob_api.evaluation import EvaluationSpec
from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemorySettings
from rljob_api.model import ModelSpec
from rljob_api.plan_change import PlanChange, RemedyLevel, Role
from rljob_api.recovery import RecoverySpec
from rljob_api.step_report import TrainingWarning
from rljob_api.task import TaskSpec
from rljob_client.errors import BadInput
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.records import EvaluationRecord, PlanChangeRecord, StepRecord, plan_change_records
from rljob_memory.recovery import Constraints
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import MIB
from rljob_testing.memory_plans import memory_plan, memory_setup
from rljob_trainer.algorithms.advantages import relative_to_group
from rljob_trainer.display.run_display import RunDisplay
from rljob_trainer.errors import DeviceOutOfMemory, HostOutOfMemory, WorkerLost
from rljob_trainer.ledger.checkpoint_store import CheckpointStore
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.ledger.output_directory import OutputDirectory
from rljob_trainer.policy.config import UpdateResult
from rljob_trainer.recovery.early_warning import EarlyWarning
from rljob_trainer.recovery.fault_schedule import FaultSchedule
from rljob_trainer.recovery.phase_deadlines import PhaseDeadlines
from rljob_trainer.recovery.plan_changes import PlanChanges, state_at_start
from rljob_trainer.recovery.recovery import KernelKills, Recovery
from rljob_trainer.roles.checkpointing import Checkpointing
from rljob_trainer.roles.time_limit import current_limit
from rljob_trainer.rollout_batch import Prompt, RolloutBatch
from rljob_trainer.run_listener import RunListener
from rljob_trainer.runtime.between_steps import BetweenSteps
from rljob_trainer.runtime.controller import Controller
from rljob_trainer.runtime.evaluation import Evaluation
from rljob_trainer.runtime.exports import ModelExports
from rljob_trainer.runtime.phases import Phases
from rljob_trainer.runtime.step_rollouts import StepRollouts
from rljob_trainer.runtime.step_scoring import StepScoring
from rljob_trainer.runtime.stop_request import StopRequest
from rljob_trainer.tasks.rewards import Reward
from rljob_trainer.tasks.scoring import ScoringHere
from rljob_trainer.tasks.task import Task
from tests.unit.trainer.simulated_roles import (
    DEAD,
    HALFWAY,
    START,
    WHOLE,
    SimulatedGeneration,
    SimulatedRoles,
    out_of_memory,
)

STEPS = 6
GIB = 1 << 30
SETUP = memory_setup()
FIRST_PLAN = memory_plan(micro_batch_tokens=1 << 14, kv_cache_bytes=16 * GIB, sync_bucket_bytes=GIB)


class Echo:
    """Its rewards depend on every token."""

    name = "echo"

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self.rewards = rewards

    def prompts(self, step: int, count: int) -> list[Prompt]:
        return [Prompt(index, [step, index], "") for index in self.items_of_step(step, count)]

    def items_of_step(self, step: int, count: int) -> list[int]:
        return list(range(count))

    indices = range(5)

    def prompt(self, index: int) -> Prompt:
        return Prompt(index, [index], "")


ECHO = Reward("echo", lambda completion_ids: sum(completion_ids) / 1024, frozenset({"completion_ids"}), label="echo")


PARITY = Reward(
    "parity", lambda completion_ids: float(completion_ids[0] % 2), frozenset({"completion_ids"}), label="parity"
)
"""Equal for half of the groups of two."""


class Listener(RunListener):
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.evaluated_steps: list[int] = []
        self.warnings: list[str | None] = []
        """Reason of the warning of each step."""

    def evaluated(self, record: EvaluationRecord) -> None:
        self.evaluated_steps.append(record.step)

    def plan_changed(self, change: PlanChange, plan: Any) -> None:
        self.events.append(("changed", change.generation))

    def recovered(self, change: PlanChange) -> None:
        self.events.append(("recovered", change.generation))

    def training_warning(self, warning: TrainingWarning | None) -> None:
        self.warnings.append(None if warning is None else warning.reason)


class Measured(SimulatedRoles):
    """Roles whose updates have other metrics in some steps."""

    def __init__(self, steps: Container[int], **metrics: float) -> None:
        super().__init__({})
        self._steps, self._metrics = steps, metrics

    def update(self, batch: RolloutBatch, *others: Any) -> dict[str, UpdateResult]:
        metrics = {"logprob_diff_mean": 0.02, "tokens": 4.0}
        metrics |= self._metrics if batch.step in self._steps else {}
        return {name: replace(result, metrics=metrics) for name, result in super().update(batch, *others).items()}


class WithoutRay(SimulatedRoles):
    """Roles whose Ray has ended."""

    ray_ended = True


class RecordedBatches(SimulatedRoles):
    def __init__(self, failures: dict[str, str]) -> None:
        super().__init__(failures)
        self.seen: list[RolloutBatch] = []
        """The batches of all updates."""

    def update(self, batch: RolloutBatch, *others: Any) -> dict[str, UpdateResult]:
        self.seen.append(batch)
        return super().update(batch, *others)


class LeakingRoles(SimulatedRoles):
    """Roles on a GPU of 80 GiB, whose engine keeps 5 GiB more after each sleep, until its process is replaced."""

    engines_sleep = True

    def update(self, batch: RolloutBatch, *others: Any) -> dict[str, UpdateResult]:
        results = super().update(batch, *others)
        self.slept = 1 + (self.slept if self.of_engine == self.engines_ended else 0)
        self.of_engine = self.engines_ended
        own, kept = 20 * GIB, (2 + 5 * self.slept) * GIB
        memory = MemorySample(
            allocated_bytes=own,
            reserved_bytes=own,
            peak_allocated_bytes=own,
            peak_reserved_bytes=2 * own,
            device_free_bytes=80 * GIB - own - kept,
            device_total_bytes=80 * GIB,
        )
        assert own + kept < 80 * GIB, "the GPU ran out of memory"
        return {name: replace(result, memory=memory) for name, result in results.items()}

    slept, of_engine = 0, 0


class LeakingPolicy(SimulatedRoles):
    """A policy that keeps 200 MiB more with each update, of a GPU or else of its container, until its processes end."""

    def __init__(self, device: str) -> None:
        super().__init__({})
        self.on_gpu = device == "gpu"
        self.leaked = 0
        self.ended = 0

    def end(self, role: Role) -> None:
        super().end(role)
        self.leaked, self.ended = 0, self.ended + (role == "policy")

    def update(self, batch: RolloutBatch, *others: Any) -> dict[str, UpdateResult]:
        self.leaked += 200 * MIB
        used = 6 * GIB + self.leaked
        assert used < 8 * GIB, "memory ran out"
        memory = MemorySample(anonymous_bytes=used, host_used_bytes=used, host_limit_bytes=8 * GIB)
        if self.on_gpu:
            memory = MemorySample(
                allocated_bytes=used,
                reserved_bytes=used,
                peak_allocated_bytes=used,
                peak_reserved_bytes=used,
                device_free_bytes=8 * GIB - used,
                device_total_bytes=8 * GIB,
            )
        return {name: replace(result, memory=memory) for name, result in super().update(batch, *others).items()}


@dataclass
class ResumedJob:
    """A job in a directory. Each `attempt` has its own roles."""

    directory: Path
    steps: int = STEPS
    max_adjustments: int = 100
    mode: str = "Auto"
    staleness: Literal[0, 1] = 0
    partial: int = 0
    max_rounds: int = 0
    """Rounds of dynamic sampling; 0: none."""
    mask_truncated: bool = False
    streams: bool = False
    """Updates begin before all groups are complete."""
    every_steps: int = 2
    """Between checkpoints."""
    functions: Sequence[Reward] = (ECHO,)
    levels: frozenset[RemedyLevel] = frozenset({"Live", "RespawnRole", "RestartInPlace"})
    evaluation: EvaluationSpec | None = None
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    stop: StopRequest = field(default_factory=lambda: StopRequest(lambda _text: None))

    def attempt(
        self, roles: SimulatedRoles, kills: Callable[[], int] = lambda: 0
    ) -> tuple[SimulatedRoles, Listener, str]:
        """Run one attempt. Returns its roles, the calls of its listener, and its output."""
        listener, screen = Listener(), io.StringIO()
        display = RunDisplay(Console(file=screen, width=200), "job", self.steps)
        (self.directory / "checkpoints").mkdir(exist_ok=True)
        with Ledger(self.directory / "ledger.jsonl") as ledger:
            memory = MemorySettings(mode=cast(Any, self.mode))
            state = state_at_start(ledger, self.steps)
            changes = PlanChanges(ledger, replace(state, plan=state.plan or FIRST_PLAN))
            record = ledger.begin_attempt(0.0, {}, changes.plan.model_dump(mode="json"), {})
            journal = RolloutJournal(self.directory / "journal")
            store = CheckpointStore(self.directory / "checkpoints", keep=2)
            checkpointing = Checkpointing(cast(Any, roles), store, journal, self.every_steps, display.warning)
            recovery = Recovery(
                attempt=record.attempt,
                directory=self.directory,
                changes=changes,
                constraints=Constraints(memory, RecoverySpec(max_adjustments=self.max_adjustments), SETUP, self.levels),
                roles=cast(Any, roles),
                checkpointing=checkpointing,
                settings_under=cast(Any, lambda plan: plan),
                kills=KernelKills(kills),
                display=display,
                listener=listener,
            )
            spec, task, scorer = self._spec(), cast(Task, Echo(self.functions)), ScoringHere(self.functions)
            step_rollouts = StepRollouts(spec.algorithm, task, scorer, cast(Any, roles))
            early_warning = EarlyWarning(self.steps, recovery.prevent, listener, display.warning)
            phases = Phases(
                attempt=record.attempt,
                roles=cast(Any, roles),
                ledger=ledger,
                journal=journal,
                checkpointing=checkpointing,
                recovery=recovery,
                faults=FaultSchedule([], ledger, cast(Any, roles), display.warning),
                deadlines=PhaseDeadlines(600, ledger.steps),
                early_warning=early_warning,
                display=display,
                listener=listener,
                on_replay=step_rollouts.observe,
            )
            exports = ModelExports(OutputDirectory(self.directory), cast(Any, roles), self.checkpoint)
            controller = Controller(
                spec=spec,
                step_rollouts=step_rollouts,
                scoring=StepScoring(spec, task, relative_to_group, ledger, display, listener),
                phases=phases,
                roles=cast(Any, roles),
                ledger=ledger,
                journal=journal,
                checkpointing=checkpointing,
                early_warning=early_warning,
                between_steps=BetweenSteps(self._evaluation(), exports),
                export=lambda: self._export(roles),
                display=display,
                listener=listener,
                stop=self.stop,
                attempt=record.attempt,
                stream_updates="1" if self.streams else None,
            )
            try:
                with checkpointing:
                    controller.run()
            finally:
                self.printed = screen.getvalue()
        return roles, listener, self.printed

    def _spec(self) -> RLJobSpec:
        return RLJobSpec.model_construct(
            model=ModelSpec.model_construct(uri="file:///model"),
            algorithm=AlgorithmSpec.model_construct(
                steps=self.steps,
                prompts_per_step=2,
                group_size=2,
                max_staleness=self.staleness,
                partial_rollout_prompts=self.partial,
                dynamic_sampling=DynamicSamplingSpec(max_rounds=self.max_rounds) if self.max_rounds else None,
                mask_truncated=self.mask_truncated,
            ),
            task=TaskSpec.model_construct(name="digits", on_reward_error="Zero"),
            recovery=RecoverySpec(max_steps_without_learning=0),
        )

    def _evaluation(self) -> Evaluation | None:
        if self.evaluation is None:
            return None
        return Evaluation(
            self.evaluation,
            cast(Task, Echo(self.functions)),
            ScoringHere(self.functions),
            on_reward_error="Fail",
            algorithm=self._spec().algorithm,
        )

    def _export(self, roles: SimulatedRoles) -> None:
        (self.directory / "model").write_text(str(roles.weights))

    @property
    def rewards(self) -> list[tuple[int, float]]:
        with Ledger(self.directory / "ledger.jsonl") as ledger:
            return [(step.step, step.reward.mean) for step in ledger.steps]

    @property
    def plan_changes(self) -> list[PlanChangeRecord]:
        with Ledger(self.directory / "ledger.jsonl") as ledger:
            return plan_change_records(ledger.records)

    @property
    def model(self) -> str:
        return (self.directory / "model").read_text()


def undisturbed(directory: Path, **settings: Any) -> ResumedJob:
    """A job without failures, for comparison."""
    directory.mkdir()
    job = ResumedJob(directory, **settings)
    roles, _, _ = job.attempt(SimulatedRoles({}))
    assert roles.updates == list(range(1, job.steps + 1))
    assert job.model != START
    return job


DYNAMIC: dict[str, Any] = {"max_rounds": 3, "functions": (PARITY,)}


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"streams": True},
        {"staleness": 1},
        {"staleness": 1, "partial": 1},
        DYNAMIC,
        DYNAMIC | {"staleness": 1},
    ],
    ids=["fresh", "streamed", "stale", "partial", "dynamic", "stale-dynamic"],
)
def without_failure(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ResumedJob:
    return undisturbed(tmp_path_factory.mktemp("jobs") / "whole", **request.param)


HOW = st.sampled_from([WHOLE, HALFWAY])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(failures=st.dictionaries(st.integers(1, 45), HOW, max_size=7), ranks=st.sampled_from([1, 2]))
def test_out_of_memory_failures_do_not_change_the_result(
    failures: dict[int, str], ranks: int, without_failure: ResumedJob
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        job = replace(without_failure, directory=Path(directory))
        _, listener, _ = job.attempt(SimulatedRoles(dict(failures), ranks))
        assert job.rewards == without_failure.rewards
        assert job.model == without_failure.model
        changed = [generation for event, generation in listener.events if event == "changed"]
        assert changed == [record.change.generation for record in job.plan_changes]
        if changed:
            assert listener.events[-1] == ("recovered", changed[-1])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(failures=st.dictionaries(st.integers(1, 30), HOW | st.just(DEAD), min_size=1, max_size=5))
def test_a_job_with_lost_processes_resumes_in_the_next_attempt(
    failures: dict[int, str], without_failure: ResumedJob
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        job = replace(without_failure, directory=Path(directory))
        for _ in range(10):
            try:
                job.attempt(SimulatedRoles(failures))
                break
            except WorkerLost:
                # The calls of the next attempt are counted from 1; injected failures do not recur.
                failures = {call: how for call, how in failures.items() if how != DEAD}
        assert job.rewards == without_failure.rewards
        assert job.model == without_failure.model


def test_the_next_step_is_generated_while_the_policy_learns(tmp_path: Path) -> None:
    class RecordedPhases(SimulatedRoles):
        def generate(self, step: int, *arguments: Any) -> SimulatedGeneration:
            calls.append(f"generate {step} with {self.engines_at}")
            return super().generate(step, *arguments)

        def update(self, batch: RolloutBatch, *others: Any) -> dict[str, UpdateResult]:
            calls.append(f"update {batch.step} by {batch.weights_version}")
            return super().update(batch, *others)

    calls: list[str] = []
    ResumedJob(tmp_path, staleness=1).attempt(RecordedPhases({}))
    assert calls[:6] == [
        "generate 1 with 0",
        "generate 2 with 0",
        "update 1 by 0",
        "generate 3 with 1",
        "update 2 by 0",
        "generate 4 with 2",
    ]
    assert calls[-2:] == ["update 5 by 3", "update 6 by 4"], "nothing is generated for a step that does not come"


def test_the_parts_of_an_update_are_journaled_before_it_ends(tmp_path: Path) -> None:
    class RecordedParts(SimulatedRoles):
        def update(self, batch: RolloutBatch, *others: Any) -> dict[str, UpdateResult]:
            journaled = RolloutBatch.load(tmp_path / "journal" / f"step-{batch.step:06d}.npz")
            parts.append((len(self.parts), journaled.parts.tolist(), journaled.metrics))
            return super().update(batch, *others)

    parts: list[tuple[int, list[int], dict[str, float]]] = []
    job = ResumedJob(tmp_path, streams=True)
    job.attempt(RecordedParts({}))
    # The group that is complete first is learnt from while the other one is generated.
    assert parts == [(1, [1, 0], {"streamed_groups": 0.5})] * STEPS


def test_an_update_that_may_wait_for_a_checkpoint_has_its_time_limit(tmp_path: Path) -> None:
    class RecordedLimits(SimulatedRoles):
        def update(self, batch: RolloutBatch, *others: Any) -> dict[str, UpdateResult]:
            limit = current_limit()
            assert limit is not None
            limits[batch.step] = limit.seconds
            return super().update(batch, *others)

    limits: dict[int, float] = {}
    ResumedJob(tmp_path).attempt(RecordedLimits({}))
    assert limits.pop(1) == 3600, "kernels are compiled"
    assert limits == {2: 600, 3: 3600, 4: 600, 5: 3600, 6: 600}, "checkpoints begin after steps 2 and 4"


def test_stale_rollouts_are_repeated_with_the_weights_of_their_step(tmp_path: Path) -> None:
    """The engine fails when the policy has learned already: it needs the policy's weights of one step before."""
    whole, failing = undisturbed(tmp_path / "whole", staleness=1), ResumedJob(tmp_path, staleness=1)
    roles, _, _ = failing.attempt(SimulatedRoles({"generate 5": WHOLE}))
    assert roles.updates == [1, 2, 3, 4, 3, 4, 5, 6], "back to the checkpoint of step 2, and to step 3 for the engine"
    assert (failing.rewards, failing.model) == (whole.rewards, whole.model)


@pytest.mark.parametrize("masked", [True, False])
def test_truncated_responses_take_no_part_if_they_are_masked(tmp_path: Path, masked: bool) -> None:
    """Then, the other response of each group has nothing to be compared with."""
    job, roles = ResumedJob(tmp_path, steps=2, mask_truncated=masked), SimulatedRoles({})
    roles.cut_members = {1}
    job.attempt(roles)
    batch = RolloutJournal(tmp_path / "journal").load(2)
    assert batch.takes_part.tolist() == [True, not masked] * 2
    assert bool(batch.advantages.any()) is not masked
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        metrics = ledger.steps[-1].metrics
    assert (metrics["masked_responses"], metrics["uniform_groups"]) == ((2, 1.0) if masked else (0, 0.0))


def test_a_step_continues_what_the_step_before_has_left(tmp_path: Path) -> None:
    """The journal has each span of a response with the version of the weights that generated it."""
    job = ResumedJob(tmp_path, staleness=1, partial=1)
    job.attempt(roles := RecordedBatches({}))
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        counted = [step.metrics["continued_responses"] for step in ledger.steps]
    assert sum(counted) > 0
    assert counted == [len(batch.continued) for batch in roles.seen]
    for batch, after in itertools.pairwise(roles.seen):
        [left] = batch.left
        begun = [(list(r.token_ids), list(r.weights_versions)) for r in left.responses if r.token_ids]
        ended = list(zip(map(list, after.response_ids), map(list, after.token_versions), strict=True))
        for ids, versions in begun:
            assert any(e[: len(ids)] == ids and v[: len(ids)] == versions for e, v in ended)
    for batch in roles.seen:
        allowed = {batch.weights_version, max((batch.weights_version or 0) - 1, 0)}
        assert {int(version) for versions in batch.token_versions for version in versions} <= allowed
    assert roles.seen[-1].left == [], "the last step leaves nothing"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_step_takes_groups_whose_rewards_differ(tmp_path: Path, staleness: Literal[0, 1]) -> None:
    """Each prompt of the sequence is taken or dropped once, and a warning names the steps that lack groups."""
    job = ResumedJob(tmp_path, staleness=staleness, functions=(PARITY,), max_rounds=3)
    _, _, printed = job.attempt(roles := RecordedBatches({}))
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        steps = ledger.steps
    drawn = 0
    for step, batch in zip(steps, roles.seen, strict=True):
        positions = [2 * (int(ids[0]) - 1) + int(ids[1]) for ids in batch.prompt_ids]
        assert drawn <= positions[0] < positions[1] < batch.prompts_drawn == step.prompts_drawn
        equal = [rewards[0] == rewards[1] for rewards in batch.rewards.reshape(-1, 2)]
        assert step.metrics["missing_groups"] == sum(equal) == 2 * step.metrics["uniform_groups"]
        drawn = step.prompts_drawn
    assert sum(step.metrics["dropped_groups"] for step in steps) == drawn - 2 * STEPS > 0
    lacking = [step.step for step in steps if step.metrics["missing_groups"]]
    assert len(lacking) < STEPS
    assert f"step {lacking[0]}: " in printed


def test_a_penalty_for_long_responses_is_part_of_the_reward(tmp_path: Path) -> None:
    class Penalized(ResumedJob):
        def _spec(self) -> RLJobSpec:
            spec = super()._spec()
            penalty = OverlongPenaltySpec(buffer_tokens=4, factor=0.5)
            algorithm = spec.algorithm.model_copy(update={"overlong_penalty": penalty, "max_response_tokens": 6})
            return spec.model_copy(update={"algorithm": algorithm})

    plain, penalized = ResumedJob(tmp_path / "plain", steps=1), Penalized(tmp_path / "penalized", steps=1)
    for job in (plain, penalized):
        job.directory.mkdir()
        job.attempt(SimulatedRoles({}))
    [(_, before)], [(_, after)] = plain.rewards, penalized.rewards
    assert after == pytest.approx(before - 0.25), "responses of 4 tokens are in the middle of the buffer"
    with Ledger(penalized.directory / "ledger.jsonl") as ledger:
        assert ledger.steps[0].metrics["overlong_penalty"] == -0.25


ALL = list(range(1, STEPS + 1))
FROM_CHECKPOINT = [1, 2, 3, 3, 4, 5, 6]
"""The updates of a run that returns to the checkpoint of step 2 in step 4."""


@pytest.mark.parametrize(
    ("failures", "ranks", "updates", "rejoined", "expected"),
    [
        ({"update 3": WHOLE}, 1, ALL, 0, "Recovered: resumed at step 3 after "),
        ({"update 4": HALFWAY}, 1, FROM_CHECKPOINT, 0, "Recovered: resumed at step 4 after "),
        ({"update 3": WHOLE, "update 4": HALFWAY}, 2, ALL, 2, "Recovered: resumed at step 4 after "),
        ({"update 4": WHOLE, "rejoin": DEAD}, 2, FROM_CHECKPOINT, 0, "Replacing the policy's processes"),
    ],
    ids=["a retry in the same process", "half-written parameters", "a new group", "no new group"],
)
def test_only_steps_whose_weights_are_lost_are_replayed(
    failures: dict[str, str], ranks: int, updates: list[int], rejoined: int, expected: str, tmp_path: Path
) -> None:
    roles, listener, printed = ResumedJob(tmp_path).attempt(SimulatedRoles(failures, ranks))
    assert (roles.updates, roles.rejoined) == (updates, rejoined)
    assert [event for event, _ in listener.events[:2]] == ["changed", "recovered"]
    assert "OutOfMemory: policy rank 0 in update, step " in printed
    assert "PlanChanged: " in printed
    assert expected in printed


@pytest.mark.parametrize(
    ("call", "updates", "engines_ended"),
    [("update 4", [1, 2, 3, 3, 4, 5, 6], 0), ("start checkpoint", [1, 2, 1, 2, 3, 4, 5, 6], 0), ("generate 4", [], 1)],
)
def test_only_the_role_of_a_lost_process_starts_again(
    tmp_path: Path, call: str, updates: list[int], engines_ended: int
) -> None:
    job = ResumedJob(tmp_path)
    roles, _, printed = job.attempt(SimulatedRoles({call: DEAD}))
    assert "Replacing a process: " in printed
    assert "died (restart 1 of 3); the other role continues" in printed
    assert (roles.updates, roles.engines_ended) == (updates or [1, 2, 3, 4, 5, 6], engines_ended)
    assert (tmp_path / "ledger.jsonl").read_text().count('"kind":"ready"') == 2
    assert job.model == undisturbed(tmp_path / "whole").model


@pytest.mark.parametrize(
    ("failures", "settings"),
    [
        ({"sync 3": DEAD}, {}),
        ({"update 3": DEAD}, {"levels": frozenset({"Live", "RespawnRole"})}),
        ({"update 4": DEAD, "load checkpoint": DEAD}, {}),
    ],
    ids=["in a sync", "with a supervisor", "while it starts"],
)
def test_a_lost_process_ends_the_attempt_otherwise(
    tmp_path: Path, failures: dict[str, str], settings: dict[str, Any]
) -> None:
    with pytest.raises(WorkerLost):
        ResumedJob(tmp_path, **settings).attempt(SimulatedRoles(failures))


def test_a_second_lost_process_in_a_step_ends_the_attempt(tmp_path: Path) -> None:
    roles = SimulatedRoles({"update 4": DEAD})
    roles.later = {"update 4": DEAD}
    with pytest.raises(WorkerLost):
        ResumedJob(tmp_path).attempt(roles)


@pytest.mark.parametrize(
    ("lost_at", "damaged", "begun_at"), [(6, {4}, 2), (5, {2}, 0)], ids=["an earlier one", "the initial weights"]
)
def test_a_checkpoint_found_damaged_while_loading_is_not_used(
    tmp_path: Path, lost_at: int, damaged: set[int], begun_at: int
) -> None:
    """The policy then has a part of it: an earlier one replaces all of that, as do new processes."""
    job = ResumedJob(tmp_path)
    with pytest.raises(WorkerLost):
        job.attempt(WithoutRay({f"update {lost_at}": DEAD}))
    roles = SimulatedRoles({})
    roles.damaged = damaged
    _, _, printed = job.attempt(roles)
    assert f"the checkpoint of step {max(damaged)} is not used: __0_0.distcp is corrupt" in printed
    assert roles.updates == list(range(begun_at + 1, STEPS + 1))
    whole = undisturbed(tmp_path / "whole")
    assert (job.model, job.rewards) == (whole.model, whole.rewards)


def test_a_checkpoint_ahead_of_the_ledger_is_not_used(tmp_path: Path, without_failure: ResumedJob) -> None:
    """The last line of the ledger is lost, which the checkpoint of step 6 covers; that of step 4 is loaded."""
    job = replace(without_failure, directory=tmp_path)
    job.attempt(SimulatedRoles({}))
    path = tmp_path / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: next(n for n, line in enumerate(lines) if f'"step":{STEPS},' in line)]))
    roles, _, printed = job.attempt(SimulatedRoles({}))
    assert "it is ahead of the ledger, which ends at step 5" in printed
    assert roles.updates == [5, 6]
    assert (job.model, job.rewards) == (without_failure.model, without_failure.rewards)


def test_the_journal_keeps_the_steps_after_the_oldest_checkpoint(tmp_path: Path) -> None:
    """The newest checkpoint is damaged, and as many as are kept exist: the steps after the other one are replayed."""
    job, whole = ResumedJob(tmp_path, steps=6), undisturbed(tmp_path / "whole", steps=8)
    job.attempt(SimulatedRoles({}))
    job.steps = 8
    roles = SimulatedRoles({})
    roles.damaged = {6}
    job.attempt(roles)
    assert roles.updates == [5, 6, 7, 8]
    assert (job.model, job.rewards) == (whole.model, whole.rewards)


def test_a_step_is_synced_then_committed_then_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Syncing(SimulatedRoles):
        def sync(self, version: int, *arguments: Any) -> None:
            super().sync(version, *arguments)
            order.append(f"sync {version}")

    class Committing(Ledger):
        def commit(self, record: StepRecord) -> None:
            super().commit(record)
            order.append(f"commit {record.step}")

    monkeypatch.setattr(f"{__name__}.Ledger", Committing)
    monkeypatch.setattr(
        Listener, "step_committed", lambda _self, record, _memory: order.append(f"report {record.step}")
    )
    ResumedJob(tmp_path, steps=2).attempt(Syncing({}))
    assert order == ["sync 0", *(f"{what} {step}" for step in (1, 2) for what in ("sync", "commit", "report"))]


def test_a_replay_that_fails_resumes_at_the_failed_update(tmp_path: Path) -> None:
    """The policy is lost before the first checkpoint, and the second of two replayed updates fails once."""
    roles = SimulatedRoles({"update 3": HALFWAY})
    roles.later = {"update 2": WHOLE}
    ResumedJob(tmp_path).attempt(roles)
    assert roles.updates == [1, 2, 1, 2, 3, 4, 5, 6]


def test_a_change_is_recorded_before_it_takes_effect(tmp_path: Path) -> None:
    job = ResumedJob(tmp_path)

    class EndsAtTheChange(SimulatedRoles):
        def change(self, settings: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.attempt(EndsAtTheChange({"update 3": WHOLE}))
    [record] = job.plan_changes
    assert record.change.seconds_to_recover is None
    _, listener, _ = job.attempt(SimulatedRoles({}))
    [record] = job.plan_changes
    assert record.change.seconds_to_recover is not None, "proved by the next attempt, which ran under its plan"
    assert listener.events == [("recovered", 2)]


def test_a_fixed_plan_ends_the_attempt_with_evidence_and_advice(tmp_path: Path) -> None:
    job = ResumedJob(tmp_path, mode="Disabled")
    with pytest.raises(DeviceOutOfMemory, match=r"memory\.mode is Disabled.*Write memory\.mode: Auto") as failure:
        job.attempt(SimulatedRoles({"update 3": WHOLE}))
    evidence = failure.value.evidence
    assert evidence is not None
    assert (evidence.role, evidence.step, evidence.phase) == ("policy", 3, "update")
    assert evidence.diagnoses
    assert job.plan_changes == []


def test_giving_up_explains_every_change_unless_a_supervisor_decides(tmp_path: Path) -> None:
    failures = {"update 3": WHOLE, "update 4": WHOLE}
    with pytest.raises(DeviceOutOfMemory, match=r"recovery\.maxAdjustments.*Tried: generation 2") as failure:
        ResumedJob(tmp_path, max_adjustments=1).attempt(SimulatedRoles(failures))
    assert failure.value.given_up
    supervised = ResumedJob(tmp_path, max_adjustments=0, levels=frozenset({"Live", "RespawnRole"}))
    with pytest.raises(DeviceOutOfMemory, match=r"^CUDA out of memory") as failure:
        supervised.attempt(SimulatedRoles(failures))
    assert not failure.value.given_up
    assert failure.value.evidence is not None


def test_only_a_process_killed_by_the_kernel_is_a_host_memory_failure(tmp_path: Path) -> None:
    with pytest.raises(WorkerLost):
        ResumedJob(tmp_path).attempt(WithoutRay({"update 3": DEAD}), kills=lambda: 3)
    kills = iter([3, 4])
    with pytest.raises(HostOutOfMemory) as failure:
        ResumedJob(tmp_path, max_adjustments=0).attempt(SimulatedRoles({"update 4": DEAD}), kills=lambda: next(kills))
    assert failure.value.evidence is not None
    assert failure.value.evidence.diagnoses[0].class_name == "HostMemory"


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"logprob_diff_mean": 3.2}, r"mean difference of 3\.20 nats"),
        ({"logprob_diff_mean": math.nan}, "expected finite log-probabilities in the first step, found .* nan nats"),
        ({"logprob_diff_mean": math.inf}, "expected finite log-probabilities in the first step, found .* inf nats"),
        ({"logprob_diff_mean": 0.0, "dropped_tokens": 4.0}, "4 of 4 response tokens without a finite log-probability"),
    ],
)
def test_an_engine_that_computes_another_model_ends_the_run_in_step_1(
    tmp_path: Path, metrics: dict[str, float], expected: str
) -> None:
    with pytest.raises(BadInput, match=expected):
        ResumedJob(tmp_path).attempt(Measured([1], **metrics))
    assert ResumedJob(tmp_path).rewards == []
    ResumedJob(tmp_path).attempt(Measured([2], **metrics))
    assert len(ResumedJob(tmp_path).rewards) == STEPS, "a disagreement after step 1 is left to its metric"


def test_an_engine_that_keeps_memory_is_replaced_before_it_hurts(tmp_path: Path) -> None:
    """Without new engines, the GPU would be full in step 12."""
    job = ResumedJob(tmp_path, steps=30)
    roles, _, printed = job.attempt(LeakingRoles({}))
    assert roles.updates == list(range(1, 31)), "no step is lost or repeated"
    assert roles.engines_ended >= 2
    changes = [record.change for record in job.plan_changes]
    assert len(changes) == roles.engines_ended
    assert {(change.remedy.setting, change.level, change.preventive) for change in changes} == {
        ("engineProcesses", "RespawnRole", True)
    }
    assert "EngineNotAsleep" in printed
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert ledger.steps[0].metrics["asleep_engine_bytes"] == 7 * GIB


@pytest.mark.parametrize(("device", "cause"), [("gpu", "RetainedGraph"), ("cpu", "HostMemory")])
def test_a_policy_that_leaks_is_replaced_before_it_runs_out(device: str, cause: str, tmp_path: Path) -> None:
    """Without new processes, memory would be full in step 11. A checkpoint is written before they end."""
    job, whole = ResumedJob(tmp_path, steps=30, every_steps=100), undisturbed(tmp_path / "whole", steps=30)
    _, _, printed = job.attempt(roles := LeakingPolicy(device))
    assert roles.updates == list(range(1, 31)), "no step is lost or repeated"
    assert roles.ended >= 3
    assert roles.engines_ended == 0
    changes = [record.change for record in job.plan_changes]
    assert [(change.remedy.setting, change.level, change.preventive) for change in changes] == [
        ("policyProcesses", "RespawnRole", True)
    ] * roles.ended
    assert cause in printed
    assert (job.model, job.rewards) == (whole.model, whole.rewards)


def test_rollouts_that_ended_engines_have_begun_are_begun_again(tmp_path: Path) -> None:
    class EngineFails(SimulatedRoles):
        def update(self, batch: RolloutBatch, *others: Any) -> dict[str, UpdateResult]:
            if batch.step == 3 and not self.engines_ended:  # they have begun step 4
                raise out_of_memory("rollout-0")
            return super().update(batch, *others)

    job, whole = ResumedJob(tmp_path, staleness=1), undisturbed(tmp_path / "whole", staleness=1)
    roles, _, _ = job.attempt(EngineFails({}))
    assert roles.engines_ended == 1
    assert (job.model, job.rewards) == (whole.model, whole.rewards)
