"""Values of the chart, their schema, and errors about wrong values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts.generate import generated_files
from tests.unit.chart.conftest import CHART, Helm, Render, the

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

EVERYTHING_ON: dict[str, Any] = {
    "replicas": 2,
    "namespaces": ["team-a", "team-b"],
    "imagePullSecrets": ["registry"],
    "podLabels": {"team": "ml"},
    "podAnnotations": {"note": "x"},
    "priorityClassName": "system-cluster-critical",
    "tolerations": [{"key": "control-plane", "operator": "Exists"}],
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "networkPolicy": {"enabled": True, "metricsFrom": [{"namespaceSelector": {}}]},
    "metrics": {"readers": [{"serviceAccount": "prometheus", "namespace": "monitoring"}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
}


@pytest.mark.parametrize("values", [{}, EVERYTHING_ON], ids=["defaults", "everything on"])
def test_helm_lint_finds_nothing(helm: Helm, values: dict[str, Any]) -> None:
    settings = ",".join(f"{name}={json.dumps(value)}" for name, value in values.items())
    result = helm("lint", "--strict", str(CHART), "--set-json", settings)
    assert result.returncode == 0, result.stdout
    assert "[WARNING]" not in result.stdout


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("trainer.devise=cpu", "at '/trainer': additional properties 'devise' not allowed"),
        ("replica=2", "additional properties 'replica' not allowed"),
        ("replicas=two", "at '/replicas': got string, want integer"),
        ("trainer.device=tpu", "at '/trainer/device': value must be one of 'gpu', 'cpu'"),
        ("jobs.sharedMemory=4GB", "at '/jobs/sharedMemory': '4GB' does not match pattern"),
        ("namespaces={Team_A}", "at '/namespaces/0': 'Team_A' does not match pattern"),
        ("image.digest=latest", "at '/image/digest': 'latest' does not match pattern"),
        ("jobs.gpuResources={gpu}", "at '/jobs/gpuResources/0': 'gpu' does not match pattern"),
        ("serviceMonitor.enabled=true,metrics.enabled=false", "serviceMonitor.enabled needs metrics.enabled"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: Helm, assignment: str, message: str) -> None:
    result = helm("template", "rljob", str(CHART), "--set", assignment)
    assert result.returncode != 0
    assert message in result.stderr


def test_schema_and_default_values_have_the_same_keys() -> None:
    assert set(value_paths(VALUES)) == set(schema_paths(SCHEMA)) - {"global", "enabled"}


def test_every_value_has_a_description() -> None:
    silent = [path for path, value in schema_values(SCHEMA) if not value.get("description", "").endswith(".")]
    assert silent == []


def test_generated_files_are_up_to_date() -> None:
    for name, text in generated_files().items():
        assert (CHART.parents[1] / name).read_text() == text, f"{name}: run charts/generate.py"


def test_a_parent_chart_can_switch_the_chart_off(helm: Helm, tmp_path: Path) -> None:
    parent = tmp_path / "platform"
    shutil.copytree(CHART, parent / "charts" / CHART.name)
    dependency = {"name": CHART.name, "version": "0.1.0", "condition": f"{CHART.name}.enabled"}
    chart = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (parent / "Chart.yaml").write_text(yaml.safe_dump(chart))
    for enabled in (True, False):
        result = helm("template", "platform", str(parent), "--set", f"{CHART.name}.enabled={json.dumps(enabled)}")
        assert result.returncode == 0, result.stderr
        assert ("kind: Deployment" in result.stdout) == enabled


def test_a_digest_takes_precedence_over_a_tag(render: Render) -> None:
    digest = "sha256:" + "0" * 64
    deployment = the(render(image={"repository": "registry/operator", "tag": "1", "digest": digest}), "Deployment")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == f"registry/operator@{digest}"


def value_paths(values: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of all values in the schema. A free-form map counts as one value."""
    for name, value in values.items():
        yield f"{path}{name}"
        if isinstance(value, dict) and f"{path}{name}" in described_objects():
            yield from value_paths(value, f"{path}{name}.")


def schema_paths(schema: dict[str, Any]) -> Iterator[str]:
    yield from (path for path, _ in schema_values(schema))


def schema_values(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, declared in schema.get("properties", {}).items():
        value = resolved(declared)
        yield f"{path}{name}", value
        yield from schema_values(value, f"{path}{name}.")


def resolved(declared: dict[str, Any]) -> dict[str, Any]:
    if "$ref" not in declared:
        return declared
    definition: dict[str, Any] = SCHEMA["definitions"][declared["$ref"].rpartition("/")[2]]
    return definition | declared


def described_objects() -> set[str]:
    return {path for path, value in schema_values(SCHEMA) if "properties" in value}
