"""Properties of the Containerfiles, read from their text."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from image_build.inputs import input_files
from image_build.recipes import Recipe, locked_version, operator, trainer, trl

IMAGES = Path(__file__).parents[3] / "images"
REQUIREMENTS = IMAGES.parent / "requirements"
COMPONENTS = ("operator", "trainer")


def instructions(name: str) -> list[str]:
    """The Containerfile's instructions in order, each on one line, without comments."""
    lines = [line for line in (IMAGES / name / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line]


def last_stage(name: str) -> list[str]:
    every = instructions(name)
    start = max(number for number, line in enumerate(every) if line.startswith("FROM "))
    return every[start:]


@pytest.mark.parametrize("name", COMPONENTS)
def test_the_process_runs_as_uid_10001(name: str) -> None:
    assert [line for line in last_stage(name) if line.startswith("USER")] == ["USER 10001:10001"]
    assert any("useradd --uid 10001 --gid 10001" in line for line in instructions(name))


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_stage_is_built_on_the_base_image_that_the_caller_chooses(name: str) -> None:
    stages = [line.split() for line in instructions(name) if line.startswith("FROM ")]
    names = {words[3] for words in stages if len(words) == 4}
    assert instructions(name)[0].startswith("ARG BASE_IMAGE=")
    assert all(words[1] in {"${BASE_IMAGE}", *names} for words in stages)


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_change_of_code_keeps_the_layer_of_the_dependencies(name: str) -> None:
    every = instructions(name)
    dependencies = every[: next(number for number, line in enumerate(every) if line.endswith("AS tools"))]
    copied = " ".join(line for line in dependencies if line.startswith("COPY"))
    assert "requirements/" in copied
    assert not re.search(r"\b(crds|memory|operator/|trainer/rljob)", copied)
    assert last_stage(name)[:2] == ["FROM dependencies", "COPY --from=project /project /"]


@pytest.mark.parametrize("name", COMPONENTS)
def test_the_image_has_the_standard_labels(name: str) -> None:
    labels = " ".join(line for line in last_stage(name) if line.startswith("LABEL"))
    for key in ("title", "description", "version", "revision", "source", "licenses"):
        assert f"org.opencontainers.image.{key}=" in labels


def test_the_trainer_declares_its_torch_version() -> None:
    assert any('dev.rljob.torch-version="$TORCH_VERSION"' in line for line in last_stage("trainer"))


def test_the_torch_version_that_a_plain_build_declares_is_the_locked_one() -> None:
    assert f"ARG TORCH_VERSION={locked_version('torch', 'trainer-cpu.txt')}" in instructions("trainer")


@pytest.mark.parametrize("name", COMPONENTS)
def test_the_package_index_is_a_secret_and_never_written_down(name: str) -> None:
    text = "\n".join(path.read_text() for path in (IMAGES / name).iterdir() if path.is_file())
    assert "://" not in text
    assert "index-url" not in text
    for line in instructions(name):
        if "pip install" in line or ("install-dependencies" in line and line.startswith("RUN")):
            assert "--mount=type=secret,id=uv.toml" in line or "--mount=type=secret,id=pip.conf" in line


@pytest.mark.parametrize("name", COMPONENTS)
def test_every_installed_package_is_checked_against_a_hash(name: str) -> None:
    text = (IMAGES / name / "Containerfile").read_text()
    if name == "trainer":
        text += (IMAGES / "trainer" / "install-dependencies").read_text()
    commands = re.findall(r"(?:pip install|uv build).*?(?:\n(?! )|;|&&|$)", text.replace("\\\n", " "), re.MULTILINE)
    assert len(commands) >= 4
    assert all("--require-hashes" in command or "--no-index" in command for command in commands)


@pytest.mark.parametrize("recipe", [operator(), trainer("cpu"), trl()], ids=lambda recipe: recipe.name)
def test_a_build_context_has_only_the_files_that_are_copied(recipe: Recipe) -> None:
    copied = " ".join(line for line in instructions(recipe.name) if line.startswith("COPY ") and "--from" not in line)
    files = {path.relative_to(recipe.context) for path in input_files(recipe)}
    for source in re.findall(
        r"(?:crds|memory|operator|trainer|probe|requirements|images)\b[\w./-]*", copied.replace("${DEVICE}", "cpu")
    ):
        assert any(file.is_relative_to(source) for file in files), source
    probe = {"probe"} if recipe.name == "operator" else set()
    assert {file.parts[0] for file in files} <= {"crds", "memory", "requirements", "images", recipe.name} | probe
    assert not any("__pycache__" in file.parts for file in files)


def test_packages_without_cpu_support_are_in_the_lock() -> None:
    left_out = [
        line for line in (IMAGES / "trainer/not-on-cpu.txt").read_text().splitlines() if not line.startswith("#")
    ]
    locked = set(re.findall(r"^([a-z0-9.-]+)==", (REQUIREMENTS / "trainer-cpu.txt").read_text(), re.MULTILINE))
    assert set(left_out) <= locked


def test_both_images_run_the_programs_that_the_parts_install() -> None:
    for part, program in (("operator", "rljob-operator"), ("trainer", "rljob")):
        scripts = tomllib.loads((IMAGES.parent / part / "pyproject.toml").read_text())["project"]["scripts"]
        assert program in scripts
        assert any(f'["{program}"' in line for line in last_stage(part))
