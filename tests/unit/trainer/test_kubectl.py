"""Failures of kubectl are one line with advice. The messages are in kubectl's wording."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_client.kubectl import ClusterError, Kubectl, explain_failure

NO_SERVER = (
    'E1127 12:36:29.637011   28340 memcache.go:265] "Unhandled Error" err="couldn\'t get current server API group list'
    ': Get \\"http://localhost:8080/api?timeout=32s\\": dial tcp 127.0.0.1:8080: connect: connection refused"\n'
) * 5 + "The connection to the server localhost:8080 was refused - did you specify the right host or port?\n"


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        (
            NO_SERVER,
            "expected a cluster that responds, found: The connection to the server localhost:8080 was refused - did "
            "you specify the right host or port?; start it, or select the cluster (kubectl config use-context NAME, "
            "KUBECONFIG)",
        ),
        (NO_SERVER.rpartition("The")[0], "expected a cluster that responds, found: E1127 "),
        (
            "Unable to connect to the server: dial tcp: lookup k8s on 10.0.0.2:53: no such host",
            "a cluster that responds",
        ),
        ("Error in configuration: context was not found for specified context: nope", "expected a context, found: "),
        ('error: context "nope" does not exist', "expected a context, found: "),
        ('error: error loading config file "/k": yaml: line 1: did not find expected node content', "a kubeconfig"),
        (
            'Error from server (Forbidden): rljobs.rljob.dev "sums" is forbidden: User "eve" cannot get resource',
            "expected permission, found: ",
        ),
        ("error: You must be logged in to the server (Unauthorized)", "expected credentials that the cluster accepts"),
        ("Please enter Username: error: EOF", "expected credentials that the cluster accepts"),
        ('error: the server doesn\'t have a resource type "rljob"', "expected a cluster with RLJob's CRDs"),
        ('Error from server (NotFound): namespaces "research" not found', "an existing one with -n"),
        (
            "Warning: deprecated\nerror: pods is invalid\nsecond line",
            "kubectl get rljob sums: error: pods is invalid",
        ),
        ("", "kubectl get rljob sums: no message"),
    ],
)
def test_a_failure_of_kubectl_is_one_line(stderr: str, line: str) -> None:
    found = explain_failure("get rljob sums", stderr)
    assert line in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (None, "expected kubectl in PATH, found none: install it"),
        ("#!/bin/sh\nread name || echo no user name >&2\nexit 1\n", "kubectl version: no user name"),
    ],
)
def test_without_a_working_kubectl_it_fails_at_once(
    program: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program:
        (tmp_path / "kubectl").write_text(program)
        (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError) as failure:
        Kubectl().run("version")
    assert str(failure.value) == message
