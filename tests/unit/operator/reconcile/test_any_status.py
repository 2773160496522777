"""Whatever stands in the status, and whatever pods there are: reconcile answers, and asks for nothing impossible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_api.status import AttemptStatus, Condition, RLJobStatus
from rljob_operator.reconcile.observed import ContainerTermination, ObservedPod
from rljob_operator.reconcile.reconcile import reconcile
from rljob_testing.simulated_cluster import (
    CONTROLLER,
    PLAN,
    POLICY_0,
    POLICY_1,
    SETTINGS,
    START,
    SimulatedCluster,
    job_spec,
)

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
    names = draw(st.lists(st.sampled_from([CONTROLLER, POLICY_0, POLICY_1]), unique=True))
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


@settings(deadline=None, max_examples=150)
@given(
    status=statuses,
    pods=pod_sets(),
    suspend=st.booleans(),
    deadline=st.sampled_from([None, 60]),
    ttl=st.sampled_from([None, 60]),
    problem=st.sampled_from([None, "spec: cannot be read"]),
)
def test_reconcile_answers_and_asks_for_nothing_impossible(
    status: RLJobStatus,
    pods: tuple[ObservedPod, ...],
    suspend: bool,
    deadline: int | None,
    ttl: int | None,
    problem: str | None,
) -> None:
    limits = {"activeDeadlineSeconds": deadline, "ttlSecondsAfterFinished": ttl}
    cluster = SimulatedCluster(spec=job_spec(suspend=suspend, **limits), facts={"problem": problem})
    cluster.status = status
    observed = replace(cluster.observe(), pods=pods)

    desired = reconcile(observed, SETTINGS, START)

    created = [manifest["metadata"]["name"] for manifest in desired.create if manifest["kind"] == "Pod"]
    assert len(set(created)) == len(created)
    assert not set(created) & {pod.name for pod in pods}
    assert {deletion.uid for deletion in desired.delete_pods} <= {pod.uid for pod in pods}
    driven = {pod.attempt for pod in pods if pod.role == "controller" and not pod.ended}
    workers = {pod.uid: pod.attempt for pod in pods if pod.role != "controller"}
    assert not {workers[deletion.uid] for deletion in desired.delete_pods if deletion.uid in workers} & driven
    if desired.status is not None:
        RLJobStatus.model_validate_json(desired.status.model_dump_json())
    assert desired.requeue_after_seconds is None or desired.requeue_after_seconds > 0


@settings(deadline=None, max_examples=40)
@given(status=statuses, pods=pod_sets(), suspend=st.booleans())
def test_a_job_comes_to_rest_from_any_status(status: RLJobStatus, pods: tuple[ObservedPod, ...], suspend: bool) -> None:
    cluster = SimulatedCluster(spec=job_spec(suspend=suspend), pods={pod.name: pod for pod in pods})
    cluster.status = status
    for _ in range(5):
        cluster.settle()
        cluster.finish_deletions()
