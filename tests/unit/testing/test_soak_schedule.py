"""The seed of a soak determines its external faults and its jobs."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.job import RLJob
from rljob_testing.soak.jobs import job_manifest
from rljob_testing.soak.schedule import FaultKind, choose, planned_faults

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
    pod = job_manifest(seed, stream, number)["spec"]["policy"]["template"]["spec"]
    classes = {fault.fault_class for fault in spec.fault_injection.faults}
    assert 1 <= len(classes) <= 3
    assert all(fault.step <= spec.algorithm.steps for fault in spec.fault_injection.faults)
    assert ("HostMemory" in classes) == ("containers" in pod)
    assert ("SharedMemory" in classes) == ("volumes" in pod)


def test_jobs_of_two_streams_have_different_names() -> None:
    names = {job_manifest(1, stream, number)["metadata"]["name"] for stream in range(3) for number in range(10)}
    assert len(names) == 30
