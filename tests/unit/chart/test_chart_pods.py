"""Pods of the chart: the operator's, and the pod that runs after an uninstall."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.unit.chart.conftest import (
    CHART,
    Helm,
    Object,
    Render,
    environment,
    of_kind,
    only_object,
    operator_container,
    pod_templates,
)
from tests.unit.operator.objects.pod_security import restricted_violations

REQUIREMENTS = CHART.parents[1] / "requirements"


def test_every_pod_is_restricted_read_only_and_limited(render: Render) -> None:
    templates = pod_templates(render())
    assert len(templates) == 2
    for template in templates:
        pod = template["spec"]
        assert restricted_violations({"spec": {"volumes": [], **pod}}) == []
        assert pod["securityContext"]["runAsUser"] == 10001
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            assert set(container["resources"]["limits"]) == {"memory"}


def test_on_openshift_the_cluster_assigns_the_users(helm: Helm, render: Render) -> None:
    """Its restricted-v2 refuses a uid outside the range of the namespace."""
    openshift = ("template", "rljob", str(CHART), "--api-versions", "security.openshift.io/v1")
    for arguments, user in [((), None), (("--set", "runAsUser=10001,jobs.runAsUser=4711"), 10001)]:
        objects = [found for found in yaml.safe_load_all(helm(*openshift, *arguments).stdout) if found]
        for template in pod_templates(objects):
            context = template["spec"]["securityContext"]
            assert (context.get("runAsUser"), context.get("runAsGroup")) == (user, user)
            assert context["runAsNonRoot"] is True
        assert environment(objects)["RLJOB_OPERATOR_RUN_AS_USER"] == ("4711" if user else "0")
    objects = render(runAsUser=None, jobs={"runAsUser": None})
    assert "runAsUser" not in pod_templates(objects)[0]["spec"]["securityContext"]
    assert environment(objects)["RLJOB_OPERATOR_RUN_AS_USER"] == "0"


def test_probes_and_metrics_go_to_named_ports_that_the_container_opens(render: Render) -> None:
    container = operator_container(render())
    ports = {port["name"] for port in container["ports"]}
    assert {container[f"{probe}Probe"]["httpGet"]["port"] for probe in ("liveness", "readiness", "startup")} <= ports
    assert {service["spec"]["ports"][0]["targetPort"] for service in of_kind(render(), "Service")} <= ports
    without = render(metrics={"enabled": False}, admissionWebhook={"enabled": False})
    assert [port["name"] for port in operator_container(without)["ports"]] == ["probes"]
    assert of_kind(without, "Service") == []
    assert not any(role["metadata"]["name"].endswith("-metrics-reader") for role in of_kind(without, "ClusterRole"))


def test_an_upgrade_starts_the_new_operator_before_it_stops_the_old(render: Render) -> None:
    strategy = only_object(render(), "Deployment")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_the_operator_prefers_nodes_without_gpus_by_default(render: Render) -> None:
    affinity = pod_templates(render())[0]["spec"]["affinity"]
    [preference] = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert {"key": "rljob.dev/has-gpus", "operator": "DoesNotExist"} in preference["preference"]["matchExpressions"]
    own: Object = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    assert pod_templates(render(affinity=own))[0]["spec"]["affinity"] == own


def test_both_pods_are_placed_and_resolve_names_alike(render: Render) -> None:
    values: Object = {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}},
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["10.0.0.10"]},
        "priorityClassName": "system-cluster-critical",
    }
    objects = render(**values)
    templates = pod_templates(objects)
    assert len(templates) == 2
    for template in templates:
        expected = {**values, "nodeSelector": {"kubernetes.io/os": "linux", "pool": "system"}}
        assert expected.items() <= template["spec"].items()
    for template in pod_templates(render()):
        assert not {"dnsPolicy", "dnsConfig", "tolerations", "priorityClassName"} & template["spec"].keys()


@pytest.mark.parametrize("secret", ["", "certificate"])
def test_extra_volumes_are_mounted_beside_the_certificate(render: Render, secret: str) -> None:
    volume = {"name": "ca", "configMap": {"name": "ca"}}
    mount = {"name": "ca", "mountPath": "/etc/ssl/ca"}
    objects = render(extraVolumes=[volume], extraVolumeMounts=[mount], metrics={"tls": {"secretName": secret}})
    mounts = operator_container(objects)["volumeMounts"]
    volumes = only_object(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert mounts[-1] == mount
    assert volumes[-1] == volume
    own = ["metrics-certificate", "admission-certificate"] if secret else ["admission-certificate"]
    assert [found["name"] for found in volumes] == [*own, "ca"]
    assert [found["name"] for found in mounts] == [found["name"] for found in volumes]


def test_selectors_find_the_operators_pods_and_no_other(render: Render) -> None:
    objects = render(replicaCount=2, serviceMonitor={"enabled": True})
    budget = only_object(objects, "PodDisruptionBudget")["spec"]
    selectors = [
        only_object(objects, "Deployment")["spec"]["selector"]["matchLabels"],
        budget["selector"]["matchLabels"],
        only_object(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        *(service["spec"]["selector"] for service in of_kind(objects, "Service")),
    ]
    labels, after_uninstall = [template["metadata"]["labels"] for template in pod_templates(objects)]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= after_uninstall.items()
    monitor = only_object(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= only_object(objects, "Service", "-metrics")["metadata"]["labels"].items()
    assert budget["maxUnavailable"] == 1
    assert of_kind(render(), "PodDisruptionBudget") == [], "one replica needs none"


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_the_torch_version_is_the_one_locked_for_the_trainers_image(render: Render, device: str) -> None:
    variables = environment(render(trainer={"device": device}))
    assert variables["RLJOB_OPERATOR_TRAINER_TORCH_VERSION"] == locked_torch(REQUIREMENTS / f"trainer-{device}.txt")
    assert variables["RLJOB_OPERATOR_TRAINER_IMAGE"].endswith(f"-{device}")


def locked_torch(file: Path) -> str:
    [line] = [line for line in file.read_text().splitlines() if line.startswith("torch==")]
    return line.split()[0].removeprefix("torch==")


def test_a_long_release_name_leaves_every_name_within_63_characters(render: Render) -> None:
    objects = render(fullnameOverride="o" * 40, namespaces=["n" * 63])
    names = [found["metadata"]["name"] for found in objects if found["kind"] in ("Deployment", "Service", "Job")]
    assert max(map(len, names)) <= 63
