"""Address and credentials of the API server, from a service account or a kubeconfig."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
import yaml

from rljob_operator.kube.connection import NoConnection, connect


def test_a_kubeconfig_with_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(NoConnection, match="kubeconfig"):
        connect(tmp_path)
    content = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "ops"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://api.example:6443/"}}],
        "users": [{"name": "u", "user": {"token": "t0ken"}}],
    }
    path.write_text(yaml.safe_dump(content))
    found = connect()
    assert (found.server, found.namespace) == ("https://api.example:6443", "ops")
    assert found.headers() == {"Authorization": "Bearer t0ken"}
    assert "t0ken" not in repr(found)


def test_in_a_pod_the_latest_token_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("rljob-system")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(ssl, "create_default_context", lambda cafile: cafile)
    found = connect(tmp_path)
    assert (found.server, found.namespace) == ("https://[fd00::1]:443", "rljob-system")
    assert found.headers() == {"Authorization": "Bearer first"}
    (tmp_path / "fresh").write_text("second\n")
    os.replace(tmp_path / "fresh", tmp_path / "token")
    assert found.headers() == {"Authorization": "Bearer second"}


def test_without_either_it_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(NoConnection, match="set KUBECONFIG"):
        connect(tmp_path)
