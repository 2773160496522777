"""The chart's MutatingAdmissionPolicy on a real API server: new jobs have the operator's finalizer and annotation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rljob_cluster.control_plane import ControlPlane
from rljob_operator.labels import FINALIZER, OPERATOR
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.patience import eventually
from tests.integration.chart.conftest import CHART, RELEASE, CommandLine, Object

JOBS = "/apis/rljob.dev/v1alpha1/namespaces/team-a/rljobs"
INSTALLATION = "rljob-system/rljob-operator"


@pytest.fixture(scope="module")
def api(control_plane: ControlPlane, command_line: CommandLine) -> Iterator[ApiClient]:
    """An administrator, once the policy is in force."""
    api = ApiClient.from_kubeconfig(control_plane.kubeconfig)
    command_line.helm("install", RELEASE, str(CHART))
    eventually(lambda: "finalizers" in admitted(api), "the policy to be in force")
    yield api
    command_line.helm("uninstall", RELEASE, "--no-hooks")
    command_line.kubectl("delete", "crd", "--all")


def admitted(api: ApiClient, metadata: Object | None = None, **spec: object) -> Object:
    """The metadata of a job as it would be stored."""
    job = manifests.job("job", **spec)
    job["metadata"] |= {"namespace": "team-a", **(metadata or {})}
    found: Object = api.request("POST", JOBS, job, params={"dryRun": "All"})["metadata"]
    return found


@pytest.mark.parametrize("finalizers", [[], ["example.com/keep"], [FINALIZER], ["example.com/keep", FINALIZER]])
@pytest.mark.parametrize("annotations", [{}, {"mine": "kept"}, {OPERATOR: INSTALLATION}])
def test_a_new_job_is_claimed_and_keeps_the_rest(
    api: ApiClient, finalizers: list[str], annotations: dict[str, str]
) -> None:
    metadata = {name: value for name, value in (("finalizers", finalizers), ("annotations", annotations)) if value}
    found = admitted(api, metadata)
    assert found["annotations"] == annotations | {OPERATOR: INSTALLATION}
    assert found["finalizers"] == [*(name for name in finalizers if name != FINALIZER), FINALIZER]


def test_jobs_of_others_are_left_alone(api: ApiClient) -> None:
    delegated = admitted(api, managedBy="kueue.x-k8s.io/multikueue")
    assert not delegated.keys() & {"finalizers", "annotations"}
    claimed = admitted(api, {"annotations": {OPERATOR: "a/b"}})
    assert (claimed["annotations"], claimed.get("finalizers")) == ({OPERATOR: "a/b"}, None)
    assert admitted(api, managedBy="rljob.dev/operator")["finalizers"] == [FINALIZER]
