"""Certificate authority of a cluster, its certificates, and kubeconfigs."""

from __future__ import annotations

import base64
import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_FOR = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key as PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate authority of one cluster. All files are in one folder; existing pairs are reused."""

    directory: Path

    @property
    def pair(self) -> KeyPair:
        return self._pair("ca")

    def ensure(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.pair.certificate.exists():
            key = ec.generate_private_key(ec.SECP256R1())
            name = _name("rljob-cluster")
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
            builder = _certificate(name, key.public_key()).issuer_name(name)
            builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            _write(self.pair, key, builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()))

    def client(self, file: str, user: str, group: str | None = None) -> KeyPair:
        """Key pair that authenticates `user` of `group` to the API server."""
        return self._signed(file, _name(user, group), ExtendedKeyUsageOID.CLIENT_AUTH, ())

    def server(self, file: str, names: tuple[str, ...]) -> KeyPair:
        """Key pair of a server with these host names and IP addresses."""
        return self._signed(file, _name(names[0]), ExtendedKeyUsageOID.SERVER_AUTH, names)

    def service_account_key(self) -> Path:
        """Private key that signs and verifies the tokens of service accounts."""
        pair = self._pair("service-account")
        if not pair.key.exists():
            _write_private(pair.key, ec.generate_private_key(ec.SECP256R1()))
        return pair.key

    def kubeconfig(self, path: Path, url: str, user: str, group: str | None = None) -> Path:
        """Write a kubeconfig with embedded certificates, which works from any directory."""
        pair = self.client(path.stem, user, group)
        cluster = {"server": url, "certificate-authority-data": _base64(self.pair.certificate)}
        credentials = {"client-certificate-data": _base64(pair.certificate), "client-key-data": _base64(pair.key)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "rljob", "cluster": cluster}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": "rljob", "context": {"cluster": "rljob", "user": user}}],
            "current-context": "rljob",
        }
        _replace(path, yaml.safe_dump(document).encode())
        return path

    def _pair(self, file: str) -> KeyPair:
        return KeyPair(self.directory / f"{file}.crt", self.directory / f"{file}.key")

    def _signed(self, file: str, subject: x509.Name, usage: x509.ObjectIdentifier, hosts: tuple[str, ...]) -> KeyPair:
        pair = self._pair(file)
        if pair.certificate.exists():
            return pair
        issuer = x509.load_pem_x509_certificate(self.pair.certificate.read_bytes())
        issuer_key = serialization.load_pem_private_key(self.pair.key.read_bytes(), None)
        assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _certificate(subject, key.public_key()).issuer_name(issuer.subject)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        _write(pair, key, builder.sign(issuer_key, hashes.SHA256()))
        return pair


def _name(user: str, group: str | None = None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group)] if group else []
    return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _certificate(subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    begins = datetime.now(UTC) - timedelta(hours=1)
    builder = x509.CertificateBuilder().subject_name(subject).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(begins).not_valid_after(begins + VALID_FOR)


def _write(pair: KeyPair, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    # The certificate last: it stands for the whole pair.
    _write_private(pair.key, key)
    _replace(pair.certificate, certificate.public_bytes(serialization.Encoding.PEM))


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    encoding, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    _replace(path, key.private_bytes(encoding, serialization.PrivateFormat.TraditionalOpenSSL, no_password))


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600)
    partial.write_bytes(content)
    partial.replace(path)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
