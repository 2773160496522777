"""Effects of installs, upgrades and uninstalls of the chart on a cluster, its jobs and everybody's permissions."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rljob_testing.patience import eventually
from tests.integration.chart.conftest import CHART, NAMES, RELEASE, RELEASE_NAMESPACE, CommandLine, Install, Object, job

FINALIZER = "rljob.dev/pods-end-first"
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())["admissionPolicy"]
FURTHER_SETTINGS = {
    "commonLabels": {"team": "platform", "app.kubernetes.io/part-of": "training"},
    "commonAnnotations": {"argocd.argoproj.io/sync-options": "Prune=false"},
    "crds": {"annotations": {"owner": "platform"}},
    "affinity": {"nodeAffinity": {}},
    "tolerations": [{"key": "system", "operator": "Exists"}],
    "dnsPolicy": "None",
    "dnsConfig": {"nameservers": ["10.0.0.10"], "options": [{"name": "ndots", "value": "2"}]},
    "extraArgs": ["--stale-watch-seconds=120"],
    "extraEnv": [{"name": "SSL_CERT_FILE", "value": "/etc/ca/ca.crt"}],
    "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
    "metrics": {"tls": {"secretName": "certificate"}},
}
EVERYTHING_ALLOWED = {"enabled": True} | {name: ["*"] for name in DEFAULTS if name.startswith("allowed")}


def test_jobs_and_crds_alone_outlive_an_uninstall_and_meet_the_next_install(
    command_line: CommandLine, installed: Install
) -> None:
    installed("--set", "replicaCount=2")

    def pods() -> list[Object]:
        selector = "app.kubernetes.io/instance=rljob"
        found: list[Object] = command_line.get("pods", "-n", RELEASE_NAMESPACE, "-l", selector)["items"]
        return found

    eventually(lambda: len(pods()) == 2, "both pods to be made in a restricted namespace")
    assert all(pod["spec"]["serviceAccountName"] == NAMES for pod in pods())
    command_line.apply(job("kept", "team-a"))
    uid = command_line.get("rljob", "kept", "-n", "team-a")["metadata"]["uid"]

    command_line.helm("uninstall", RELEASE, "--no-hooks")
    kinds = "clusterroles,clusterrolebindings,roles,rolebindings,serviceaccounts,deployments,services,configmaps"
    selector = "app.kubernetes.io/managed-by=Helm"
    eventually(lambda: command_line.get(kinds, "-A", "-l", selector)["items"] == [], "nothing to be left")

    command_line.helm("install", RELEASE, str(CHART))
    assert command_line.get("rljob", "kept", "-n", "team-a")["metadata"]["uid"] == uid


def test_the_operators_network_policy_has_the_ports_of_the_api_server(
    command_line: CommandLine, installed: Install
) -> None:
    """An API server that listens on 127.0.0.1, like this one, does not maintain the object itself."""
    endpoints = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "kubernetes", "namespace": "default"},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.0.0.1"]}],
        "ports": [{"name": "https", "port": 16443, "protocol": "TCP"}],
    }
    command_line.apply(endpoints)
    try:
        installed("--set", "replicaCount=0")
        policy = command_line.get("networkpolicy", NAMES, "-n", RELEASE_NAMESPACE)["spec"]
    finally:
        command_line.kubectl("delete", "endpointslice", "kubernetes", "-n", "default")
    assert {port["port"] for port in policy["egress"][1]["ports"]} == {443, 16443}


VALUES = (
    (),
    ("--set", "replicaCount=3,networkPolicy.enabled=false,dashboard.enabled=true"),
    ("--set", "namespaces={team-a,team-b},nodes.watch=false,metrics.authentication=false"),
    ("--set", "metrics.readers[0].serviceAccount=prometheus,metrics.readers[0].namespace=team-a"),
    ("--set", "admissionPolicy.enabled=true,admissionPolicy.namespaceSelector.matchLabels.tenant=yes"),
    ("--set-json", f"admissionPolicy={json.dumps(EVERYTHING_ALLOWED)}"),
    ("--set-json", json.dumps(FURTHER_SETTINGS)),
)


def test_the_api_server_takes_every_object_without_a_warning(command_line: CommandLine) -> None:
    for values in VALUES:
        manifests = command_line.helm("template", RELEASE, str(CHART), *values)
        result = subprocess.run(
            [command_line.binaries / "kubectl", "apply", "--server-side", "--dry-run=server", "--filename", "-"],
            env=command_line.environment,
            input=manifests,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert result.returncode == 0, result.stderr
        assert "Warning" not in result.stderr
        assert len(result.stdout.splitlines()) == len([found for found in yaml.safe_load_all(manifests) if found])


def test_an_upgrade_renews_the_crds_and_leaves_the_jobs(
    command_line: CommandLine, installed: Install, tmp_path: Path
) -> None:
    installed(chart=chart_of_an_older_api(tmp_path))
    assert "Reward" not in printer_columns(command_line)
    command_line.apply(job("kept", "team-a", finalizers=[FINALIZER]))
    before = command_line.get("rljob", "kept", "-n", "team-a")

    command_line.helm("upgrade", RELEASE, str(CHART), "--set", "replicaCount=2")

    assert "Reward" in printer_columns(command_line)
    after = command_line.get("rljob", "kept", "-n", "team-a")
    assert (after["metadata"]["uid"], after["spec"]) == (before["metadata"]["uid"], before["spec"])
    assert after["metadata"]["finalizers"] == [FINALIZER]


def test_an_upgrade_keeps_the_certificate_of_the_webhook(command_line: CommandLine, installed: Install) -> None:
    def certificate() -> Object:
        found: Object = command_line.get("secret", f"{NAMES}-admission", "-n", RELEASE_NAMESPACE)["data"]
        return found

    installed("--set", "replicaCount=0")
    before = certificate()
    command_line.helm("upgrade", RELEASE, str(CHART), "--set", "replicaCount=0")
    assert certificate() == before
    name = f"{RELEASE_NAMESPACE}-{NAMES}-fits"
    [webhook] = command_line.get("validatingwebhookconfiguration", name)["webhooks"]
    assert webhook["clientConfig"]["caBundle"] == before["ca.crt"]


def test_without_keep_the_crds_go_with_the_release(command_line: CommandLine, installed: Install) -> None:
    installed("--set", "crds.keep=false")
    command_line.helm("uninstall", RELEASE, "--no-hooks")
    eventually(lambda: not command_line.serves("rljobs"), "the API server to know no RLJobs")


def chart_of_an_older_api(directory: Path) -> Path:
    """The chart with a CRD that has fewer printer columns."""
    chart = directory / CHART.name
    shutil.copytree(CHART, chart)
    path = chart / "files" / "crds" / "rljobs.rljob.dev.yaml"
    definition = yaml.safe_load(path.read_text())
    definition["spec"]["versions"][0]["additionalPrinterColumns"] = []
    path.write_text(yaml.safe_dump(definition))
    return chart


def printer_columns(command_line: CommandLine) -> set[str]:
    version = command_line.get("crd", "rljobs.rljob.dev")["spec"]["versions"][0]
    return {column["name"] for column in version.get("additionalPrinterColumns", [])}


OPERATOR = f"system:serviceaccount:{RELEASE_NAMESPACE}:{NAMES}"


@pytest.fixture(scope="module")
def everywhere(command_line: CommandLine) -> Iterator[CommandLine]:
    command_line.helm("install", RELEASE, str(CHART))
    eventually(lambda: command_line.may(OPERATOR, "create", "pods", "team-b"), "the operator's rights to arrive")
    yield command_line
    command_line.helm("uninstall", RELEASE, "--no-hooks")


def test_the_operator_may_run_jobs_in_every_namespace(everywhere: CommandLine) -> None:
    for namespace in ("team-a", "team-b"):
        assert everywhere.may(OPERATOR, "create", "pods", namespace)
        assert everywhere.may(OPERATOR, "patch", "rljobs.rljob.dev/status", namespace)
        assert not everywhere.may(OPERATOR, "get", "secrets", namespace)


def test_the_operator_can_grant_a_job_its_step_report_and_nothing_more(everywhere: CommandLine) -> None:
    own = {
        "apiGroups": ["rljob.dev"],
        "resources": ["stepreports/status"],
        "resourceNames": ["x"],
        "verbs": ["patch"],
    }
    everywhere.kubectl(*APPLY, stdin=yaml.safe_dump(role(own)))
    secrets = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}
    with pytest.raises(AssertionError, match="attempting to grant RBAC permissions not currently held"):
        everywhere.kubectl(*APPLY, stdin=yaml.safe_dump(role(secrets)))


def test_editors_of_a_namespace_edit_its_jobs_and_viewers_see_them(everywhere: CommandLine) -> None:
    for user in ("view", "edit"):
        everywhere.apply(binding(user))
    eventually(lambda: everywhere.may("edit", "create", "rljobs.rljob.dev", "team-a"), "the editor's rights to arrive")
    assert not everywhere.may("edit", "create", "rljobs.rljob.dev", "team-b")
    assert not everywhere.may("edit", "patch", "rljobs.rljob.dev/status", "team-a")
    eventually(lambda: everywhere.may("view", "watch", "rljobs.rljob.dev", "team-a"), "the viewer's rights to arrive")
    assert not everywhere.may("view", "create", "rljobs.rljob.dev", "team-a")


def test_held_to_one_namespace_the_operator_touches_no_other(everywhere: CommandLine) -> None:
    everywhere.helm("upgrade", RELEASE, str(CHART), "--set", "namespaces={team-a}")
    eventually(lambda: everywhere.may(OPERATOR, "create", "pods", "team-a"), "the rights in the namespace to arrive")
    eventually(lambda: not everywhere.may(OPERATOR, "create", "secrets", "team-b"), "the rights elsewhere to go")
    for verb, resource in [("create", "pods"), ("list", "pods"), ("list", "rljobs.rljob.dev")]:
        assert not everywhere.may(OPERATOR, verb, resource, "team-b")


APPLY = ("apply", "--server-side", "--filename", "-", "--as", OPERATOR)


def role(rule: Object) -> Object:
    metadata = {"name": "granted", "namespace": "team-a"}
    return {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata, "rules": [rule]}


def binding(user: str) -> Object:
    """Kubernetes' own ClusterRole of that name, in team-a, for a user of that name."""
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": user, "namespace": "team-a"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": user},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }
