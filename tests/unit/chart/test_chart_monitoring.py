"""Alerts and dashboard use existing metrics, and the docs explain each alert."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator

import pytest

from rljob_operator.metrics import REGISTRY
from rljob_operator.runtime import job_queue
from rljob_trainer.pods.job_metrics import JobMetrics
from tests.unit.chart.conftest import CHART, Object, Render, environment, of_kind, only_object, operator_container

DOCS = CHART.parents[1] / "docs"


@pytest.fixture(scope="module")
def alerts(render: Render) -> list[Object]:
    rule = only_object(render(prometheusRule={"enabled": True}), "PrometheusRule")
    return [alert for group in rule["spec"]["groups"] for alert in group["rules"]]


def test_alerts_and_dashboard_ask_only_for_metrics_that_the_operator_has(alerts: list[Object]) -> None:
    dashboard = json.loads((CHART / "files" / "dashboard.json").read_text())
    asked = [alert["expr"] for alert in alerts]
    asked += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    wanted = {
        name for expression in asked for name in re.findall(r"\b(?:rljob_operator|process|workqueue)_\w+", expression)
    }
    assert wanted <= set(metric_names())
    assert len(wanted) > 8


def test_alerts_are_explained_and_select_the_metrics_of_their_release(alerts: list[Object]) -> None:
    headings = re.findall(r"^## (\w+)$", (DOCS / "alerts.md").read_text(), re.MULTILINE)
    assert [alert["alert"] for alert in alerts] == headings
    for alert in alerts:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert alert["annotations"]["runbook_url"] == f"docs/alerts.md#{alert['alert'].lower()}"
        assert 'namespace="rljob-system",service="rljob-operator-metrics"' in alert["expr"]


def endpoint_of(objects: list[Object]) -> Object:
    [endpoint] = only_object(objects, "ServiceMonitor")["spec"]["endpoints"]
    found: Object = endpoint
    return found


def test_prometheus_never_sends_its_own_token(render: Render) -> None:
    objects = render(serviceMonitor={"enabled": True})
    assert "bearerTokenFile" not in endpoint_of(objects)
    credentials = endpoint_of(objects)["authorization"]["credentials"]
    secret = only_object(objects, "Secret", credentials["name"])
    assert secret["type"] == "kubernetes.io/service-account-token"
    account = secret["metadata"]["annotations"]["kubernetes.io/service-account.name"]
    [role] = [
        binding["roleRef"]["name"]
        for binding in of_kind(objects, "ClusterRoleBinding")
        if account in [subject["name"] for subject in binding["subjects"]]
    ]
    assert role.endswith("-metrics-reader")
    own = {"credentials": {"name": "prometheus-token", "key": "token"}}
    objects = render(serviceMonitor={"enabled": True, "authorization": own})
    assert endpoint_of(objects)["authorization"] == own
    assert "kubernetes.io/service-account-token" not in [secret["type"] for secret in of_kind(objects, "Secret")]


def test_metrics_are_scraped_over_tls_by_a_certificate_of_choice(render: Render) -> None:
    endpoint = endpoint_of(render(serviceMonitor={"enabled": True}))
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"insecureSkipVerify": True})
    without = render(serviceMonitor={"enabled": True}, metrics={"tls": {"enabled": False}})
    assert {"scheme", "tlsConfig"} & endpoint_of(without).keys() == set()
    objects = render(serviceMonitor={"enabled": True}, metrics={"tls": {"secretName": "certificate"}})
    assert endpoint_of(objects)["tlsConfig"] == {
        "serverName": "rljob-operator-metrics.rljob-system.svc",
        "ca": {"secret": {"name": "certificate", "key": "ca.crt"}},
    }
    mount, _ = operator_container(objects)["volumeMounts"]
    volume, _ = only_object(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert (volume["name"], volume["secret"]["secretName"]) == (mount["name"], "certificate")
    assert environment(objects)["RLJOB_OPERATOR_METRICS_CERTIFICATE"] == mount["mountPath"]


def test_the_dashboard_of_a_job_asks_only_for_metrics_that_a_job_has() -> None:
    dashboard = json.loads((CHART / "files" / "job-dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    wanted = {name for expression in asked for name in re.findall(r"\brljob_job_\w+", expression)}
    families = list(JobMetrics("sums", 1).registry.collect())
    had = {f"{each.name}_total" if each.type == "counter" else each.name for each in families}
    assert wanted <= had
    page = (DOCS / "observe.md").read_text()
    assert had == set(re.findall(r"`(rljob_job_\w+)`", page)), "the page lists all"


def test_prometheus_scrapes_controllers_with_a_token_of_which_pods_have_the_digest(render: Render) -> None:
    objects = render(podMonitor={"enabled": True}, jobs={"metrics": {"enabled": True}}, namespaces=["research"])
    monitor = only_object(objects, "PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"] == {
        "app.kubernetes.io/managed-by": "rljob-operator",
        "rljob.dev/role": "controller",
    }
    assert monitor["namespaceSelector"] == {"matchNames": ["research"]}
    [endpoint] = monitor["podMetricsEndpoints"]
    credentials = endpoint["authorization"]["credentials"]
    secret = only_object(objects, "Secret", credentials["name"])
    token, digest = (base64.b64decode(secret["data"][name]) for name in (credentials["key"], "sha256"))
    assert len(token) == 48
    assert hashlib.sha256(token).hexdigest() == digest.decode()
    variables = {each["name"]: each for each in operator_container(objects)["env"]}
    source = variables["RLJOB_OPERATOR_JOB_METRICS_TOKEN_SHA256"]["valueFrom"]["secretKeyRef"]
    assert source == {"name": credentials["name"], "key": "sha256"}
    peers = json.loads(variables["RLJOB_OPERATOR_JOB_METRICS_FROM"]["value"])
    assert peers == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "rljob-system"}}}]
    own = render(podMonitor={"enabled": True}, jobs={"metrics": {"enabled": True, "secretName": "mine"}})
    assert [each["metadata"]["name"] for each in of_kind(own, "Secret")] == [
        each["metadata"]["name"] for each in of_kind(render(), "Secret")
    ]
    assert only_object(own, "PodMonitor")["spec"]["namespaceSelector"] == {"any": True}
    assert only_object(own, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"] == {
        "name": "mine",
        "key": "token",
    }


def test_grafana_gets_the_dashboard_whole_and_only_on_request(render: Render) -> None:
    assert of_kind(render(), "ConfigMap") == []
    config_map = only_object(render(dashboard={"enabled": True}), "ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["rljob.json"])["panels"]
    assert json.loads(config_map["data"]["rljob-job.json"])["panels"]


def metric_names() -> Iterator[str]:
    """Names of the metrics in Prometheus."""
    job_queue.JobQueue()
    for family in REGISTRY.collect():
        yield family.name
        if family.type == "counter":
            yield f"{family.name}_total"
        if family.type == "histogram":
            yield from (f"{family.name}_{part}" for part in ("bucket", "sum", "count"))
