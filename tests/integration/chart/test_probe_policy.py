"""The chart's MutatingAdmissionPolicy on a real API server: labelled pods of any workload get the probe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from rljob_cluster.control_plane import ControlPlane
from rljob_operator.objects import probe
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.patience import eventually
from rljob_testing.repository import ROOT
from tests.integration.chart.conftest import CHART, RELEASE, CommandLine, Object

PODS = "/api/v1/namespaces/team-a/pods"
LABEL = {"rljob.dev/diagnose": "true"}
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture(scope="module")
def api(control_plane: ControlPlane, command_line: CommandLine) -> Iterator[ResourceClient]:
    """An administrator, once the policy is in force; the namespace admits only `restricted` pods."""
    api = ResourceClient.from_kubeconfig(control_plane.kubeconfig)
    command_line.helm("install", RELEASE, str(CHART), "--set", "podDiagnosis.enabled=true")
    eventually(lambda: api.find("serviceaccounts", "default", "team-a"), "the namespace to have its ServiceAccount")
    eventually(lambda: injected(admitted(api, pod())), "the policy to be in force")
    yield api
    command_line.helm("uninstall", RELEASE, "--no-hooks")
    command_line.kubectl("delete", "crd", "--all")


def pod(*containers: Object, labels: Object | None = None, annotations: Object | None = None, **spec: Any) -> Object:
    given = containers or (container(),)
    metadata = {
        "name": "train",
        "namespace": "team-a",
        "labels": LABEL if labels is None else labels,
        "annotations": annotations or {},
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": list(given), **spec}}


def container(name: str = "trainer", **fields: Any) -> Object:
    return {"name": name, "image": "trl:1", "securityContext": RESTRICTED, **fields}


def admitted(api: ResourceClient, manifest: Object) -> Object:
    """The pod's spec as it would be stored."""
    spec: Object = api.request("POST", PODS, manifest, params={"dryRun": "All"})["spec"]
    return spec


def injected(spec: Object) -> bool:
    return any(found["name"] == "rljob-probe" for found in spec.get("initContainers", []))


def variables(container: Object) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in container.get("env", [])}


def mounts(container: Object) -> dict[str, Object]:
    return {mount["mountPath"]: mount for mount in container["volumeMounts"] if mount["name"] == "rljob-probe"}


def test_a_labelled_pod_gets_the_probe_of_the_operators_image(api: ResourceClient) -> None:
    spec = admitted(api, pod(container(terminationMessagePath="/tmp/end")))
    [copying], [trainer] = spec["initContainers"], spec["containers"]
    assert copying["image"].startswith("localhost/rljob/operator:")
    assert copying["command"] == ["cp", "-r", f"{probe.IN_OPERATOR_IMAGE}/.", "/probe"]
    assert variables(trainer) == {
        "PYTHONPATH": probe.SITE,
        "RLJOB_PROBE_NOTES": "/run/rljob-probe",
        "RLJOB_TERMINATION_LOG": "/tmp/end",
    }
    assert mounts(trainer)["/opt/rljob-probe"] | {"readOnly": True} == mounts(trainer)["/opt/rljob-probe"]
    [volume] = [volume for volume in spec["volumes"] if volume["name"] == "rljob-probe"]
    assert volume["emptyDir"] == {"sizeLimit": "20Mi"}


