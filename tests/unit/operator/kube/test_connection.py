"""Address and credentials of the API server, from a service account or a kubeconfig."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
import yaml

from rljob_operator.kube.connection import NoConnection, TokenFile, connect


def test_a_token_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("first\n")
    token = TokenFile(path)
    assert token.headers() == {"Authorization": "Bearer first"}
    fresh = tmp_path / "fresh"
    fresh.write_text("second\n")
    os.replace(fresh, path)
    assert token.headers() == {"Authorization": "Bearer second"}


def test_a_kubeconfig_with_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "ops"}}],
                "clusters": [{"name": "c", "cluster": {"server": "https://api.example:6443/"}}],
                "users": [{"name": "u", "user": {"token": "t0ken"}}],
            }
        )
    )
    monkeypatch.setenv("KUBECONFIG", str(path))
    found = connect()
    assert (found.server, found.namespace) == ("https://api.example:6443", "ops")
    assert found.headers() == {"Authorization": "Bearer t0ken"}
    assert "t0ken" not in repr(found)


def test_in_a_pod_the_service_account_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("pod-token")
    (tmp_path / "namespace").write_text("rljob-system")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(ssl, "create_default_context", lambda cafile: cafile)
    found = connect(tmp_path)
    assert (found.server, found.namespace) == ("https://[fd00::1]:443", "rljob-system")
    assert found.headers() == {"Authorization": "Bearer pod-token"}


def test_without_either_it_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(NoConnection, match="set KUBECONFIG"):
        connect(tmp_path)


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(NoConnection, match="absent"):
        connect(tmp_path)
