"""The certificate of the metrics: self-signed, or mounted and followed."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest

from rljob_cluster.certificates import Authority
from rljob_operator.runtime import endpoints as module
from rljob_operator.runtime.endpoints import Certificate, NoCertificate


def presented(certificate: Certificate) -> bytes:
    """The certificate that a client is shown, in DER."""
    here, there = socket.socketpair()
    server = threading.Thread(target=lambda: certificate.context.wrap_socket(here, server_side=True).close())
    server.start()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(there) as client:
        shown = client.getpeercert(binary_form=True)
    server.join()
    assert shown is not None
    return shown


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    authority = Authority(tmp_path / "authority")
    authority.ensure()
    return authority


def mount(authority: Authority, name: str, directory: Path) -> bytes:
    """Write a new pair as a kubelet mounts a Secret; returns the certificate in DER."""
    pair = authority.server(name, (name,))
    directory.mkdir(exist_ok=True)
    (directory / "tls.crt").write_bytes(pair.certificate.read_bytes())
    (directory / "tls.key").write_bytes(pair.key.read_bytes())
    return ssl.PEM_cert_to_DER_cert(pair.certificate.read_text())


def test_without_files_each_process_makes_its_own_certificate() -> None:
    assert presented(Certificate(None)) != presented(Certificate(None))


def test_the_latest_pair_that_matches_is_used_without_a_restart(authority: Authority, tmp_path: Path) -> None:
    mounted = tmp_path / "tls"
    first = mount(authority, "first.example", mounted)
    certificate = Certificate(mounted)
    certificate.reload(mounted)
    assert presented(certificate) == first
    key = (mounted / "tls.key").read_bytes()
    mount(authority, "second.example", mounted)
    (mounted / "tls.key").write_bytes(key)
    certificate.reload(mounted)
    assert presented(certificate) == first, "the new pair does not match"
    (mounted / "tls.crt").unlink()
    certificate.reload(mounted)
    assert presented(certificate) == first
    second = mount(authority, "second.example", mounted)
    certificate.reload(mounted)
    assert presented(certificate) == second


def test_a_missing_or_wrong_certificate_stops_the_start(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(NoCertificate, match=r"expected tls\.crt and tls\.key in .*: No such file or directory; mount"):
        Certificate(tmp_path / "nothing")
    mount(authority, "first.example", tmp_path / "tls")
    (tmp_path / "tls" / "tls.key").write_text("no key")
    with pytest.raises(NoCertificate, match="write a matching pair"):
        Certificate(tmp_path / "tls")


def test_without_openssl_the_error_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SELF_SIGNED", ("/nonexistent/openssl",))
    with pytest.raises(NoCertificate, match=r"expected the program openssl .* --metrics-certificate"):
        Certificate(None)
