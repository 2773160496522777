"""The operator with no other rights and settings than the chart gives it, and the hooks that remove it."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from rljob_cluster.control_plane import ControlPlane
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.manifests import node, node_status
from rljob_testing.operator.operator_process import OperatorProcess, kept_running, write_kubeconfig
from rljob_testing.patience import eventually
from tests.integration.chart.conftest import (
    CHART,
    NAMES,
    RELEASE,
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
    mounted = mount(command_line, f"{NAMES}-admission", tmp_path)
    settings |= {"admission_certificate": str(mounted), "admission_port": str(next(ports))}
    token = token_of(command_line, NAMES, RELEASE_NAMESPACE)
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", control_plane.url, token, control_plane.ca)
    operator = OperatorProcess(kubeconfig, tmp_path / "operator.log", next(ports), next(ports), settings)
    operator.start()
    with kept_running(operator, ResourceClient.from_kubeconfig(control_plane.kubeconfig), RELEASE_NAMESPACE):
        yield operator
    operator.stop()


def test_it_runs_a_job_and_shows_its_metrics_to_those_who_may_read_them(
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

    reader = token_of(command_line, "prometheus", "team-b")
    eventually(lambda: "rljob_operator_leader 1.0" in scrape(operator, reader), "a leader")
    for token, refusal in [("", 401), ("wrong", 401), (token_of(command_line, "default", "team-a"), 403)]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            scrape(operator, token)
        assert refused.value.code == refusal
    requests = requests_by_resource_and_code(scrape(operator, reader))
    assert {resource for resource, code in requests if code in ("401", "403")} == set()
    assert {"rljobs", "pods", "leases", "tokenreviews"} <= {resource for resource, _ in requests}


def test_it_serves_the_webhook_with_the_certificate_that_the_api_server_verifies(
    command_line: CommandLine, operator: OperatorProcess
) -> None:
    [webhook] = command_line.get("validatingwebhookconfiguration", f"{RELEASE_NAMESPACE}-{NAMES}-fits")["webhooks"]
    client = webhook["clientConfig"]
    context = ssl.create_default_context(cadata=b64decode(client["caBundle"]).decode())
    name = f"{client['service']['name']}.{client['service']['namespace']}.svc"
    address = "127.0.0.1", int(str(operator.settings["admission_port"]))

    def served() -> bool:
        with suppress(ConnectionRefusedError), socket.create_connection(address) as connection:
            return context.wrap_socket(connection, server_hostname=name).version() == "TLSv1.3"
        return False

    eventually(served, "the webhook to be served")


def mount(command_line: CommandLine, secret: str, directory: Path) -> Path:
    """A folder with the files of the Secret, as the kubelet mounts it."""
    mounted = directory / secret
    mounted.mkdir()
    for name, data in command_line.get("secret", secret, "-n", RELEASE_NAMESPACE)["data"].items():
        (mounted / name).write_bytes(b64decode(data))
    return mounted


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


OURS = "rljob.dev/pods-end-first"
FOREIGN = "example.com/keep"
CLAIM = "rljob.dev/operator"
INSTALLATION = f"{RELEASE_NAMESPACE}/{NAMES}"


def test_after_an_uninstall_jobs_can_be_deleted_without_an_operator(
    command_line: CommandLine, installed: Install, tmp_path: Path
) -> None:
    installed()
    command_line.apply(
        job("plain", "team-a", finalizers=[OURS]),
        job("kept-by-another", "team-b", finalizers=[OURS, FOREIGN], annotations={CLAIM: INSTALLATION, "mine": "kept"}),
        job("claimed", "team-a", annotations={CLAIM: INSTALLATION}),
        job("of-another-operator", "team-b", finalizers=[OURS], annotations={CLAIM: "a/b"}),
    )
    command_line.kubectl("delete", "rljob", "plain", "-n", "team-a", "--wait=false")

    uninstall(command_line, tmp_path)

    eventually(lambda: len(jobs(command_line, "team-a")) == 1, "the deleted job to be gone")
    other, of_another_operator = jobs(command_line, "team-b")
    assert other["metadata"]["finalizers"] == [FOREIGN]
    assert "deletionTimestamp" not in other["metadata"]
    assert other["metadata"]["annotations"].keys() & {CLAIM, "mine"} == {"mine"}
    assert of_another_operator["metadata"]["finalizers"] == [OURS]
    assert of_another_operator["metadata"]["annotations"][CLAIM] == "a/b"
    [claimed] = jobs(command_line, "team-a")
    assert CLAIM not in claimed["metadata"].get("annotations", {})
    eventually(lambda: left_in_release_namespace(command_line) == [], "the hook's own objects to be gone")


def test_held_to_a_namespace_the_hook_leaves_the_jobs_of_others_alone(
    command_line: CommandLine, installed: Install, tmp_path: Path
) -> None:
    installed("--set", "namespaces={team-a}")
    for namespace in ("team-a", "team-b"):
        command_line.apply(job("here", namespace, finalizers=[OURS]))

    uninstall(command_line, tmp_path)

    assert [found["metadata"].get("finalizers", []) for found in jobs(command_line, "team-a")] == [[]]
    assert [found["metadata"].get("finalizers", []) for found in jobs(command_line, "team-b")] == [[OURS]]


def test_the_readmes_commands_do_without_the_hook(command_line: CommandLine, installed: Install) -> None:
    installed()
    for namespace in ("team-a", "team-b"):
        command_line.apply(job("left", namespace, finalizers=[OURS], annotations={CLAIM: INSTALLATION, "mine": "kept"}))
    command_line.helm("uninstall", RELEASE, "--no-hooks")

    readme = (CHART / "README.md").read_text()
    [script] = [block for block in re.findall(r"^```console\n(.*?)^```$", readme, re.M | re.S) if "while" in block]
    path = f"{command_line.binaries}:{command_line.environment['PATH']}"
    subprocess.run(["bash", "-ec", script], env=command_line.environment | {"PATH": path}, check=True, timeout=240)

    for namespace in ("team-a", "team-b"):
        [left] = jobs(command_line, namespace)
        assert "finalizers" not in left["metadata"]
        assert left["metadata"]["annotations"].keys() & {CLAIM, "mine"} == {"mine"}


def test_without_remove_finalizers_there_is_no_hook(command_line: CommandLine) -> None:
    """The chart's README advises this for Argo CD, some versions of which run only Jobs as hooks."""
    assert "helm.sh/hook:" in command_line.helm("template", RELEASE, str(CHART))
    values = ("--set", "uninstall.removeFinalizers=false")
    assert "helm.sh/hook:" not in command_line.helm("template", RELEASE, str(CHART), *values)