def test_the_rest_of_the_pod_stays_as_it_is(api: ResourceClient) -> None:
    given = pod(
        container(
            env=[{"name": "A", "value": "1"}],
            args=["--steps", "3"],
            volumeMounts=[{"name": "data", "mountPath": "/data"}],
        ),
        initContainers=[container("fetch")],
        volumes=[{"name": "data", "emptyDir": {}}],
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists"}],
    )
    with_probe = admitted(api, given)
    given["metadata"]["labels"] = {}
    without = admitted(api, given)
    [trainer] = with_probe["containers"]
    trainer["env"] = trainer["env"][:1]
    trainer["volumeMounts"] = [mount for mount in trainer["volumeMounts"] if mount["name"] != "rljob-probe"]
    with_probe["initContainers"] = [one for one in with_probe["initContainers"] if one["name"] != "rljob-probe"]
    with_probe["volumes"] = [volume for volume in with_probe["volumes"] if volume["name"] != "rljob-probe"]
    for spec in (with_probe, without):  # the token's volume has a random name
        spec["volumes"] = [volume for volume in spec["volumes"] if not volume["name"].startswith("kube-api-access")]
        for one in (*spec["containers"], *spec["initContainers"]):
            one["volumeMounts"] = [m for m in one["volumeMounts"] if not m["name"].startswith("kube-api-access")]
    assert with_probe == without


def test_a_pythonpath_of_the_pod_is_extended_or_left_alone(api: ResourceClient) -> None:
    twice = [{"name": "PYTHONPATH", "value": "/a:/b"}, {"name": "PYTHONPATH", "value": "/c"}]
    by_reference = [{"name": "PYTHONPATH", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    containers = [container("once", env=twice[:1]), container("twice", env=twice), container("ref", env=by_reference)]
    once, of_both, of_reference = admitted(api, pod(*containers))["containers"]
    assert variables(once)["PYTHONPATH"] == f"{probe.SITE}:/a:/b"
    assert variables(of_both)["PYTHONPATH"] == f"{probe.SITE}:/a:/b:/c"
    assert "RLJOB_PROBE_NOTES" not in variables(of_reference)


def test_other_pods_get_no_probe(api: ResourceClient) -> None:
    others = {
        "no label": pod(labels={}),
        "another value": pod(labels={"rljob.dev/diagnose": "false"}),
        "of an RLJob": pod(labels=LABEL | {"app.kubernetes.io/managed-by": "rljob-operator"}),
        "disabled": pod(annotations={"rljob.dev/probe": "Disabled"}),
        "has the volume": pod(volumes=[{"name": "rljob-probe", "emptyDir": {}}]),
    }
    assert [name for name, manifest in others.items() if injected(admitted(api, manifest))] == []


def test_the_pods_of_a_job_get_the_probe_from_its_template(api: ResourceClient) -> None:
    template = pod(restartPolicy="Never")
    template["metadata"] = {"labels": LABEL}
    spec = {"template": {"metadata": template["metadata"], "spec": template["spec"]}}
    manifest = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "sums"}, "spec": spec}
    api.request("POST", "/apis/batch/v1/namespaces/team-a/jobs", manifest)
    [made] = eventually(
        lambda: api.request("GET", PODS, params={"labelSelector": "job-name=sums"})["items"], "the Job's pod"
    )
    assert injected(made["spec"])


def test_every_pod_template_of_the_examples_gets_the_probe(api: ResourceClient) -> None:
    examples = sorted((ROOT / "examples" / "workloads").glob("*.yaml"))
    templates = [found for example in examples for found in pod_templates(yaml.safe_load(example.read_text()))]
    assert len(templates) >= len(examples) > 0
    for template in templates:
        metadata, spec = template["metadata"], template["spec"]
        containers = [{**found, "securityContext": RESTRICTED} for found in spec["containers"]]
        given = pod(*containers, labels=metadata["labels"], annotations=metadata.get("annotations"))
        found = admitted(api, given)
        assert found["initContainers"][0]["name"] == "rljob-probe"
        for each in found["containers"]:
            assert variables(each)["PYTHONPATH"].startswith(probe.SITE)
            assert mounts(each)["/run/rljob-probe"]["subPath"] == f"notes-{each['name']}"


def pod_templates(value: Any) -> Iterator[Object]:
    """Everything in the manifest that has containers in its spec."""
    if isinstance(value, dict):
        if "containers" in (value.get("spec") or {}):
            yield value
        for part in value.values():
            yield from pod_templates(part)
    elif isinstance(value, list):
        for part in value:
            yield from pod_templates(part)
