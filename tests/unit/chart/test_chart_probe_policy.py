"""The policy that adds the probe to labelled pods: on request, in the version that the cluster serves."""

from __future__ import annotations

import pytest

from rljob_operator import labels
from rljob_operator.objects import probe
from tests.unit.chart.conftest import Object, Render, of_kind

SERVED = "admissionregistration.k8s.io/{}/MutatingAdmissionPolicy"
KINDS = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding")


def policies(objects: list[Object]) -> list[Object]:
    return [found for kind in KINDS for found in of_kind(objects, kind)]


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_the_policy_has_the_version_that_the_cluster_serves(render: Render, version: str) -> None:
    found = policies(render(api_versions=SERVED.format(version), podDiagnosis={"enabled": True}))
    assert [policy["apiVersion"] for policy in found] == [f"admissionregistration.k8s.io/{version}"] * 2


def test_there_is_no_policy_without_the_option_or_the_api(render: Render) -> None:
    served = SERVED.format("v1")
    assert not policies(render(api_versions=served))
    assert not policies(render(api_versions=served, podDiagnosis={"enabled": True, "injectProbe": False}))
    assert not policies(render(podDiagnosis={"enabled": True}))
    assert not policies(render(api_versions=SERVED.format("v1alpha1"), podDiagnosis={"enabled": True}))


def test_the_policy_selects_the_label_that_the_operator_watches(render: Render) -> None:
    [policy, _] = policies(render(api_versions=SERVED.format("v1"), podDiagnosis={"enabled": True}))
    assert policy["spec"]["matchConstraints"]["objectSelector"] == {"matchLabels": {labels.DIAGNOSE: "true"}}


def test_the_policy_adds_the_probe_where_the_operator_does(render: Render) -> None:
    [policy, _] = policies(render(api_versions=SERVED.format("v1"), podDiagnosis={"enabled": True}))
    assert probe.SITE in str(policy)
    assert f"{probe.IN_OPERATOR_IMAGE}/." in str(policy)


@pytest.mark.parametrize(
    ("values", "selector"),
    [
        ({}, None),
        ({"podDiagnosis": {"namespaceSelector": {"matchLabels": {"team": "rl"}}}}, {"matchLabels": {"team": "rl"}}),
        (
            {"namespaces": ["team-a"]},
            {
                "matchExpressions": [
                    {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a"]},
                ]
            },
        ),
    ],
)
def test_the_binding_is_for_the_chosen_namespaces(render: Render, values: Object, selector: Object | None) -> None:
    diagnosis = {"enabled": True, **values.get("podDiagnosis", {})}
    [_, binding] = policies(render(api_versions=SERVED.format("v1"), **values | {"podDiagnosis": diagnosis}))
    assert binding["spec"].get("matchResources", {}).get("namespaceSelector") == selector


def test_on_openshift_the_cluster_chooses_the_user_of_the_copy(render: Render) -> None:
    served = SERVED.format("v1")
    assert "runAsUser: 10001" in str(policies(render(api_versions=served, podDiagnosis={"enabled": True})))
    without = render(api_versions=served, podDiagnosis={"enabled": True}, jobs={"runAsUser": None})
    assert "runAsUser" not in str(policies(without))
