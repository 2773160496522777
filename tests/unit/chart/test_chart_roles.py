"""The operator's rights: each has a reason, and every request is permitted."""

from __future__ import annotations

from collections import defaultdict

from rljob_operator.kube import resources
from rljob_operator.kube.resources import Resource
from rljob_operator.names import SHARED_ACCOUNT
from tests.unit.chart.conftest import Object, Render, is_hook, of_kind, the

WHY = {
    "rljobs": (
        "list watch patch delete",
        "watched; the finalizer is patched; a time to live ends in a delete",
    ),
    "rljobs/status": ("patch", "the one status write"),
    "rljobs/finalizers": ("update", "owner references that block the owner's deletion"),
    "stepreports": ("get list watch create", "made for each job and watched"),
    "stepreports/status": ("patch", "the decision about a restart in place; granted on to the job's own controller"),
    "pods": ("get list watch create delete", "what a job is"),
    "services": ("create get patch", "the address of the Ray head"),
    "configmaps": ("create get patch", "manifest and memory plan"),
    "serviceaccounts": ("create get patch", "the job's identity"),
    "roles": ("create get patch", "its rights: its own StepReport"),
    "rolebindings": ("create get patch", "the same"),
    "networkpolicies": ("create get patch", "jobs.networkPolicy"),
    "podgroups": ("create get patch", "gangs by Volcano"),
    "workloads": ("delete", "pods that Kueue has not admitted can go"),
    "secrets": ("create", "the Ray token"),
    "persistentvolumeclaims": ("create get", "the checkpoints' claim; one that exists is never changed"),
    "events": ("create patch", "a repeated Event is counted in the first"),
    "nodes": ("list watch patch", "GPU-free nodes are found and labelled"),
    "tokenreviews": ("create", "who asks for metrics"),
    "subjectaccessreviews": ("create", "and whether they may"),
    "endpointslices": ("get", "the ports of the API server, in NetworkPolicies"),
    "leases": ("create get update", "one replica leads"),
}
"""Verbs and reason, by resource."""


def test_the_operator_has_exactly_the_expected_rights(render: Render) -> None:
    assert granted(render()) == {resource: set(verbs.split()) for resource, (verbs, _) in WHY.items()}


def test_no_right_has_a_wildcard(render: Render) -> None:
    for rule in rules(render()):
        assert "*" not in [*rule.get("apiGroups", []), *rule.get("resources", []), *rule["verbs"]]


def test_the_operator_has_rights_on_every_kind_that_it_uses(render: Render) -> None:
    known = {found.plural for found in vars(resources).values() if isinstance(found, Resource)}
    known |= {found.plural for found in resources._BY_KIND.values()}
    assert known <= set(granted(render()))


def test_restricted_to_namespaces_it_has_no_rights_on_jobs_elsewhere(render: Render) -> None:
    objects = render(namespaces=["team-a", "team-b"])
    cluster_wide = {name for role in operator_roles(objects, "ClusterRole") for name in resources_of(role)}
    assert cluster_wide == {"nodes", "tokenreviews", "subjectaccessreviews"}
    roles = {role["metadata"]["namespace"]: resources_of(role) for role in operator_roles(objects, "Role")}
    assert roles["team-a"] == roles["team-b"] >= {"rljobs", "pods", "secrets"}
    assert roles["rljob-system"] == {"leases"}
    assert roles["default"] == {"endpointslices"}


def test_with_the_ports_given_nothing_is_read_in_the_namespace_default(render: Render) -> None:
    for values in ({"networkPolicy": {"apiServerPorts": [6443]}}, {"jobs": {"networkPolicy": {"enabled": False}}}):
        assert "endpointslices" not in granted(render(**values))


def test_the_owners_of_labelled_pods_are_only_read(render: Render) -> None:
    more = granted(render(podDiagnosis={"enabled": True}))
    added = {resource: verbs for resource, verbs in more.items() if resource not in WHY}
    assert added == {plural: {"get"} for plural in resources.WORKLOAD_OWNERS.values()}


def test_without_node_labelling_nodes_are_only_read(render: Render) -> None:
    assert granted(render(nodes={"label": False}))["nodes"] == {"list", "watch"}


def test_a_namespaced_install_needs_no_cluster_rights(render: Render) -> None:
    objects = render(namespaces=["team-a"], nodes={"watch": False}, metrics={"authentication": False})
    assert operator_roles(objects, "ClusterRole") == []
    assert "nodes" not in granted(objects)


def test_without_metrics_authentication_nobody_is_reviewed(render: Render) -> None:
    assert not {"tokenreviews", "subjectaccessreviews"} & set(granted(render(metrics={"authentication": False})))


def granted(objects: list[Object]) -> dict[str, set[str]]:
    """Verbs by resource, of all roles that are bound to the operator."""
    found: dict[str, set[str]] = defaultdict(set)
    for rule in rules(objects):
        for resource in rule["resources"]:
            found[resource] |= set(rule["verbs"])
    return dict(found)


def rules(objects: list[Object]) -> list[Object]:
    return [
        rule for kind in ("ClusterRole", "Role") for role in operator_roles(objects, kind) for rule in role["rules"]
    ]


def operator_roles(objects: list[Object], kind: str) -> list[Object]:
    """Roles that a binding gives to the operator's ServiceAccount."""
    bound = {
        (binding["metadata"].get("namespace"), binding["roleRef"]["name"])
        for binding in of_kind(objects, f"{kind}Binding")
        if not is_hook(binding) and binding["subjects"][0]["name"] == "rljob-operator"
    }
    roles = [role for role in of_kind(objects, kind) if not is_hook(role)]
    return [role for role in roles if (role["metadata"].get("namespace"), role["metadata"]["name"]) in bound]


def resources_of(role: Object) -> set[str]:
    return {resource for rule in role["rules"] for resource in rule["resources"]}


def test_jobs_share_an_account_only_beside_the_policy_for_it(render: Render) -> None:
    for enabled in (True, False):
        objects = render(stepReportPolicy={"enabled": enabled})
        (container,) = the(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
        variables = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert variables["RLJOB_OPERATOR_SHARED_ACCOUNT"] == str(enabled).lower()
        policies = of_kind(objects, "ValidatingAdmissionPolicy") + of_kind(objects, "ValidatingAdmissionPolicyBinding")
        assert len(policies) == (2 if enabled else 0)
    policy = the(render(), "ValidatingAdmissionPolicy")["spec"]
    assert policy["failurePolicy"] == "Fail"
    assert f":{SHARED_ACCOUNT}" in policy["matchConditions"][0]["expression"]
    assert the(render(), "ValidatingAdmissionPolicyBinding")["spec"]["validationActions"] == ["Deny"]
