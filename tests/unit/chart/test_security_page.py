"""docs/security.md agrees with the chart: the operator's rights, and its ports."""

from __future__ import annotations

import re
from collections import defaultdict

from tests.unit.chart.conftest import CHART, Object, Render, of_kind, the

PAGE = (CHART.parents[1] / "docs" / "security.md").read_text()


def test_the_table_of_rights_is_that_of_the_chart(render: Render) -> None:
    documented = section("Rights of the operator")
    assert documented[2:] == [f"| {' | '.join(row)} |" for row in rights(render())]


def test_the_ports_of_the_operator_are_those_of_its_pod(render: Render) -> None:
    [container] = the(render(), "Deployment")["spec"]["template"]["spec"]["containers"]
    opened = {str(port["containerPort"]) for port in container["ports"]}
    assert opened == {row.split("|")[2].strip() for row in section("Ports") if row.startswith("| operator")}


def section(title: str) -> list[str]:
    """Lines of the first table below a heading."""
    [text] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return [line for line in text.splitlines() if line.startswith("|")]


def rights(objects: list[Object]) -> list[tuple[str, str, str, str]]:
    """Scope, API group, resources and verbs, of all roles for the operator; hooks and roles of people have others."""
    found: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for kind in ("ClusterRole", "Role"):
        bound = {
            (binding["metadata"].get("namespace"), binding["roleRef"]["name"])
            for binding in of_kind(objects, f"{kind}Binding")
            if binding["subjects"][0]["name"] == "rljob-operator"
        }
        for role in of_kind(objects, kind):
            namespace = role["metadata"].get("namespace")
            if (namespace, role["metadata"]["name"]) in bound:
                for rule in role["rules"]:
                    collect(found, rule, namespace or "cluster")
    by_verbs: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (scope, group, resource), verbs in sorted(found.items()):
        by_verbs[scope, group or "core", ", ".join(sorted(verbs))].append(f"`{resource}`")
    return [(scope, group, ", ".join(names), verbs) for (scope, group, verbs), names in sorted(by_verbs.items())]


def collect(found: dict[tuple[str, str, str], set[str]], rule: Object, scope: str) -> None:
    only = f" ({', '.join(rule['resourceNames'])})" if "resourceNames" in rule else ""
    for group in rule["apiGroups"]:
        for resource in rule["resources"]:
            found[scope, group, f"{resource}{only}"] |= set(rule["verbs"])
