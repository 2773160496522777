"""Objects that a tenant may store affect no job but their own."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from rljob_testing.operator import manifests
from rljob_testing.operator.eventually import eventually
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.watched_job import WatchedJob
from tests.integration.operator.conftest import Kubectl

FAILED_MESSAGE = 'jsonpath={.status.conditions[?(@.type=="Failed")].message}'


@pytest.fixture(autouse=True)
def the_operator_survives(operator: OperatorProcess) -> Iterator[None]:
    yield
    assert operator.running, operator.end_of_log()
    assert operator.probe("healthz") == 200


@pytest.mark.parametrize("levels", [400, 1_200, 5_000])
def test_a_deeply_nested_job_stops_no_other_job(
    job: WatchedJob, kubectl: Kubectl, operator: OperatorProcess, levels: int
) -> None:
    hostile = json.dumps(manifests.job("hostile", policy={"template": {"spec": {"affinity": "DEEP"}}}))
    deep = '{"a":' * levels + "1" + "}" * levels
    kubectl("create", "--validate=false", "-f", "-", stdin=hostile.replace('"DEEP"', deep))
    job.create()
    job.run()
    message = eventually(
        lambda: kubectl("get", "rljob", "hostile", "-o", FAILED_MESSAGE).stdout, "a condition on the hostile job", 30
    )
    assert "levels of nesting" in message
    job.complete()
    kubectl("delete", "rljob", "hostile", "--timeout=20s")


def test_a_deeply_nested_job_that_is_listed_at_the_start_stops_no_other_job(
    job: WatchedJob, kubectl: Kubectl, operator: OperatorProcess
) -> None:
    hostile = json.dumps(manifests.job("hostile", policy={"template": {"spec": {"affinity": "DEEP"}}}))
    kubectl("create", "--validate=false", "-f", "-", stdin=hostile.replace('"DEEP"', "[" * 1_200 + "]" * 1_200))
    operator.stop()
    operator.start()
    job.create()
    job.run()
    job.complete()
    kubectl("delete", "rljob", "hostile", "--timeout=20s")
