"""Address and credentials of the API server, from a service account or a kubeconfig."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from kubernetes.aio.config import incluster_config

from rljob_operator.kube import client
from rljob_operator.kube.client import Connection, NoConnection, connect


def connected() -> Connection:
    return asyncio.run(connect())


def token(connection: Connection) -> str | None:
    return asyncio.run(connection.configuration.get_api_key_with_prefix("BearerToken"))


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory in place of the one that the kubelet mounts, and in place of the home directory."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(client, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    return tmp_path


def write_kubeconfig(path: Path, user: dict[str, Any]) -> None:
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "ops"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://api.example:6443/"}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(content))


def test_a_kubeconfig_with_a_token(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = account / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(NoConnection, match="kubeconfig"):
        connected()
    write_kubeconfig(path, {"token": "t0ken"})
    found = connected()
    assert (found.configuration.host, found.namespace) == ("https://api.example:6443", "ops")
    assert token(found) == "Bearer t0ken"
    assert "t0ken" not in repr(found)


def test_the_program_of_a_kubeconfig_runs_again(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its token expires, and not for each request."""
    program = account / "program"
    program.write_text(
        f"""#!/bin/sh
echo >> {account}/runs
number=$(wc -l < {account}/runs)
echo '{{"kind": "ExecCredential", "apiVersion": "client.authentication.k8s.io/v1", "status": {{"token": "'$number'"}}}}'
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("KUBECONFIG", str(account / "kubeconfig"))
    execution = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program), "interactiveMode": "Never"}
    write_kubeconfig(account / "kubeconfig", {"exec": execution})
    found = connected()
    assert [token(found), token(found)] == ["Bearer 1", "Bearer 1"]
    monkeypatch.setattr(client, "_TOKEN_SECONDS", 0.0)
    assert token(found) == "Bearer 2"


def test_in_a_pod_the_latest_token_is_used(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (account / "token").write_text("first")
    (account / "ca.crt").write_text("certificates")
    (account / "namespace").write_text("rljob-system")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    found = connected()
    assert (found.configuration.host, found.namespace) == ("https://[fd00::1]:443", "rljob-system")
    assert found.configuration.ssl_ca_cert == str(account / "ca.crt")
    assert (token(found) or "").lower() == "bearer first"
    (account / "token").write_text("second")
    later = datetime.datetime.now() + datetime.timedelta(seconds=61)
    clock = SimpleNamespace(datetime=SimpleNamespace(now=lambda: later), timedelta=datetime.timedelta)
    monkeypatch.setattr(incluster_config, "datetime", clock)
    assert (token(found) or "").lower() == "bearer second"


def test_without_either_it_says_what_to_set(account: Path) -> None:
    with pytest.raises(NoConnection, match="set KUBECONFIG"):
        connected()
