"""Any events, any status, an operator that dies at any moment: one attempt at a time, and every job ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_api.status import AttemptStatus, Condition, RLJobStatus
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.observed import ContainerTermination, ObservedJob, ObservedPod
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    PLAN,
    POLICY_0,
    POLICY_1,
    START,
    OperatorDied,
    SimulatedCluster,
    job_spec,
    new_job,
)

PODS = st.sampled_from([CONTROLLER, POLICY_0, POLICY_1])
_EXIT_CODES = [0, 1, 80, 81, 82, 83, 84, 85, 137, 143]


class AnyCluster(RuleBasedStateMachine):
    """Users, kubelets, the scheduler and an operator that dies, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = new_job()
        self.old: tuple[ObservedJob, int] | None = None

    @initialize(
        restarts=st.integers(0, 2),
        adjustments=st.integers(0, 3),
        deadline=st.sampled_from([None, 3600]),
        suspend=st.booleans(),
        in_place=st.booleans(),
    )
    def create(self, restarts: int, adjustments: int, deadline: int | None, suspend: bool, in_place: bool) -> None:
        self.cluster.nodes = tuple(replace(node, restarts_in_place=in_place) for node in self.cluster.nodes)
        recovery = {"maxRestarts": restarts, "maxAdjustments": adjustments, "maxHostMemory": "16Gi"}
        spec = job_spec(recovery=recovery, suspend=suspend)
        if deadline is not None:
            spec["activeDeadlineSeconds"] = deadline
        self.cluster.spec = spec

    # --- the operator ---

    @rule()
    def reconciles(self) -> None:
        self.cluster.round()

    @rule(writes=st.integers(0, 12))
    def dies_between_two_writes(self, writes: int) -> None:
        with suppress(OperatorDied):
            self.cluster.round(dies_after_writes=writes)

    @rule()
    def remembers_its_observation(self) -> None:
        self.old = self.cluster.snapshot()

    @precondition(lambda self: self.old is not None and not self.cluster.deleting)
    @rule()
    def reconciles_on_old_pods(self) -> None:
        """A watch of pods may lag behind that of jobs."""
        assert self.old is not None
        fresh, version = self.cluster.snapshot()
        self.cluster.round(stale=(replace(fresh, pods=self.old[0].pods), version))

    # --- the cluster ---

    @rule(seconds=st.sampled_from([1, 15, 70, 400, 2000]))
    def time_passes(self, seconds: int) -> None:
        self.cluster.tick(seconds)

    @rule()
    def pods_start(self) -> None:
        self.cluster.place()
        for pod in list(self.cluster.pods.values()):
            if not pod.ended:
                self.cluster.start(pod.name).ready(pod.name)

    @rule(name=PODS, unschedulable=st.booleans())
    def a_pod_is_placed_or_not(self, name: str, unschedulable: bool) -> None:
        pod = self.cluster.pods.get(name)
        if pod is not None and pod.node is None:
            self.cluster.unschedulable("0/2 nodes are available", name) if unschedulable else self.cluster.place(name)

    @rule(name=PODS, code=st.sampled_from(_EXIT_CODES), with_message=st.booleans())
    def a_pod_ends(self, name: str, code: int, with_message: bool) -> None:
        pod = self.cluster.pods.get(name)
        if pod is not None and pod.started and not pod.ended:
            step = 60 if code == 0 else None
            self.cluster.end(
                name, code, message="it ended" if with_message else None, step=step if with_message else None
            )

    @rule(name=PODS, gracefully=st.booleans())
    def a_pod_is_deleted(self, name: str, gracefully: bool) -> None:
        if name in self.cluster.pods:
            self.cluster.delete_pod(name) if gracefully else self.cluster.vanish(name)

    @rule(names=st.sets(PODS))
    def containers_restart(self, names: set[str]) -> None:
        for name in names & self.cluster.pods.keys():
            if not self.cluster.pods[name].ended:
                self.cluster.restart(name)

    @rule()
    def deleted_pods_terminate(self) -> None:
        self.cluster.finish_deletions()

    @precondition(lambda self: self.cluster.status is not None and self.cluster.status.attempts)
    @rule(step=st.integers(0, 60), pending=st.sampled_from([None, 80, 81, 83]))
    def the_trainer_reports(self, step: int, pending: int | None) -> None:
        end = {"exitCode": pending, "message": "it cannot continue"} if pending else None
        self.cluster.reports(step, pending_exit=end)

    # --- users ---

    @rule()
    def a_user_toggles_suspend(self) -> None:
        self.cluster.change_spec(suspend=not self.cluster.spec.get("suspend", False))

    @rule()
    def a_user_retries(self) -> None:
        self.cluster.change_spec(retry=self.cluster.spec.get("retry", 0) + 1)

    @rule()
    def the_status_is_lost(self) -> None:
        self.cluster.set_status(RLJobStatus())

    @rule()
    def a_user_deletes_the_job(self) -> None:
        if self.cluster.finalizer:
            self.cluster.delete_job()

    @invariant()
    def attempts_and_changes_are_in_order_and_within_bounds(self) -> None:
        status = self.cluster.status or RLJobStatus()
        numbers = [attempt.number for attempt in status.attempts]
        assert numbers == sorted(set(numbers))
        generations = [change.generation for change in status.plan_changes]
        assert generations == sorted(set(generations))
        if status.plan is not None:
            assert max(generations, default=0) <= status.plan.generation
            assert (status.plan.host_memory_bytes or 0) <= 16 << 30

    @invariant()
    def a_job_has_one_end_and_not_before_its_pods(self) -> None:
        if self.cluster.status is not None and self.cluster.status.conditions:
            assert not (self.cluster.holds(ConditionType.COMPLETE) and self.cluster.holds(ConditionType.FAILED))
        if self.cluster.gone and self.cluster.deleting:
            assert not any(pod.node and not pod.ended for pod in self.cluster.pods.values())

    def teardown(self) -> None:
        """Once everything calms down, the job comes to its end, or waits if it is suspended."""
        cluster = self.cluster
        for _ in range(40):
            cluster.settled().finish_deletions()
            self.pods_start()
            cluster.tick(400).settled()
            all_run = len(cluster.pods) == 3 and all(pod.ready and not pod.deleting for pod in cluster.pods.values())
            if all_run and not cluster.deleting:
                cluster.end(CONTROLLER, 0, message="all steps are committed", step=60)
        if cluster.deleting:
            assert cluster.gone
        elif cluster.status is not None and cluster.phase != "Suspended":
            assert cluster.phase in ("Complete", "Failed")
            assert all(pod.ended for pod in cluster.pods.values())
        else:
            assert cluster.spec["suspend"]
            assert not cluster.pods
        assert cluster.settle() == Desired(), "nothing is left to do, now or later"


