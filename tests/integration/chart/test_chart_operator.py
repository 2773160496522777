"""The operator with no other rights and settings than the chart gives it."""

from __future__ import annotations

import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator.api_client import ApiClient
from rljob_testing.operator.eventually import eventually
from rljob_testing.operator.manifests import node, node_status
from rljob_testing.operator.operator_process import OperatorProcess, write_kubeconfig
from rljob_testing.operator.restarts import kept_running
from tests.integration.chart.conftest import (
    NAMES,
    RELEASE_NAMESPACE,
    CommandLine,
    Install,
    Object,
    job,
)


@pytest.fixture
def operator(
    control_plane: ControlPlane, command_line: CommandLine, installed: Install, tmp_path: Path, ports: Iterator[int]
) -> Iterator[OperatorProcess]:
    """The operator as the chart's Deployment would run it; a ServiceAccount in team-b may read its metrics."""
    installed(
        *("--set", "replicaCount=0,log.level=debug"),
        *("--set", "metrics.readers[0].serviceAccount=prometheus,metrics.readers[0].namespace=team-b"),
    )
    [container] = command_line.get("deployment", NAMES, "-n", RELEASE_NAMESPACE)["spec"]["template"]["spec"][
        "containers"
    ]
    settings = {
        variable["name"].removeprefix("RLJOB_OPERATOR_").lower(): variable["value"] for variable in container["env"]
    }
    settings["lease_namespace"] = RELEASE_NAMESPACE
    token = token_of(command_line, NAMES, RELEASE_NAMESPACE)
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", control_plane.url, token, control_plane.ca)
    operator = OperatorProcess(kubeconfig, tmp_path / "operator.log", next(ports), next(ports), settings)
    operator.start()
    with kept_running(operator, ApiClient.from_kubeconfig(control_plane.kubeconfig), RELEASE_NAMESPACE):
        yield operator
    operator.stop()


def test_it_runs_a_job_and_nothing_is_forbidden(
    command_line: CommandLine, operator: OperatorProcess, control_plane: ControlPlane
) -> None:
    command_line.apply(node("gpu-node", {}))
    status = yaml.safe_dump({"status": node_status(gpus=8)})
    command_line.kubectl("patch", "node", "gpu-node", "--subresource=status", "--patch", status)
    command_line.apply(job("runs", "team-a"))

    def pods() -> list[Object]:
        found: list[Object] = command_line.get("pods", "-n", "team-a", "-l", "rljob.dev/job-name=runs")["items"]
        return found

    eventually(lambda: len(pods()) == 2, "controller and worker to be made", context=operator.end_of_log)
    policy = command_line.get("networkpolicy", "runs-rljob", "-n", "team-a")["spec"]
    assert urlsplit(control_plane.url).port in {
        port["port"] for rule in policy["egress"] for port in rule.get("ports", [])
    }
    eventually(lambda: "rljob.dev/has-gpus" in labels_of_node(command_line), "the node to be labelled")
    operator.stop()
    operator.start()  # what it made it finds, or makes its own
    command_line.kubectl("delete", "rljob", "runs", "-n", "team-a", "--wait=false")
    eventually(lambda: all("deletionTimestamp" in pod["metadata"] for pod in pods()), "its pods to be deleted")
    command_line.kubectl("delete", "node", "gpu-node")

    requests = requests_by_resource_and_code(scrape(operator, token_of(command_line, "prometheus", "team-b")))
    assert {resource for resource, code in requests if code in ("401", "403")} == set()
    assert {"rljobs", "pods", "leases", "tokenreviews"} <= {resource for resource, _ in requests}


def test_its_metrics_are_for_those_who_may_read_them(command_line: CommandLine, operator: OperatorProcess) -> None:
    reader = token_of(command_line, "prometheus", "team-b")
    eventually(lambda: "rljob_operator_leader 1.0" in scrape(operator, reader), "a leader")
    for token, code in [("", 401), ("wrong", 401), (token_of(command_line, "default", "team-a"), 403)]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            scrape(operator, token)
        assert refused.value.code == code


def scrape(operator: OperatorProcess, token: str) -> str:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate is self-signed
    request = urllib.request.Request(f"https://127.0.0.1:{operator.metrics_port}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        return str(answer.read().decode())


def requests_by_resource_and_code(metrics: str) -> set[tuple[str, str]]:
    lines = [line for line in metrics.splitlines() if line.startswith("rljob_operator_api_requests_total{")]
    labels = [dict(re.findall(r'(\w+)="([^"]*)"', line)) for line in lines]
    return {(found["resource"], found["code"]) for found in labels}


def labels_of_node(command_line: CommandLine) -> Object:
    labels: Object = command_line.get("node", "gpu-node")["metadata"].get("labels", {})
    return labels


def token_of(command_line: CommandLine, account: str, namespace: str) -> str:
    """A token of the ServiceAccount, which is made where there is none."""
    metadata = {"name": account, "namespace": namespace}
    command_line.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    return command_line.kubectl("create", "token", account, "-n", namespace).strip()
