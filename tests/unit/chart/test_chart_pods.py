"""Pods of the chart: the operator's, and the pod that runs after an uninstall."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.unit.chart.conftest import CHART, Helm, Object, Render, of_kind, pod_templates, the

REQUIREMENTS = CHART.parents[1] / "requirements"


def operator_pod(objects: list[Object]) -> Object:
    spec: Object = the(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


def environment(objects: list[Object]) -> dict[str, str]:
    [container] = operator_pod(objects)["containers"]
    return {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}


def test_every_pod_meets_pod_security_restricted_with_a_read_only_image(render: Render) -> None:
    templates = pod_templates(render())
    assert len(templates) == 2
    for template in templates:
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 10001
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_on_openshift_the_cluster_assigns_the_users(helm: Helm) -> None:
    """Its restricted-v2 refuses a uid outside the range of the namespace."""
    openshift = ("template", "rljob", str(CHART), "--api-versions", "security.openshift.io/v1")
    for arguments, user in [((), None), (("--set", "runAsUser=10001,jobs.runAsUser=4711"), 10001)]:
        objects = [found for found in yaml.safe_load_all(helm(*openshift, *arguments).stdout) if found]
        for template in pod_templates(objects):
            context = template["spec"]["securityContext"]
            assert (context.get("runAsUser"), context.get("runAsGroup")) == (user, user)
            assert context["runAsNonRoot"] is True
        assert environment(objects)["RLJOB_OPERATOR_RUN_AS_USER"] == ("4711" if user else "0")


def test_no_user_is_set_if_the_value_is_null(render: Render) -> None:
    objects = render(runAsUser=None, jobs={"runAsUser": None})
    assert "runAsUser" not in operator_pod(objects)["securityContext"]
    assert environment(objects)["RLJOB_OPERATOR_RUN_AS_USER"] == "0"


def test_every_container_has_requests_and_a_memory_limit(render: Render) -> None:
    for template in pod_templates(render()):
        for container in template["spec"]["containers"]:
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            assert set(container["resources"]["limits"]) == {"memory"}


def test_probes_and_metrics_go_to_named_ports_that_the_container_opens(render: Render) -> None:
    objects = render()
    [container] = operator_pod(objects)["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert {container[f"{probe}Probe"]["httpGet"]["port"] for probe in ("liveness", "readiness", "startup")} <= ports
    assert the(objects, "Service")["spec"]["ports"][0]["targetPort"] in ports


def test_without_metrics_nothing_listens_for_them(render: Render) -> None:
    objects = render(metrics={"enabled": False})
    assert [port["name"] for port in operator_pod(objects)["containers"][0]["ports"]] == ["probes"]
    assert of_kind(objects, "Service") == []
    assert not any(name.endswith("-metrics-reader") for name in cluster_role_names(objects))


def test_an_upgrade_starts_the_new_operator_before_it_stops_the_old(render: Render) -> None:
    strategy = the(render(), "Deployment")["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_the_operator_prefers_nodes_without_gpus_by_default(render: Render) -> None:
    [preference] = operator_pod(render())["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert {"key": "rljob.dev/has-gpus", "operator": "DoesNotExist"} in preference["preference"]["matchExpressions"]
    own: Object = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    assert operator_pod(render(affinity=own))["affinity"] == own


def test_only_several_replicas_have_a_disruption_budget(render: Render) -> None:
    assert of_kind(render(), "PodDisruptionBudget") == []
    budget = the(render(replicas=2), "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1


def test_selectors_find_the_operators_pods_and_no_other(render: Render) -> None:
    objects = render(replicas=2, serviceMonitor={"enabled": True})
    deployment = the(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        the(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        the(objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        the(objects, "Service")["spec"]["selector"],
    ]
    [after_uninstall] = [template["metadata"]["labels"] for template in pod_templates(objects)[1:]]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= after_uninstall.items()
    monitor = the(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= the(objects, "Service")["metadata"]["labels"].items()


def test_only_metrics_reach_the_operator_and_it_only_the_api_server(render: Render) -> None:
    policy = the(render(networkPolicy={"apiServerPorts": [443, 16443]}), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"] == [{"ports": [{"port": "metrics", "protocol": "TCP"}]}]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 5353, 443, 16443}
    assert the(render(metrics={"enabled": False}), "NetworkPolicy")["spec"]["ingress"] == []
    assert of_kind(render(networkPolicy={"enabled": False}), "NetworkPolicy") == []


def test_unknown_ports_of_the_api_server_lock_no_operator_out(render: Render) -> None:
    assert the(render(), "NetworkPolicy")["spec"]["policyTypes"] == ["Ingress"]


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_the_torch_version_is_the_one_locked_for_the_trainers_image(render: Render, device: str) -> None:
    variables = environment(render(trainer={"device": device}))
    assert variables["RLJOB_OPERATOR_TRAINER_TORCH_VERSION"] == locked_torch(REQUIREMENTS / f"trainer-{device}.txt")
    assert variables["RLJOB_OPERATOR_TRAINER_IMAGE"].endswith(f"-{device}")


def test_a_long_release_name_leaves_every_name_within_63_characters(render: Render) -> None:
    objects = render(fullnameOverride="o" * 40, namespaces=["n" * 63])
    namespaced = [found for found in objects if not found["kind"].startswith("Cluster")]
    names = [found["metadata"]["name"] for found in namespaced if found["kind"] in ("Deployment", "Service", "Job")]
    assert max(map(len, names)) <= 63


def cluster_role_names(objects: list[Object]) -> list[str]:
    return [role["metadata"]["name"] for role in of_kind(objects, "ClusterRole")]


def locked_torch(file: Path) -> str:
    [line] = [line for line in file.read_text().splitlines() if line.startswith("torch==")]
    return line.split()[0].removeprefix("torch==")
