"""Permissions after the chart is installed: of the operator, its users, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from rljob_testing.operator.eventually import eventually
from tests.integration.chart.conftest import CHART, NAMES, RELEASE, RELEASE_NAMESPACE, CommandLine, Object

OPERATOR = f"system:serviceaccount:{RELEASE_NAMESPACE}:{NAMES}"


FORBIDDEN = (
    *("get secrets", "list secrets", "patch secrets", "list configmaps", "watch configmaps"),
    *("patch persistentvolumeclaims", "delete persistentvolumeclaims", "create pods/exec", "delete nodes"),
    *("update rljobs.rljob.dev", "create rljobs.rljob.dev"),
    *("impersonate users", "bind clusterroles", "escalate roles"),
)


@pytest.fixture(scope="module")
def everywhere(command_line: CommandLine) -> Iterator[CommandLine]:
    command_line.helm("install", RELEASE, str(CHART))
    eventually(lambda: command_line.may(OPERATOR, "create", "pods", "team-b"), "the operator's rights to arrive")
    yield command_line
    command_line.helm("uninstall", RELEASE, "--no-hooks")


def test_the_operator_may_run_jobs_everywhere_and_nothing_else(everywhere: CommandLine) -> None:
    for namespace in ("team-a", "team-b"):
        assert everywhere.may(OPERATOR, "create", "pods", namespace)
        assert everywhere.may(OPERATOR, "patch", "rljobs.rljob.dev/status", namespace)
    for what in FORBIDDEN:
        verb, resource = what.split()
        assert not everywhere.may(OPERATOR, verb, resource, "team-a"), what


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
