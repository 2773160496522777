"""Whatever happens and whenever the operator dies: never two attempts side by side, and every job comes to its end."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_api.status import RLJobStatus
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.observed import Observed
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    POLICY_0,
    POLICY_1,
    OperatorDied,
    SimulatedCluster,
    job_spec,
)

_EXIT_CODES = [0, 1, 80, 81, 82, 83, 84, 85, 137, 143]


class AnyCluster(RuleBasedStateMachine):
    """People, kubelets, the scheduler and a mortal operator, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = SimulatedCluster()
        self.old: tuple[Observed, int] | None = None

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
    def remembers_what_it_saw(self) -> None:
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
                self.cluster.start(pod.name)
                self.cluster.ready(pod.name)

    @rule(name=st.sampled_from([CONTROLLER, POLICY_0, POLICY_1]), unschedulable=st.booleans())
    def a_pod_is_placed_or_not(self, name: str, unschedulable: bool) -> None:
        pod = self.cluster.pods.get(name)
        if pod is not None and pod.node is None:
            self.cluster.unschedulable("0/2 nodes are available", name) if unschedulable else self.cluster.place(name)

    @rule(name=st.sampled_from([CONTROLLER, POLICY_0, POLICY_1]), code=st.sampled_from(_EXIT_CODES), said=st.booleans())
    def a_pod_ends(self, name: str, code: int, said: bool) -> None:
        pod = self.cluster.pods.get(name)
        if pod is not None and pod.started and not pod.ended:
            step = 60 if code == 0 else None
            self.cluster.end(name, code, sentence="it ended" if said else None, step=step if said else None)

    @rule(name=st.sampled_from([CONTROLLER, POLICY_0, POLICY_1]), gracefully=st.booleans())
    def somebody_deletes_a_pod(self, name: str, gracefully: bool) -> None:
        if name in self.cluster.pods:
            self.cluster.delete_pod(name) if gracefully else self.cluster.vanish(name)

    @rule(names=st.sets(st.sampled_from([CONTROLLER, POLICY_0, POLICY_1])))
    def containers_start_anew(self, names: set[str]) -> None:
        for name in names & self.cluster.pods.keys():
            if not self.cluster.pods[name].ended:
                self.cluster.restart(name)

    @rule()
    def pods_that_are_going_go(self) -> None:
        self.cluster.finish_deletions()

    @precondition(lambda self: self.cluster.status is not None and self.cluster.status.attempts)
    @rule(step=st.integers(0, 60), pending=st.sampled_from([None, 80, 81, 83]))
    def the_trainer_reports(self, step: int, pending: int | None) -> None:
        end = {"exitCode": pending, "message": "it cannot go on"} if pending else None
        self.cluster.reports(step, pending_exit=end)

    # --- people ---

    @rule()
    def somebody_toggles_suspend(self) -> None:
        self.cluster.change_spec(suspend=not self.cluster.spec.get("suspend", False))

    @rule()
    def somebody_retries(self) -> None:
        self.cluster.change_spec(retry=self.cluster.spec.get("retry", 0) + 1)

    @rule()
    def somebody_loses_the_status(self) -> None:
        self.cluster.set_status(RLJobStatus())

    @rule()
    def somebody_deletes_the_job(self) -> None:
        if self.cluster.finalizer:
            self.cluster.delete_job()

    # --- what always holds ---

    @invariant()
    def attempts_are_numbered_in_order(self) -> None:
        status = self.cluster.status
        numbers = [attempt.number for attempt in status.attempts] if status else []
        assert numbers == sorted(set(numbers))

    @invariant()
    def changes_of_the_plan_are_kept_in_order_and_led_to_the_plan(self) -> None:
        status = self.cluster.status
        generations = [change.generation for change in status.plan_changes] if status else []
        assert generations == sorted(set(generations))
        assert status is None or status.plan is None or not generations or generations[-1] <= status.plan.generation

    @invariant()
    def what_the_plan_gives_does_not_exceed_its_bound(self) -> None:
        plan = self.cluster.status.plan if self.cluster.status else None
        assert plan is None or (plan.host_memory_bytes or 0) <= 16 << 30

    @invariant()
    def complete_and_failed_exclude_each_other(self) -> None:
        if self.cluster.status is not None and self.cluster.status.conditions:
            assert not (self.cluster.holds(ConditionType.COMPLETE) and self.cluster.holds(ConditionType.FAILED))

    @invariant()
    def a_job_is_not_let_go_before_its_pods(self) -> None:
        if self.cluster.gone and self.cluster.deleting:
            assert not any(pod.node and not pod.ended for pod in self.cluster.pods.values())

    def teardown(self) -> None:
        """Once everything calms down, the job comes to its end, or waits where it was asked to."""
        cluster = self.cluster
        for _ in range(40):
            cluster.settle()
            cluster.finish_deletions()
            cluster.place()
            for pod in list(cluster.pods.values()):
                if not pod.ended:
                    cluster.start(pod.name)
                    cluster.ready(pod.name)
            cluster.tick(400)
            cluster.settle()
            controller = cluster.pods.get(CONTROLLER)
            all_run = len(cluster.pods) == 3 and all(pod.ready and not pod.deleting for pod in cluster.pods.values())
            if controller is not None and all_run and not cluster.deleting:
                cluster.end(CONTROLLER, 0, sentence="all steps are committed", step=60)
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
    cluster = SimulatedCluster()
    cluster.nodes = tuple(replace(node, restarts_in_place=in_place) for node in cluster.nodes)

    def settle() -> None:
        for _ in range(20):
            left = None if dies_at_write is None else dies_at_write - cluster.writes
            try:
                desired = cluster.round(dies_after_writes=left if left is not None and left >= 0 else None)
            except OperatorDied:
                cluster.writes += 1  # the write that never came; the next operator goes on
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
        cluster.place()
        cluster.start()
        cluster.ready()
        settle()
        if pass_ == 1:
            pending = {"exitCode": int(code), "message": "it failed"} if in_place else None
            cluster.reports(30, pending_exit=pending)
            settle()
            cluster.restart() if in_place else cluster.end(CONTROLLER, code, sentence="it failed", step=30)
            cluster.tick(20)
    cluster.end(CONTROLLER, 0, sentence="all steps are committed", step=60)
    settle()
    cluster.finish_deletions()
    settle()
    return cluster


@pytest.mark.parametrize(
    ("code", "restarts", "adjustments", "in_place"),
    [
        (ExitCode.WORKER_LOST, 1, 0, False),
        (ExitCode.DEVICE_OUT_OF_MEMORY, 0, 1, False),
        (ExitCode.DEVICE_OUT_OF_MEMORY, 0, 1, True),
    ],
)
def test_the_end_is_the_same_after_a_kill_between_any_two_writes(
    code: ExitCode, restarts: int, adjustments: int, in_place: bool
) -> None:
    undisturbed = _a_job_that_fails_once(code, None, in_place=in_place)
    assert undisturbed.phase == "Complete"
    assert undisturbed.status is not None
    assert (undisturbed.status.restarts, undisturbed.status.adjustments) == (restarts, adjustments)
    assert undisturbed.attempt.pods_of_attempt == (1 if in_place else None)
    for write in range(undisturbed.writes):
        disturbed = _a_job_that_fails_once(code, write, in_place=in_place)
        assert disturbed.status == undisturbed.status, f"killed after {write} writes"
        assert set(disturbed.pods) == set(undisturbed.pods) == {CONTROLLER}


@pytest.mark.parametrize(("code", "most"), [(ExitCode.WORKER_LOST, 14), (ExitCode.DEVICE_OUT_OF_MEMORY, 15)])
def test_a_recovered_job_takes_few_writes(code: ExitCode, most: int) -> None:
    cluster = _a_job_that_fails_once(code, None)
    assert cluster.status_writes <= most
