"""Certificate of the metrics endpoint: mounted files, which may change at any time, or a self-signed certificate."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import subprocess
import tempfile
from pathlib import Path

import structlog

_log = structlog.get_logger(__name__)

CERTIFICATE_FILE, KEY_FILE = "tls.crt", "tls.key"
"""File names of a Secret of type kubernetes.io/tls, as cert-manager writes it."""

_CHECK_EVERY_SECONDS = 10.0
_SELF_SIGNED = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
    *("-days", "3650", "-subj", "/CN=rljob-operator", "-keyout", "-", "-out", "-"),
)


class NoCertificate(Exception):
    """The message names the files or the program, and the fix."""


class Certificate:
    """The server's side of TLS. `context` stays the same; new connections use the latest files."""

    def __init__(self, directory: Path | None) -> None:
        """`directory` has tls.crt and tls.key. None: make a self-signed certificate. Raises NoCertificate."""
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._directory = directory
        if directory is None:
            self._load(_self_signed())
            self._digest = b""
        else:
            pem = _read(directory)
            self._load(pem)
            self._digest = _digest(pem)

    async def follow(self) -> None:
        """Load the files again whenever they change, until cancelled."""
        while self._directory is not None:
            await asyncio.sleep(_CHECK_EVERY_SECONDS)
            self.reload(self._directory)

    def reload(self, directory: Path) -> None:
        """Load the files if they have changed. Files that do not fit are logged; the last good ones stay in use."""
        try:
            pem = _read(directory)
            if _digest(pem) == self._digest:
                return
            self._digest = _digest(pem)
            self._load(pem)
        except NoCertificate as error:
            _log.warning("certificate not reloaded", error=str(error))
        else:
            _log.info("certificate reloaded", directory=str(directory))

    def _load(self, pem: bytes) -> None:
        """ssl reads files only; this one is in memory where there is /dev/shm, and readable by this user alone."""
        memory = Path("/dev/shm")
        with tempfile.NamedTemporaryFile(dir=memory if memory.is_dir() else None) as file:
            file.write(pem)
            file.flush()
            try:
                # A pair that does not fit would leave the context without a usable key: try it on another one first.
                ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(file.name)
                self.context.load_cert_chain(file.name)
            except ssl.SSLError as error:
                raise NoCertificate(
                    f"expected a PEM certificate and its unencrypted key in {CERTIFICATE_FILE} and {KEY_FILE}, found "
                    f"others ({error.reason or error}); write a matching pair"
                ) from error


def _read(directory: Path) -> bytes:
    """Key and certificate chain. Raises NoCertificate."""
    try:
        return (directory / KEY_FILE).read_bytes() + b"\n" + (directory / CERTIFICATE_FILE).read_bytes()
    except OSError as error:
        raise NoCertificate(
            f"expected {CERTIFICATE_FILE} and {KEY_FILE} in {directory}: {error.strerror}; mount a Secret of type "
            "kubernetes.io/tls there, or omit --metrics-certificate for a self-signed certificate"
        ) from error


def _self_signed() -> bytes:
    """Key and certificate of a new self-signed pair: P-256, valid for ten years. Raises NoCertificate."""
    try:
        made = subprocess.run(_SELF_SIGNED, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoCertificate(
            f"expected the program openssl to make a self-signed certificate, found an error: {error}; install it, "
            "provide a certificate with --metrics-certificate, or set --no-metrics-tls behind a service mesh"
        ) from error
    return made.stdout


def _digest(pem: bytes) -> bytes:
    return hashlib.sha256(pem).digest()
