"""The package index of the build machine is passed to the build as secrets."""

from __future__ import annotations

import configparser
import tomllib
from pathlib import Path

import pytest
from image_build.package_index import PackageIndex, build_secrets, package_index, pip_settings, uv_settings

MIRROR = "https://user:secret@mirror.example/simple"


def test_pip_and_uv_get_the_same_addresses() -> None:
    index = PackageIndex(MIRROR, ("https://extra.example/simple",))
    pip = configparser.ConfigParser(interpolation=None)
    pip.read_string(pip_settings(index))
    uv = tomllib.loads(uv_settings(index))["index"]
    assert pip["global"]["index-url"] == MIRROR
    assert pip["global"]["extra-index-url"] == "https://extra.example/simple"
    assert [table["url"] for table in uv if table.get("default")] == [MIRROR]
    assert [table["url"] for table in uv if not table.get("default")] == ["https://extra.example/simple"]


def test_without_settings_the_tools_keep_their_own_default() -> None:
    index = PackageIndex("", ())
    assert uv_settings(index) == ""
    assert "index" not in pip_settings(index)


@pytest.mark.parametrize("variable", ["UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"])
def test_the_index_of_the_environment_is_used(variable: str) -> None:
    assert package_index({variable: MIRROR}).default == MIRROR


def test_pips_file_is_read_and_a_variable_takes_precedence(tmp_path: Path) -> None:
    file = tmp_path / ".config" / "pip" / "pip.conf"
    file.parent.mkdir(parents=True)
    file.write_text(
        f"[global]\nindex-url = {MIRROR}\nextra-index-url =\n    https://a.example\n    https://b.example\n"
    )
    home = {"HOME": str(tmp_path)}
    assert package_index(home) == PackageIndex(MIRROR, ("https://a.example", "https://b.example"))
    assert package_index(home | {"PIP_INDEX_URL": "https://other.example"}).default == "https://other.example"


def test_the_secrets_are_gone_after_the_build(tmp_path: Path) -> None:
    certificates = tmp_path / "bundle.crt"
    certificates.write_text("certificate")
    with build_secrets({"UV_DEFAULT_INDEX": MIRROR, "SSL_CERT_FILE": str(certificates)}) as secrets:
        assert MIRROR in secrets["uv.toml"].read_text()
        assert secrets["ca-certificates"] == certificates
        written = [secrets["uv.toml"], secrets["pip.conf"]]
    assert not any(path.exists() for path in written)
    assert certificates.exists()
