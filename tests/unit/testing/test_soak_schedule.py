"""The seed of a soak determines its external faults and its jobs."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.job import RLJob, RLJobSpec
from rljob_api.topology import worker_pods
from rljob_testing.soak.job_kinds import KINDS, JobKind
from rljob_testing.soak.jobs import job_manifest
from rljob_testing.soak.schedule import FaultKind, choose, planned_faults
from rljob_trainer.roles.faults import target_role

SEEDS = st.integers(0, 2**32)


@given(SEEDS)
def test_the_seed_determines_the_faults(seed: int) -> None:
    assert planned_faults(seed, 600) == planned_faults(seed, 600)
    assert planned_faults(seed, 600) != planned_faults(seed + 1, 600)
    assert job_manifest(seed, 0, 0) == job_manifest(seed, 0, 0)


@given(SEEDS, st.floats(0, 3600))
def test_faults_are_in_order_and_within_the_time(seed: int, seconds: float) -> None:
    times = [fault.at_seconds for fault in planned_faults(seed, seconds)]
    assert all(20 <= later - earlier <= 50 for earlier, later in zip([0.0, *times], times, strict=False))
    assert all(time < seconds for time in times)


@given(SEEDS)
def test_every_kind_occurs_within_a_quarter_of_an_hour(seed: int) -> None:
    kinds = Counter(fault.kind for fault in planned_faults(seed, 22 * 50))
    assert kinds.keys() == set(get_args(FaultKind))


@given(st.lists(st.integers(), max_size=20), st.floats(0, 1, exclude_max=True))
def test_a_target_is_chosen_if_there_is_one(targets: list[int], draw: float) -> None:
    assert choose(targets, draw) in targets if targets else choose(targets, draw) is None


@given(SEEDS, st.integers(0, 3), st.integers(0, 50))
def test_a_job_is_valid_and_its_failures_can_happen(seed: int, stream: int, number: int) -> None:
    spec = RLJob.model_validate(job_manifest(seed, stream, number)).spec
    faults = spec.fault_injection.faults
    assert 1 <= len({fault.fault_class for fault in faults}) == len(faults) <= 3
    processes = {str(pods.role): pods.processes for pods in worker_pods(spec)}
    for fault in faults:
        assert fault.step <= spec.algorithm.steps
        assert fault.rank < processes.get(target_role(fault), processes["policy"])


@given(SEEDS, st.integers(0, 50))
def test_all_worker_pods_have_the_limits_that_the_failures_need(seed: int, number: int) -> None:
    spec = RLJob.model_validate(job_manifest(seed, 0, number)).spec
    classes = {fault.fault_class for fault in spec.fault_injection.faults}
    for template in filter(None, (spec.policy.template, spec.rollout.template)):
        [container] = template.spec["containers"]
        assert ("HostMemory" in classes) == ("limits" in container["resources"])
        assert ("SharedMemory" in classes) == ("volumes" in template.spec)


def test_jobs_of_every_kind_are_drawn_with_every_failure_of_their_kind() -> None:
    drawn: dict[JobKind, set[tuple[str, str]]] = {kind: set() for kind in KINDS}
    for number in range(2000):
        spec = RLJob.model_validate(job_manifest(1, 0, number)).spec
        drawn[_kind(spec)] |= {(fault.fault_class, fault.phase) for fault in spec.fault_injection.faults}
    for kind, failures in drawn.items():
        assert failures == {(class_, phase) for class_, phases in kind.failures for phase in phases}


def _kind(spec: RLJobSpec) -> JobKind:
    of_spec = (
        *(spec.topology, spec.policy.replicas, spec.rollout.replicas or 0, spec.algorithm.max_staleness),
        *(spec.rollout.tensor_parallel_size, spec.algorithm.partial_rollout_prompts),
    )
    [kind] = (kind for kind in KINDS if _key(kind) == of_spec)
    return kind


def _key(kind: JobKind) -> tuple[object, ...]:
    return (
        *(kind.topology, kind.policy_pods, kind.rollout_pods, kind.max_staleness),
        *(kind.tensor_parallel_size, kind.partial_rollout_prompts),
    )


def test_jobs_of_two_streams_have_different_names() -> None:
    names = {job_manifest(1, stream, number)["metadata"]["name"] for stream in range(3) for number in range(10)}
    assert len(names) == 30
