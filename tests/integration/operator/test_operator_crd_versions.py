"""The CRDs are upgraded and rolled back under a running operator, with jobs of both versions stored."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.eventually import eventually
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.repository import ROOT
from tests.integration.operator.conftest import run_kubectl

OLDER = ROOT / "tests" / "data" / "crds"
"""Before spec.env and the status subresource of StepReports."""

CURRENT = ROOT / "crds" / "manifests"
NEW_FIELD = {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}


@pytest.fixture
def current_crds(control_plane: ControlPlane, api: ApiClient) -> Iterator[None]:
    """Whatever the test serves, the current CRDs are served after it."""
    yield
    serve(control_plane, api, CURRENT)


def serve(control_plane: ControlPlane, api: ApiClient, manifests: object) -> None:
    """Apply the CRDs, and wait until the API server validates by them."""
    run_kubectl(control_plane, "apply", "--server-side", "--force-conflicts", "-f", str(manifests))

    def explained() -> subprocess.CompletedProcess[str]:
        return run_kubectl(control_plane, "explain", "rljob.spec.env", check=False)

    eventually(lambda: (explained().returncode == 0) == (manifests == CURRENT), "the CRDs to be served")


def test_jobs_of_both_versions_live_through_upgrade_and_rollback(
    current_crds: None, job: WatchedJob, operator: OperatorProcess, control_plane: ControlPlane, api: ApiClient
) -> None:
    """Helm changes CRDs and operator together, so no operator runs with CRDs that are older than itself."""
    newer = replace(job, name="newer")
    operator.stop()
    serve(control_plane, api, OLDER)
    job.create()

    serve(control_plane, api, CURRENT)
    operator.start()
    job.run(step=2)
    newer.create(**NEW_FIELD).run(step=3)

    operator.stop()
    serve(control_plane, api, OLDER)
    eventually(lambda: "env" not in newer.object["spec"], "the field to be dropped")
    for other in (job, newer):
        api.merge("rljobs", other.name, {"metadata": {"labels": {"written-by": "older"}}}, job.namespace)

    serve(control_plane, api, CURRENT)
    operator.start()
    for other in (job, newer):
        other.complete()
        assert [attempt["number"] for attempt in other.attempts] == [1]
