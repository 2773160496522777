"""Package index, certificates and timeouts of the build machine, passed to a build as secrets, never as layers."""

from __future__ import annotations

import configparser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

SYSTEM_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


class PackageIndex(NamedTuple):
    """Settings of the package index; empty if the machine has none."""

    default: str
    extra: tuple[str, ...]


@contextmanager
def build_secrets(environment: Mapping[str, str]) -> Iterator[dict[str, Path]]:
    """Files by the id under which the Containerfiles mount them. They exist only within the context."""
    index = package_index(environment)
    with TemporaryDirectory(prefix="rljob-images-") as directory:
        pip, uv = Path(directory, "pip.conf"), Path(directory, "uv.toml")
        pip.write_text(pip_settings(index), encoding="utf-8")
        uv.write_text(uv_settings(index), encoding="utf-8")
        secrets = {"pip.conf": pip, "uv.toml": uv}
        certificates = Path(environment.get("SSL_CERT_FILE", SYSTEM_CERTIFICATES))
        if certificates.is_file():
            secrets["ca-certificates"] = certificates
        yield secrets


def package_index(environment: Mapping[str, str]) -> PackageIndex:
    """Setting from uv's variables, pip's variables or pip's files, in this order."""
    pip = pip_files_settings(environment)

    def first(*variables: str, setting: str) -> str:
        return next((environment[name] for name in variables if environment.get(name)), pip.get(setting, ""))

    default = first("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", setting="index-url")
    extra = first("UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL", setting="extra-index-url")
    return PackageIndex(default, tuple(extra.split()))


def pip_files_settings(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Section `global` of pip's configuration files. The user's file takes precedence over the machine's."""
    home = Path(environment.get("HOME", "/"))
    files = [Path("/etc/pip.conf"), home / ".pip" / "pip.conf", home / ".config" / "pip" / "pip.conf"]
    if named := environment.get("PIP_CONFIG_FILE"):
        files.append(Path(named))
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(files)
    return dict(parser["global"]) if parser.has_section("global") else {}


def pip_settings(index: PackageIndex) -> str:
    lines = ["[global]", f"cert = {SYSTEM_CERTIFICATES}"]
    if index.default:
        lines.append(f"index-url = {index.default}")
    if index.extra:
        lines.append(f"extra-index-url = {' '.join(index.extra)}")
    return "\n".join(lines) + "\n"


def uv_settings(index: PackageIndex) -> str:
    tables = [f'[[index]]\nurl = "{url}"\n' for url in index.extra]
    if index.default:
        tables.append(f'[[index]]\nurl = "{index.default}"\ndefault = true\n')
    return "\n".join(tables)