TestAnyCluster = AnyCluster.TestCase
TestAnyCluster.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def _a_job_that_fails_once(code: ExitCode, dies_at_write: int | None, *, in_place: bool = False) -> SimulatedCluster:
    """A job from apply to Complete with one failure; the operator dies after that many writes."""
    cluster = new_job()
    cluster.nodes = tuple(replace(node, restarts_in_place=in_place) for node in cluster.nodes)

    def settle() -> None:
        for _ in range(20):
            left = None if dies_at_write is None else dies_at_write - cluster.writes
            try:
                desired = cluster.round(dies_after_writes=left if left is not None and left >= 0 else None)
            except OperatorDied:
                cluster.writes += 1  # the write that never came; the next operator continues
                continue
            if replace(desired, requeue_after_seconds=None) == Desired():
                return
        raise AssertionError("still busy")

    for pass_ in (1, 2):
        for _ in range(3):
            settle()
            cluster.finish_deletions()
        cluster.tick(60)
        settle()
        cluster.place().start().ready()
        settle()
        if pass_ == 1:
            pending = {"exitCode": int(code), "message": "it failed"} if in_place else None
            cluster.reports(30, pending_exit=pending)
            settle()
            cluster.restart() if in_place else cluster.end(CONTROLLER, code, message="it failed", step=30)
            cluster.tick(20)
    cluster.end(CONTROLLER, 0, message="all steps are committed", step=60)
    settle()
    cluster.finish_deletions()
    settle()
    return cluster


@pytest.mark.parametrize(
    ("code", "restarts", "adjustments", "in_place", "status_writes"),
    [
        (ExitCode.WORKER_LOST, 1, 0, False, 14),
        (ExitCode.DEVICE_OUT_OF_MEMORY, 0, 1, False, 15),
        (ExitCode.DEVICE_OUT_OF_MEMORY, 0, 1, True, 15),
    ],
)
def test_the_end_is_the_same_after_a_kill_between_any_two_writes(
    code: ExitCode, restarts: int, adjustments: int, in_place: bool, status_writes: int
) -> None:
    undisturbed = _a_job_that_fails_once(code, None, in_place=in_place)
    undisturbed.expect(phase="Complete", restarts=restarts, adjustments=adjustments, pods={CONTROLLER})
    undisturbed.expect(pods_of_attempt=1 if in_place else None)
    assert undisturbed.status_writes <= status_writes
    for write in range(undisturbed.writes):
        disturbed = _a_job_that_fails_once(code, write, in_place=in_place)
        assert disturbed.status == undisturbed.status, f"killed after {write} writes"
        assert set(disturbed.pods) == {CONTROLLER}


# --- any status and any pods ---


Model = TypeVar("Model")


def of(model: Callable[..., Model], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Model]:
    """Values of an API type, by the names of its fields."""
    return st.fixed_dictionaries(fields).map(lambda values: model(**values))


moments = st.one_of(
    st.integers(-10_000, 10_000).map(lambda seconds: START + timedelta(seconds=seconds)),
    st.sampled_from([datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)]),
)
maybe_moments = st.none() | moments
counts = st.integers(0, 10_000_000)

