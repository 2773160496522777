"""The wheels of all parts, in an environment of their own; and the site of the documentation."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from rljob_testing.repository import EXAMPLES, ROOT

PARTS = {
    "crds": "rljob_api",
    "memory": "rljob_memory",
    "client": "rljob_client",
    "operator": "rljob_operator",
    "trainer": "rljob_trainer",
    "images/probe": "rljob_probe",
}
"""Package of each part."""
UV = str(Path(sys.executable).with_name("uv"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheels")
    for part in PARTS:
        _run(UV, "build", "--quiet", "--wheel", "--no-build-isolation", "--out-dir", directory, ROOT / part)
    return directory


def test_wheels_contain_every_file_of_their_package(wheels: Path) -> None:
    for part, package in PARTS.items():
        tracked = _run("git", "-C", ROOT / part, "ls-files", package).split()
        [wheel] = wheels.glob(f"{package}-*.whl")
        missing = set(tracked) - set(zipfile.ZipFile(wheel).namelist())
        assert not missing, f"{wheel.name} lacks {sorted(missing)}"


def test_metadata_pins_no_version_exactly(wheels: Path) -> None:
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            metadata = Parser().parsestr(archive.read(name).decode())
        required = [found.partition(";")[0] for found in metadata.get_all("Requires-Dist", [])]
        assert not [found for found in required if "==" in found], wheel.name


def test_client_and_operator_run_from_their_wheels(wheels: Path, tmp_path: Path) -> None:
    """Their dependencies have the locked versions, which `make setup` has left in uv's cache."""
    environment = tmp_path / "environment"
    _run(UV, "venv", "--quiet", "--python", sys.executable, environment)
    locks = [f"--constraint={ROOT / 'requirements' / name}.txt" for name in ("trainer-cpu", "operator")]
    parts = ("rljob-client", "rljob-operator")
    python = f"--python={environment / 'bin' / 'python'}"
    _run(UV, "pip", "install", "--quiet", python, *locks, f"--find-links={wheels}", *parts)

    program = environment / "bin" / "rljob"
    assert "rljob-api" in _run(UV, "pip", "list", python)
    assert "plan" in _run(program, "--help")
    assert ": valid" in _run(program, "validate", "--schema-only", EXAMPLES / "digits.yaml")
    assert "--trainer-image" in _run(environment / "bin" / "rljob-operator", "run", "--help")
    installed = {path.name for path in (environment / "lib").glob("*/site-packages/*")}
    assert not installed & {"torch", "vllm", "ray", "transformers"}


def test_the_site_of_the_documentation_builds(tmp_path: Path) -> None:
    """`--strict` fails at a page, a link or an anchor that does not exist."""
    _run(sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path)
    assert "out-of-memory" in (tmp_path / "search" / "search_index.json").read_text(encoding="utf-8").lower()
    navigation = (tmp_path / "index.html").read_text(encoding="utf-8")
    pages = [page.stem for page in (ROOT / "docs").glob("*.md") if page.stem not in ("index", "chart-values")]
    assert not [page for page in pages if f'href="{page}/"' not in navigation], "docs/index.md lists every page"


def _run(*command: str | Path) -> str:
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stderr}"
    return done.stdout