def uninstall(command_line: CommandLine, directory: Path) -> None:
    """`helm uninstall`, with this test as kubelet: it runs the hook's container with its ServiceAccount's rights."""
    binaries, environment = command_line.binaries, command_line.environment
    command = [str(binaries / "helm"), "uninstall", RELEASE, "--namespace", RELEASE_NAMESPACE, "--timeout", "240s"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as helm:
        [pod] = eventually(lambda: hook_pods(command_line), "the pod of the hook")
        exit_code = run_container(command_line, pod, directory)
        assert exit_code == 0
        name = pod["metadata"]["name"]
        command_line.kubectl(
            *("patch", "pod", name, "-n", RELEASE_NAMESPACE, "--subresource=status", "--type=merge"),
            *("-p", '{"status": {"phase": "Succeeded"}}'),
        )
        _, errors = helm.communicate(timeout=240)
    assert helm.returncode == 0, errors


def run_container(command_line: CommandLine, pod: Object, directory: Path) -> int:
    [container] = pod["spec"]["containers"]
    command: list[str] = [*container["command"], *container.get("args", [])]
    assert command[0] == "python"
    account = pod["spec"]["serviceAccountName"]
    token = command_line.kubectl("create", "token", account, "-n", RELEASE_NAMESPACE).strip()
    kubeconfig = directory / "hook.kubeconfig"
    kubeconfig.write_text(kubeconfig_of_token(command_line, token))
    result = subprocess.run(
        [sys.executable, *command[1:]], env=command_line.environment | {"KUBECONFIG": str(kubeconfig)}, timeout=240
    )
    return result.returncode


def kubeconfig_of_token(command_line: CommandLine, token: str) -> str:
    config = yaml.safe_load(Path(command_line.environment["KUBECONFIG"]).read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    return yaml.safe_dump(config)


def hook_pods(command_line: CommandLine) -> list[Object]:
    selector = "app.kubernetes.io/component=remove-finalizers"
    pods: list[Object] = command_line.get("pods", "-n", RELEASE_NAMESPACE, "-l", selector)["items"]
    return [pod for pod in pods if pod["status"]["phase"] == "Pending"]  # and not that of an earlier test


def jobs(command_line: CommandLine, namespace: str) -> list[Object]:
    found: list[Object] = command_line.get("rljobs", "-n", namespace)["items"]
    return found


def left_in_release_namespace(command_line: CommandLine) -> list[str]:
    found = command_line.get("jobs,serviceaccounts,roles,rolebindings", "-n", RELEASE_NAMESPACE)["items"]
    return [one["metadata"]["name"] for one in found if one["metadata"]["name"].startswith(NAMES)]
