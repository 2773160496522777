"""Policies of the chart: for the network of the operator, for reports of jobs, and for the probe in labelled pods."""

from __future__ import annotations

import pytest

from rljob_operator import labels
from rljob_operator.names import SHARED_ACCOUNT
from rljob_operator.objects import probe
from tests.unit.chart.conftest import Object, Render, environment, of_kind, only_object

SERVED = "admissionregistration.k8s.io/{}/MutatingAdmissionPolicy"
KINDS = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding")


def test_only_metrics_and_admission_reach_the_operator_and_it_only_the_api_server(render: Render) -> None:
    policy = only_object(render(networkPolicy={"apiServerPorts": [443, 16443]}), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    admission: Object = {"ports": [{"port": "admission", "protocol": "TCP"}]}
    metrics: Object = {"ports": [{"port": "metrics", "protocol": "TCP"}]}
    assert policy["ingress"] == [admission, metrics | {"from": [{"podSelector": {}}]}]
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53, 5353, 443, 16443}
    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    api_server = [{"ipBlock": {"cidr": "192.0.2.1/32"}}]
    peers: Object = {"metricsFrom": monitoring, "admissionFrom": api_server}
    ingress = only_object(render(networkPolicy=peers), "NetworkPolicy")["spec"]["ingress"]
    assert ingress == [admission | {"from": api_server}, metrics | {"from": monitoring}]
    closed = render(metrics={"enabled": False}, admissionWebhook={"enabled": False})
    assert only_object(closed, "NetworkPolicy")["spec"]["ingress"] == []
    assert of_kind(render(networkPolicy={"enabled": False}), "NetworkPolicy") == []
    assert only_object(render(), "NetworkPolicy")["spec"]["policyTypes"] == ["Ingress"], (
        "the API server's ports are unknown"
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_jobs_share_an_account_only_beside_the_policy_for_it(render: Render, enabled: bool) -> None:
    objects = render(stepReportPolicy={"enabled": enabled})
    assert environment(objects)["RLJOB_OPERATOR_SHARED_ACCOUNT"] == str(enabled).lower()
    policies = of_kind(objects, "ValidatingAdmissionPolicy")
    bindings = of_kind(objects, "ValidatingAdmissionPolicyBinding")
    assert len(policies) == len(bindings) == enabled
    for policy in policies:
        assert policy["spec"]["failurePolicy"] == "Fail"
        assert f":{SHARED_ACCOUNT}" in policy["spec"]["matchConditions"][0]["expression"]
    assert all(binding["spec"]["validationActions"] == ["Deny"] for binding in bindings)


def probe_policies(render: Render, version: str = "v1", **values: Object) -> list[Object]:
    diagnosis = {"podDiagnosis": {"enabled": True, **values.pop("podDiagnosis", {})}}
    objects = render(api_versions=SERVED.format(version) if version else "", **values | diagnosis)
    return [found for kind in KINDS for found in of_kind(objects, kind)]


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_the_probe_policy_selects_and_adds_what_the_operator_does(render: Render, version: str) -> None:
    policy, binding = probe_policies(render, version)
    assert {policy["apiVersion"], binding["apiVersion"]} == {f"admissionregistration.k8s.io/{version}"}
    assert policy["spec"]["matchConstraints"]["objectSelector"] == {"matchLabels": {labels.DIAGNOSE: "true"}}
    assert probe.SITE in str(policy)
    assert f"{probe.IN_OPERATOR_IMAGE}/." in str(policy)
    assert "runAsUser: 10001" in str(policy)
    assert "runAsUser" not in str(probe_policies(render, version, jobs={"runAsUser": None})), "the cluster chooses it"


@pytest.mark.parametrize(
    ("version", "diagnosis"),
    [("v1", {"enabled": False}), ("v1", {"injectProbe": False}), ("", {}), ("v1alpha1", {})],
)
def test_there_is_no_probe_policy_without_the_option_or_the_api(
    render: Render, version: str, diagnosis: Object
) -> None:
    assert probe_policies(render, version, podDiagnosis=diagnosis) == []


TEAM: Object = {"matchLabels": {"team": "rl"}}
NAMED: Object = {"matchExpressions": [{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a"]}]}


@pytest.mark.parametrize(
    ("values", "selector"),
    [({}, None), ({"podDiagnosis": {"namespaceSelector": TEAM}}, TEAM), ({"namespaces": ["team-a"]}, NAMED)],
)
def test_the_probe_policy_is_bound_to_the_chosen_namespaces(
    render: Render, values: Object, selector: Object | None
) -> None:
    [_, binding] = probe_policies(render, **values)
    assert binding["spec"].get("matchResources", {}).get("namespaceSelector") == selector
