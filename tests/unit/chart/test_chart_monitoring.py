"""Alerts and dashboard use existing metrics, and the docs explain each alert."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from rljob_operator.metrics import REGISTRY
from tests.unit.chart.conftest import CHART, Object, Render, of_kind, the

DOCS = CHART.parents[1] / "docs"


@pytest.fixture(scope="module")
def alerts(render: Render) -> list[Object]:
    rule = the(render(prometheusRule={"enabled": True}), "PrometheusRule")
    return [alert for group in rule["spec"]["groups"] for alert in group["rules"]]


def test_alerts_and_dashboard_ask_only_for_metrics_that_the_operator_has(alerts: list[Object]) -> None:
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    asked = [alert["expr"] for alert in alerts]
    asked += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    wanted = {name for expression in asked for name in re.findall(r"\b(?:rljob_operator|process)_\w+", expression)}
    assert wanted <= set(metric_names())
    assert len(wanted) > 8


def test_every_alert_has_a_severity_and_an_action(alerts: list[Object]) -> None:
    headings = re.findall(r"^## (\w+)$", (DOCS / "alerts.md").read_text(), re.MULTILINE)
    assert [alert["alert"] for alert in alerts] == headings
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"]["summary"]
        assert alert["annotations"]["description"]
        assert alert["annotations"]["runbook_url"] == f"docs/alerts.md#{alert['alert'].lower()}"


def test_alerts_select_the_metrics_of_their_release(alerts: list[Object]) -> None:
    for alert in alerts:
        assert 'namespace="rljob-system",service="rljob-operator-metrics"' in alert["expr"]


def test_prometheus_uses_its_own_token_by_default(render: Render) -> None:
    [endpoint] = the(render(serviceMonitor={"enabled": True}), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["bearerTokenFile"] == "/var/run/secrets/kubernetes.io/serviceaccount/token"
    secret = {"credentials": {"name": "prometheus-token", "key": "token"}}
    [endpoint] = the(render(serviceMonitor={"enabled": True, "authorization": secret}), "ServiceMonitor")["spec"][
        "endpoints"
    ]
    assert endpoint["authorization"] == secret
    assert "bearerTokenFile" not in endpoint


def test_grafana_gets_the_dashboard_whole_and_only_on_request(render: Render) -> None:
    assert of_kind(render(), "ConfigMap") == []
    config_map = the(render(dashboard={"enabled": True}), "ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["rljob.json"])["panels"]


def metric_names() -> Iterator[str]:
    """As Prometheus stores them."""
    for family in REGISTRY.collect():
        yield family.name
        if family.type == "counter":
            yield f"{family.name}_total"
        if family.type == "histogram":
            yield from (f"{family.name}_{part}" for part in ("bucket", "sum", "count"))
