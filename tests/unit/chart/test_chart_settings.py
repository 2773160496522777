"""The chart sets the operator's environment variables as the operator reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rljob_operator import cli
from rljob_operator.options import options
from rljob_operator.settings import OperatorSettings
from tests.unit.chart.conftest import Object, Render, the


@pytest.fixture
def run_with(render: Render, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings of the operator, parsed from the container's environment with some values."""

    def run_with(**values: Any) -> OperatorSettings:
        runs: list[OperatorSettings] = []

        def run(settings: OperatorSettings) -> int:
            runs.append(settings)
            return 0

        monkeypatch.setattr(cli, "_run", run)
        container = the(render(**values), "Deployment")["spec"]["template"]["spec"]["containers"][0]
        assert container["command"][0] == "rljob-operator"
        for name, value in environment(container).items():
            monkeypatch.setenv(name, value)
        assert cli.main(container["command"][1:]) == 0
        return runs[0]

    return run_with


def test_by_default_the_operators_own_defaults_hold(run_with: Any) -> None:
    settings = run_with()
    expected = OperatorSettings(
        trainer_image="localhost/rljob/trainer:0.1.0-gpu",
        trainer_torch_version="2.11.0",
        probe_image="localhost/rljob/operator:0.1.0",
        shared_account=True,  # with the policy, which only the chart creates
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


def test_every_setting_is_a_variable_or_fixed_by_the_deployment(render: Render) -> None:
    [container] = the(render(**EVERY_LIST_SET), "Deployment")["spec"]["template"]["spec"]["containers"]
    variables = {name.removeprefix("RLJOB_OPERATOR_").lower() for name in environment(container)}
    known = {option.name for option in options()}
    assert variables <= known
    assert known - variables == {"leader_election", "lease_namespace", "stale_watch_seconds", "probes_port"}


EVERY_LIST_SET: dict[str, Any] = {
    "trainer": {"imagePullSecrets": ["registry"]},
    "namespaces": ["team-a"],
    "jobs": {
        "checkpointClaim": {"storageClassName": "nfs"},
        "podLabels": {"team": "ml"},
        "networkPolicy": {"egress": [{}]},
    },
    "metrics": {"tls": {"secretName": "certificate"}},
    "networkPolicy": {"apiServerPorts": [443]},
}


def environment(container: Object) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container["env"]}
