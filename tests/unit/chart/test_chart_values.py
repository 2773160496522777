"""Values of the chart: their schema, errors about wrong ones, and the settings that the operator gets from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_operator import cli
from rljob_operator.options import options
from rljob_operator.settings import OperatorSettings
from tests.unit.chart.conftest import CHART, Helm, Render, environment, operator_container

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def schema_values(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, declared in schema.get("properties", {}).items():
        definition = SCHEMA["definitions"][declared["$ref"].rpartition("/")[2]] if "$ref" in declared else {}
        yield f"{path}{name}", definition | declared
        yield from schema_values(definition | declared, f"{path}{name}.")


SCHEMA_VALUES = dict(schema_values(SCHEMA))

EVERYTHING_ON: dict[str, Any] = {
    "replicaCount": 2,
    "namespaces": ["team-a", "team-b"],
    "imagePullSecrets": ["registry"],
    "podLabels": {"team": "ml"},
    "podAnnotations": {"note": "x"},
    "priorityClassName": "system-cluster-critical",
    "tolerations": [{"key": "control-plane", "operator": "Exists"}],
    "commonLabels": {"team": "platform", "app.kubernetes.io/part-of": "training", "release": "mine"},
    "commonAnnotations": {"owner": "platform"},
    "affinity": {"nodeAffinity": {}},
    "dnsPolicy": "None",
    "dnsConfig": {"nameservers": ["10.0.0.10"]},
    "extraArgs": ["--stale-watch-seconds=120"],
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ssl/certs", "readOnly": True}],
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
        ("replicas=2", "additional properties 'replicas' not allowed"),
        ("replicaCount=two", "at '/replicaCount': got string, want integer"),
        ("trainer.device=tpu", "at '/trainer/device': value must be one of 'gpu', 'cpu'"),
        ("jobs.sharedMemory=4GB", "at '/jobs/sharedMemory': '4GB' does not match pattern"),
        ("namespaces={Team_A}", "at '/namespaces/0': 'Team_A' does not match pattern"),
        (
            r"commonLabels.app\.kubernetes\.io/name=mine",
            "at '/commonLabels/app.kubernetes.io~1name'",
        ),
        (r"commonAnnotations.helm\.sh/hook=x", "at '/commonAnnotations/helm.sh~1hook'"),
        ("dnsPolicy=Cluster", "at '/dnsPolicy': value must be one of"),
        ("extraVolumes[0].emptyDir.medium=Memory", "at '/extraVolumes/0': missing property 'name'"),
        ("image.digest=latest", "at '/image/digest': 'latest' does not match pattern"),
        ("jobs.gpuResources={gpu}", "at '/jobs/gpuResources/0': 'gpu' does not match pattern"),
        ("serviceMonitor.enabled=true,metrics.enabled=false", "serviceMonitor.enabled needs metrics.enabled"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: Helm, assignment: str, message: str) -> None:
    result = helm("template", "rljob", str(CHART), "--set", assignment)
    assert result.returncode != 0
    assert message in result.stderr


def test_every_value_has_a_description() -> None:
    assert [name for name, value in SCHEMA_VALUES.items() if not value.get("description")] == []


def test_every_default_value_has_its_description_above_it() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    keys = [number for number, line in enumerate(lines) if line.lstrip().partition(":")[0].isidentifier()]
    nested_in_free_form = {"requests: {cpu: 100m, memory: 128Mi}", "limits: {memory: 512Mi}"}
    undescribed = {lines[number].strip() for number in keys if not lines[number - 1].lstrip().startswith("#")}
    assert undescribed <= nested_in_free_form
    assert len(keys) > 100
    assert max(map(len, lines)) <= 120


def test_schema_and_default_values_have_the_same_keys() -> None:
    assert set(value_paths(VALUES)) == SCHEMA_VALUES.keys() - {"global", "enabled"}


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


def value_paths(values: dict[str, Any], path: str = "") -> Iterator[str]:
    """Paths of all values in the schema. A free-form map counts as one value."""
    for name, value in values.items():
        yield f"{path}{name}"
        if isinstance(value, dict) and "properties" in SCHEMA_VALUES[f"{path}{name}"]:
            yield from value_paths(value, f"{path}{name}.")


@pytest.fixture
def run_with(render: Render, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings of the operator, parsed from the container's environment with some values."""

    def run_with(**values: Any) -> OperatorSettings:
        runs: list[OperatorSettings] = []

        def run(settings: OperatorSettings) -> int:
            runs.append(settings)
            return 0

        monkeypatch.setattr(cli, "_run", run)
        objects = render(**values)
        container = operator_container(objects)
        assert container["command"][0] == "rljob-operator"
        for name, value in environment(objects).items():
            monkeypatch.setenv(name, value)
        assert cli.main([*container["command"][1:], *container.get("args", [])]) == 0
        return runs[0]

    return run_with


