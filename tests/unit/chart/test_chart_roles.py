"""The operator's rights and ports: those that docs/security.md lists, and no more."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from rljob_operator.kube import resources
from rljob_operator.kube.resources import Resource
from tests.unit.chart.conftest import CHART, Object, Render, is_hook, of_kind, operator_container

PAGE = (CHART.parents[1] / "docs" / "security.md").read_text()


def table(title: str) -> list[str]:
    """Lines of the first table below a heading of the page."""
    [text] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return [line for line in text.splitlines() if line.startswith("|")]


def operator_rules(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Rules of the roles that are bound to the operator's ServiceAccount, with their namespace, or `cluster`."""
    for kind in ("ClusterRole", "Role"):
        bound = {
            (binding["metadata"].get("namespace"), binding["roleRef"]["name"])
            for binding in of_kind(objects, f"{kind}Binding")
            if not is_hook(binding) and binding["subjects"][0]["name"] == "rljob-operator"
        }
        for role in of_kind(objects, kind):
            namespace = role["metadata"].get("namespace")
            if not is_hook(role) and (namespace, role["metadata"]["name"]) in bound:
                yield from ((namespace or "cluster", rule) for rule in role["rules"])


def granted(objects: list[Object], scope: str | None = None) -> dict[str, set[str]]:
    """Verbs by resource."""
    found: dict[str, set[str]] = defaultdict(set)
    for where, rule in operator_rules(objects):
        for resource in rule["resources"] if scope in (None, where) else ():
            found[resource] |= set(rule["verbs"])
    return dict(found)


def test_the_page_lists_the_rights_of_the_operator(render: Render) -> None:
    found: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for scope, rule in operator_rules(render()):
        only = f" ({', '.join(rule['resourceNames'])})" if "resourceNames" in rule else ""
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found[scope, group, f"{resource}{only}"] |= set(rule["verbs"])
    by_verbs: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (scope, group, resource), verbs in sorted(found.items()):
        assert "*" not in {group, resource, *verbs}
        by_verbs[scope, group or "core", ", ".join(sorted(verbs))].append(f"`{resource}`")
    rows = [(scope, group, ", ".join(names), verbs) for (scope, group, verbs), names in sorted(by_verbs.items())]
    assert table("Rights of the operator")[2:] == [f"| {' | '.join(row)} |" for row in rows]


def test_the_page_lists_the_ports_of_the_operator(render: Render) -> None:
    opened = {str(port["containerPort"]) for port in operator_container(render())["ports"]}
    assert opened == {row.split("|")[2].strip() for row in table("Ports") if row.startswith("| operator")}


def test_the_operator_has_rights_on_every_kind_that_it_uses(render: Render) -> None:
    known = {found.plural for found in vars(resources).values() if isinstance(found, Resource)}
    known |= {found.plural for found in resources._RESOURCES_BY_KIND.values()}
    assert known <= set(granted(render()))


def test_restricted_to_namespaces_it_has_no_rights_on_jobs_elsewhere(render: Render) -> None:
    objects = render(namespaces=["team-a", "team-b"])
    assert granted(objects, "cluster").keys() == {"nodes", "tokenreviews", "subjectaccessreviews"}
    assert granted(objects, "team-a") == granted(objects, "team-b")
    assert granted(objects, "team-a").keys() >= {"rljobs", "pods", "secrets"}
    assert granted(objects, "rljob-system").keys() == {"leases"}
    assert granted(objects, "default").keys() == {"endpointslices"}
    fewer = render(namespaces=["team-a"], nodes={"watch": False}, metrics={"authentication": False})
    assert granted(fewer, "cluster") == {}, "a namespaced install needs no cluster rights"
    assert "nodes" not in granted(fewer)


@pytest.mark.parametrize(
    ("values", "changed"),
    [
        ({"podDiagnosis": {"enabled": True}}, {plural: {"get"} for plural in resources.WORKLOAD_OWNERS.values()}),
        ({"networkPolicy": {"apiServerPorts": [6443]}}, {"endpointslices": set()}),
        ({"jobs": {"networkPolicy": {"enabled": False}}}, {"endpointslices": set()}),
        ({"jobs": {"memoryProfiles": "Disabled"}}, {"memoryprofiles": set()}),
        ({"nodes": {"label": False}}, {"nodes": {"list", "watch"}}),
        ({"metrics": {"authentication": False}}, {"tokenreviews": set(), "subjectaccessreviews": set()}),
    ],
)
def test_a_value_changes_the_rights_that_it_needs(render: Render, values: Object, changed: dict[str, set[str]]) -> None:
    """`changed`: rights on the resources that differ from the default."""
    usual, found = granted(render()), granted(render(**values))
    names = usual.keys() | found.keys()
    differing = {name: found.get(name, set()) for name in names if usual.get(name) != found.get(name)}
    assert differing == changed


def test_people_read_and_delete_memory_profiles_and_do_not_write_them(render: Render) -> None:
    found = {
        role["metadata"]["name"].rpartition("-")[2]: set(rule["verbs"])
        for role in of_kind(render(), "ClusterRole")
        for rule in role["rules"]
        if "memoryprofiles" in rule.get("resources", ())
    }
    reading = {"get", "list", "watch"}
    writing = {"list", "watch", "create", "patch", "delete"}
    assert found == {"viewer": reading, "editor": reading | {"delete"}, "operator": writing}
