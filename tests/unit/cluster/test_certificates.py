"""Certificates and kubeconfigs of a cluster."""

from __future__ import annotations

import base64
import ipaddress
from pathlib import Path

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rljob_cluster.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path / "certificates")
    made.ensure()
    return made


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_a_client_certificate_names_user_and_group_and_is_signed(authority: Authority) -> None:
    certificate = load(authority.client("node", "system:node:a", "system:nodes").certificate)
    names = {attribute.oid: attribute.value for attribute in certificate.subject}
    assert names == {NameOID.COMMON_NAME: "system:node:a", NameOID.ORGANIZATION_NAME: "system:nodes"}
    certificate.verify_directly_issued_by(load(authority.pair.certificate))


def test_a_server_certificate_holds_names_and_addresses(authority: Authority) -> None:
    certificate = load(authority.server("server", ("localhost", "10.0.0.1")).certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [ipaddress.ip_address("10.0.0.1")]


def test_existing_certificates_are_kept(authority: Authority) -> None:
    before = (authority.pair.certificate.read_bytes(), authority.service_account_key().read_bytes())
    authority.ensure()
    assert (authority.pair.certificate.read_bytes(), authority.service_account_key().read_bytes()) == before


def test_only_the_owner_reads_keys_and_kubeconfigs(authority: Authority, tmp_path: Path) -> None:
    kubeconfig = authority.kubeconfig(tmp_path / "kubeconfig", "https://10.0.0.1:6443", "someone")
    for path in (kubeconfig, authority.pair.key, authority.service_account_key()):
        assert path.stat().st_mode & 0o077 == 0


def test_a_kubeconfig_holds_its_certificates_itself(authority: Authority, tmp_path: Path) -> None:
    path = authority.kubeconfig(tmp_path / "kubeconfig", "https://10.0.0.1:6443", "someone", "admins")
    document = yaml.safe_load(path.read_text())
    cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
    assert cluster["server"] == "https://10.0.0.1:6443"
    certificate = x509.load_pem_x509_certificate(base64.b64decode(user["client-certificate-data"]))
    certificate.verify_directly_issued_by(
        x509.load_pem_x509_certificate(base64.b64decode(cluster["certificate-authority-data"]))
    )
    assert isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