def test_by_default_the_operators_own_defaults_hold(run_with: Any) -> None:
    settings = run_with()
    expected = OperatorSettings(
        trainer_image="localhost/rljob/trainer:0.1.0-gpu",
        trainer_torch_version="2.11.0",
        probe_image="localhost/rljob/operator:0.1.0",
        shared_account=True,  # with the policy, which only the chart creates
        admission_certificate="/etc/rljob-operator/admission",  # which only the chart makes
    )
    assert settings.model_dump() == expected.model_dump()


def test_every_value_reaches_the_operator(run_with: Any) -> None:
    settings = run_with(
        fullnameOverride="mine",
        image={"repository": "registry/operator", "digest": f"sha256:{7:064x}", "pullPolicy": "Never"},
        trainer={
            "image": {"repository": "registry/trainer", "tag": "7", "pullPolicy": "Always"},
            "torchVersion": "2.12.1",
            "imagePullSecrets": ["one", "two"],
        },
        namespaces=["team-a", "team-b"],
        nodes={"watch": False},
        jobs={
            "gpuResources": ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu"],
            "checkpointClaim": {"storageClassName": "nfs", "size": "1Ti"},
            "sharedMemory": "512Mi",
            "terminationGraceSeconds": 2000000,
            "placementTimeoutSeconds": 3000000,
            "placementRetrySeconds": 1.5,
            "startTimeoutSeconds": 90,
            "lostNodeSeconds": 45,
            "restartDelaySeconds": 0,
            "statusIntervalSeconds": 2,
            "podLabels": {"team": "ml", "cost": "7"},
            "runAsUser": None,
            "networkPolicy": {"enabled": False, "egress": [{"ports": [{"port": 3128}]}]},
        },
        stepReportPolicy={"enabled": False},
        networkPolicy={"apiServerPorts": [443, 16443]},
        concurrency={"jobs": 3, "apiRequests": 4},
        metrics={"enabled": False, "authentication": False, "tls": {"enabled": False}},
        log={"level": "debug", "format": "text"},
    )
    expected = OperatorSettings(
        trainer_image="registry/trainer:7",
        trainer_torch_version="2.12.1",
        trainer_image_pull_policy="Always",
        image_pull_secrets=("one", "two"),
        probe_image=f"registry/operator@sha256:{7:064x}",
        probe_image_pull_policy="Never",
        namespaces=("team-a", "team-b"),
        gpu_resources=("nvidia.com/mig-1g.10gb", "nvidia.com/gpu"),
        watch_nodes=False,
        label_nodes=False,
        checkpoint_storage_class="nfs",
        checkpoint_claim_bytes=1 << 40,
        shared_memory_bytes=512 << 20,
        run_as_user=0,
        network_policy=False,
        network_policy_egress=[json.dumps({"ports": [{"port": 3128}]})],
        api_server_ports=(443, 16443),
        termination_grace_seconds=2_000_000,
        placement_timeout_seconds=3e6,
        placement_retry_seconds=1.5,
        start_timeout_seconds=90,
        lost_node_seconds=45,
        restart_delay_seconds=0,
        status_interval_seconds=2,
        pod_labels={"team": "ml", "cost": "7"},
        lease_name="mine",
        reconcile_workers=3,
        api_concurrency=4,
        metrics_port=0,
        metrics_auth=False,
        metrics_tls=False,
        log_format="text",
        log_level="debug",
    )
    assert settings.model_dump() == expected.model_dump()


def test_extra_arguments_are_options_of_the_operator_and_precede_the_values(run_with: Any) -> None:
    settings = run_with(log={"level": "info"}, extraArgs=["--stale-watch-seconds=120", "--log-level", "debug"])
    assert (settings.stale_watch_seconds, settings.log_level) == (120.0, "debug")


def test_with_an_unknown_extra_argument_the_operator_exits_with_code_2(
    run_with: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run_with(extraArgs=["--stale-watch=120"])
    assert exit_.value.code == 2
    assert "unrecognized arguments: --stale-watch=120" in capsys.readouterr().err


def test_every_setting_is_a_variable_or_fixed_by_the_deployment(render: Render) -> None:
    values: dict[str, Any] = {
        "trainer": {"imagePullSecrets": ["registry"]},
        "namespaces": ["team-a"],
        "jobs": {
            "checkpointClaim": {"storageClassName": "nfs"},
            "podLabels": {"team": "ml"},
            "networkPolicy": {"egress": [{}]},
            "metrics": {"enabled": True},
        },
        "metrics": {"tls": {"secretName": "certificate"}},
        "networkPolicy": {"apiServerPorts": [443]},
    }
    variables = {name.removeprefix("RLJOB_OPERATOR_").lower() for name in environment(render(**values))}
    known = {option.name for option in options()}
    assert variables <= known
    fixed = {"leader_election", "lease_namespace", "stale_watch_seconds", "probes_port", "admission_port"}
    assert known - variables == fixed
