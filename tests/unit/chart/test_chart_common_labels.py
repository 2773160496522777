"""Labels and annotations that all objects of the chart get."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.chart.conftest import Render, is_hook, of_kind, only_object, pod_templates
from tests.unit.chart.test_chart_values import EVERYTHING_ON

ALL_OBJECTS: dict[str, Any] = {
    **EVERYTHING_ON,
    "admissionPolicy": {"enabled": True},
    "podDiagnosis": {"enabled": True},
}
MUTATING_POLICY = "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"


def test_common_labels_and_annotations_are_on_every_object(render: Render) -> None:
    objects = render(api_versions=MUTATING_POLICY, **ALL_OBJECTS)
    assert len({found["kind"] for found in objects}) >= 17
    for found in objects:
        labels, annotations = found["metadata"]["labels"], found["metadata"]["annotations"]
        assert labels["team"] == "platform", found["kind"]
        assert labels["app.kubernetes.io/part-of"] == "training"
        assert labels["app.kubernetes.io/managed-by"] == "Helm", "Helm refuses to adopt an object without it"
        assert annotations["owner"] == "platform", found["kind"]
        assert found["kind"] != "CustomResourceDefinition" or annotations["helm.sh/resource-policy"] == "keep"
    assert sum(map(is_hook, objects)) == 6, "the annotations of hooks stay"


def test_labels_of_one_object_override_common_labels(render: Render) -> None:
    objects = render(**ALL_OBJECTS)
    operator, after_uninstall = (template["metadata"]["labels"] for template in pod_templates(objects))
    assert operator["team"] == "ml"
    assert after_uninstall["team"] == "platform"
    assert operator["app.kubernetes.io/part-of"] == after_uninstall["app.kubernetes.io/part-of"] == "training"
    assert only_object(objects, "ServiceMonitor")["metadata"]["labels"]["release"] == "prometheus"


@pytest.mark.parametrize("values", [{}, ALL_OBJECTS], ids=["defaults", "all objects"])
def test_common_labels_do_not_change_selectors(render: Render, values: dict[str, Any]) -> None:
    selector = only_object(render(**values), "Deployment")["spec"]["selector"]["matchLabels"]
    assert selector == {"app.kubernetes.io/name": "rljob-operator", "app.kubernetes.io/instance": "rljob"}


def test_only_objects_that_need_annotations_have_them_by_default(render: Render) -> None:
    objects = render()
    annotated = {found["kind"] for found in objects if "annotations" in found["metadata"] and not is_hook(found)}
    assert annotated == {"CustomResourceDefinition"}
    assert of_kind(objects, "Deployment")[0]["spec"]["template"]["metadata"]["annotations"] == {
        "kubectl.kubernetes.io/default-container": "operator"
    }


@pytest.mark.parametrize("keep", [True, False])
def test_crds_have_annotations_of_their_own(render: Render, keep: bool) -> None:
    sync = {"argocd.argoproj.io/sync-options": "Prune=false"}
    objects = render(crds={"annotations": sync, "keep": keep})
    expected = sync | ({"helm.sh/resource-policy": "keep"} if keep else {})
    for crd in of_kind(objects, "CustomResourceDefinition"):
        assert crd["metadata"]["annotations"] == expected
    assert "annotations" not in only_object(objects, "Deployment")["metadata"]
