"""Refusals of an API server, as it words them, are one sentence each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rljob_client.api_errors import (
    AccessDenied,
    KubernetesError,
    NoCluster,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectRefused,
    refusal,
)
from rljob_client.api_server import ApiServer

IN_NAMESPACE = 'in API group "rljob.dev" in the namespace "a"'


def body(message: str, reason: str = "", **details: Any) -> bytes:
    return json.dumps({"kind": "Status", "message": message, "reason": reason, "details": details}).encode()


@pytest.mark.parametrize(
    ("status", "answer", "kind", "sentence"),
    [
        (
            401,
            body("Unauthorized"),
            AccessDenied,
            "expected credentials that the cluster accepts, found: Unauthorized; log",
        ),
        (
            403,
            body(f'rljobs.rljob.dev is forbidden: User "ann" cannot list resource "rljobs" {IN_NAMESPACE}'),
            AccessDenied,
            "expected permission, found: rljobs.rljob.dev is forbidden",
        ),
        (
            403,
            body(
                "rljobs.rljob.dev \"x\" is forbidden: ValidatingAdmissionPolicy 'p' denied request: spec.env: refused"
            ),
            ObjectRefused,
            "spec.env: refused",
        ),
        (
            403,
            body('admission webhook "fits.rljob.dev" denied the request: spec: the job does not fit'),
            ObjectRefused,
            "spec: the job does not fit",
        ),
        (
            404,
            b"404 page not found\n",
            KubernetesError,
            "expected a cluster with RLJob's CRDs, found: 404 page not found; ",
        ),
        (
            404,
            body("the server could not find the requested resource"),
            KubernetesError,
            "expected a cluster with RLJob",
        ),
        (404, body('namespaces "a" not found', kind="namespaces", name="a"), ObjectMissing, "expected a namespace"),
        (404, body('rljobs.rljob.dev "x" not found', name="x"), ObjectMissing, 'rljobs.rljob.dev "x" not found; check'),
        (
            409,
            body('rljobs.rljob.dev "x" already exists', "AlreadyExists", name="x"),
            ObjectExists,
            "expected a free name",
        ),
        (
            409,
            body("the object has been modified", "Conflict", name="x"),
            ObjectChanged,
            "expected an unchanged object",
        ),
        (
            400,
            body('RLJob cannot be handled as a RLJob: strict decoding error: unknown field "spec.stepz"'),
            ObjectRefused,
            'unknown field "spec.stepz"',
        ),
        (503, b"", NoCluster, "expected a cluster that responds, found: HTTP status 503; repeat"),
    ],
)
def test_a_refusal_is_one_sentence(status: int, answer: bytes, kind: type[KubernetesError], sentence: str) -> None:
    error = refusal(status, answer)
    assert type(error) is kind
    assert str(error).startswith(sentence)
    assert "\n" not in str(error)


def test_the_problems_of_a_manifest_are_the_rules_own_words() -> None:
    causes = [
        {"field": "spec.gang", "message": 'Invalid value: "string": Volcano cannot schedule jobs that Kueue admits'},
        {"field": "spec.queueName", "message": "Invalid value: must be absent"},
        {"field": "spec.suspend", "message": "Invalid value: true: must be false"},
        {"field": "spec.model.uri", "message": 'Invalid value: "SmolLM2": should match'},
        {"field": "<nil>", "message": "Invalid value: null: some validation rules were not checked because …"},
    ]
    error = refusal(422, body("RLJob is invalid: spec.gang: …", causes=causes))
    assert isinstance(error, ObjectRefused)
    assert error.problems == (
        ("spec.gang", "Volcano cannot schedule jobs that Kueue admits"),
        ("spec.queueName", "must be absent"),
        ("spec.suspend", "Invalid value: true: must be false"),
        ("spec.model.uri", 'Invalid value: "SmolLM2": should match'),
    )


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts: [{name: here, context: {cluster: here, user: me, namespace: research}}]
clusters: [{name: here, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: me, user: {}}]
"""


def test_an_api_server_that_does_not_respond_is_named(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(KUBECONFIG)
    api = ApiServer(kubeconfig=str(tmp_path / "config"))
    assert api.namespace == "research"
    with pytest.raises(NoCluster, match=r"responds, found at http://127\.0\.0\.1:9: .*refused; start it, or select"):
        api.get("rljobs", "digits")


@pytest.mark.parametrize(
    ("text", "context", "message"),
    [
        (None, None, "expected a kubeconfig with a current context, found .*config: "),
        (KUBECONFIG, "there", "expected a kubeconfig with the context there, found .*there"),
        (KUBECONFIG.replace("current-context: here", ""), None, "with a current context, found .*current-context"),
        ("{", None, "expected a kubeconfig with a current context, found "),
        ("", None, "expected a kubeconfig with a current context, found "),
        ("text", None, "expected a kubeconfig with a current context, found "),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_one_sentence(
    text: str | None, context: str | None, message: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "config").write_text(text)
    with pytest.raises(NoCluster, match=message) as failure:
        ApiServer(context, kubeconfig=str(tmp_path / "config"))
    assert "\n" not in str(failure.value)


def test_a_pod_uses_the_kubeconfig_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(KUBECONFIG)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert ApiServer().namespace == "research"
    assert ApiServer(namespace="other").namespace == "other"


def test_commands_that_need_no_cluster_do_not_import_its_client() -> None:
    imports = "import rljob_client.cli, rljob_client.kubectl_plugin, rljob_client.plan_command"
    program = f"{imports}, sys; from rljob_client import app; print('kubernetes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
