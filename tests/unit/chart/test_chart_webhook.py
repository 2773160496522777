"""The admission webhook of the chart: its certificate, and the requests that the API server sends to it."""

from __future__ import annotations

from base64 import b64decode
from datetime import UTC, datetime, timedelta

from cryptography import x509

from tests.unit.chart.conftest import Object, Render, environment, of_kind, only_object, operator_container

KINDS = ("ValidatingWebhookConfiguration", "Secret", "Service")


def webhook_of(objects: list[Object]) -> Object:
    [webhook] = only_object(objects, "ValidatingWebhookConfiguration")["webhooks"]
    found: Object = webhook
    return found


def test_the_api_server_verifies_the_certificate_that_the_chart_makes(render: Render) -> None:
    objects = render()
    secret, client = only_object(objects, "Secret", "-admission"), webhook_of(objects)["clientConfig"]
    assert (secret["type"], client["caBundle"]) == ("kubernetes.io/tls", secret["data"]["ca.crt"])
    files = ("ca.crt", "tls.crt")
    authority, served = (x509.load_pem_x509_certificate(b64decode(secret["data"][file])) for file in files)
    served.verify_directly_issued_by(authority)
    names = served.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    service = only_object(objects, "Service", "-admission")["metadata"]
    assert names.get_values_for_type(x509.DNSName) == [f"{service['name']}.{service['namespace']}.svc"]
    assert (client["service"]["name"], client["service"]["namespace"]) == (service["name"], service["namespace"])
    assert served.not_valid_after_utc > datetime.now(UTC) + timedelta(days=3640)
    [volume] = only_object(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert volume["secret"] == {"secretName": secret["metadata"]["name"]}
    [mount] = operator_container(objects)["volumeMounts"]
    assert mount["mountPath"] == environment(objects)["RLJOB_OPERATOR_ADMISSION_CERTIFICATE"]


def test_a_webhook_without_an_answer_keeps_nobody_from_anything(render: Render) -> None:
    webhook = webhook_of(render(admissionWebhook={"timeoutSeconds": 3}))
    assert (webhook["failurePolicy"], webhook["sideEffects"], webhook["timeoutSeconds"]) == ("Ignore", "None", 3)
    [rule] = webhook["rules"]
    assert (rule["resources"], rule["operations"]) == (["rljobs"], ["CREATE", "UPDATE"])


def test_only_jobs_that_the_operator_watches_are_sent(render: Render) -> None:
    assert "namespaceSelector" not in webhook_of(render())
    [wanted] = webhook_of(render(namespaces=["team-a"]))["namespaceSelector"]["matchExpressions"]
    assert wanted == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["team-a"]}


def test_a_secret_of_cert_manager_replaces_the_charts(render: Render) -> None:
    inject = {"cert-manager.io/inject-ca-from": "rljob-system/admission"}
    objects = render(admissionWebhook={"tls": {"secretName": "own"}, "annotations": inject})
    assert of_kind(objects, "Secret") == []
    assert "caBundle" not in webhook_of(objects)["clientConfig"]
    assert only_object(objects, "ValidatingWebhookConfiguration")["metadata"]["annotations"] == inject
    [volume] = only_object(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert volume["secret"] == {"secretName": "own"}
    bundle = {"tls": {"secretName": "own", "caBundle": "Q0E="}}
    assert webhook_of(render(admissionWebhook=bundle))["clientConfig"]["caBundle"] == "Q0E="


def test_one_value_turns_it_off_and_without_nodes_there_is_none(render: Render) -> None:
    for values in ({"admissionWebhook": {"enabled": False}}, {"nodes": {"watch": False}}):
        objects = render(metrics={"enabled": False}, **values)
        assert [found for kind in KINDS for found in of_kind(objects, kind)] == []
        assert "RLJOB_OPERATOR_ADMISSION_CERTIFICATE" not in environment(objects)
        assert "volumes" not in only_object(objects, "Deployment")["spec"]["template"]["spec"]