conditions = of(
    Condition,
    type=st.sampled_from([*ConditionType, "SomebodyElses"]).map(str),
    status=st.sampled_from(["True", "False", "Unknown"]),
    reason=st.sampled_from([*ConditionReason, "Made-up"]).map(str),
    message=st.text(max_size=20),
    last_transition_time=moments,
)
attempts = of(
    AttemptStatus,
    number=st.integers(1, 5) | st.integers(1, 2**31),
    plan_generation=st.integers(1, 9),
    start_time=moments,
    end_time=maybe_moments,
    from_step=st.integers(1, 100),
    to_step=st.none() | counts,
    reason=st.none() | st.sampled_from([*AttemptReason, "Made-up"]).map(str),
    message=st.none() | st.text(max_size=20),
    placement_retries=st.integers(0, 2**31),
)
statuses = of(
    RLJobStatus,
    observed_generation=st.none() | counts,
    conditions=st.lists(conditions, max_size=8),
    start_time=maybe_moments,
    completion_time=maybe_moments,
    update_time=maybe_moments,
    step=st.none() | counts,
    steps=st.none() | st.integers(1, 10_000_000),
    restarts=counts,
    plan=st.none() | st.integers(1, 9).map(lambda n: PLAN.model_copy(update={"generation": n})),
    attempts=st.lists(attempts, max_size=4),
)
ends = st.builds(
    ContainerTermination,
    exit_code=st.sampled_from([0, 1, 2, 80, 83, 84, 137, 143, 255]),
    reason=st.sampled_from(["Completed", "Error", "OOMKilled", "ContainerStatusUnknown"]),
    finished_at=st.none() | st.just(START),
    message=st.none(),
)


@st.composite
def pod_sets(draw: st.DrawFn) -> tuple[ObservedPod, ...]:
    names = draw(st.lists(PODS, unique=True))
    return tuple(
        ObservedPod(
            name=name,
            uid=name,
            role="controller" if name == CONTROLLER else "policy",
            index=0,
            attempt=draw(st.integers(0, 5)),
            phase=draw(st.sampled_from(["Pending", "Running", "Succeeded", "Failed", "Unknown"])),
            created_at=START,
            node=draw(st.sampled_from([None, "cpu-node", "gpu-node", "a-node-that-went"])),
            ready=draw(st.booleans()),
            started=draw(st.booleans()),
            deleting=draw(st.booleans()),
            gated=draw(st.booleans()),
            waiting=draw(st.sampled_from([None, "ErrImagePull: no", "InvalidImageName: no"])),
            unschedulable=draw(st.sampled_from([None, "0/2 nodes", 'persistentvolumeclaim "x" not found'])),
            disruption=draw(st.sampled_from([None, "Evicted"])),
            end=draw(st.none() | ends),
        )
        for name in names
    )


@settings(deadline=None, max_examples=120)
@given(
    status=statuses,
    pods=pod_sets(),
    suspend=st.booleans(),
    deadline=st.sampled_from([None, 60]),
    ttl=st.sampled_from([None, 60]),
    problem=st.sampled_from([None, "spec: cannot be read"]),
)
@example(
    status=RLJobStatus(
        conditions=[
            Condition(type="Failed", status="True", reason="RestartsExhausted", message="", last_transition_time=START)
        ]
    ),
    pods=(),
    suspend=False,
    deadline=None,
    ttl=None,
    problem="spec: cannot be read",
)
def test_reconcile_asks_for_nothing_impossible_and_comes_to_rest(
    status: RLJobStatus,
    pods: tuple[ObservedPod, ...],
    suspend: bool,
    deadline: int | None,
    ttl: int | None,
    problem: str | None,
) -> None:
    spec = job_spec(suspend=suspend, activeDeadlineSeconds=deadline, ttlSecondsAfterFinished=ttl)
    cluster = SimulatedCluster(spec=spec, facts={"problem": problem}, pods={pod.name: pod for pod in pods})
    cluster.status = status

    desired = cluster.decide()

    created = [manifest["metadata"]["name"] for manifest in desired.create if manifest["kind"] == "Pod"]
    assert len(set(created)) == len(created)
    assert not set(created) & cluster.pods.keys()
    assert {deletion.uid for deletion in desired.delete_pods} <= {pod.uid for pod in pods}
    driven = {pod.attempt for pod in pods if pod.role == "controller" and not pod.ended}
    workers = {pod.uid: pod.attempt for pod in pods if pod.role != "controller"}
    assert not {workers[deletion.uid] for deletion in desired.delete_pods if deletion.uid in workers} & driven
    if desired.status is not None:
        RLJobStatus.model_validate_json(desired.status.model_dump_json())
    assert desired.requeue_after_seconds is None or desired.requeue_after_seconds > 0
    for _ in range(5):
        cluster.settled().finish_deletions()
