"""`images/build`: builders, commands, skipped builds, inputs, the package index, provenance and errors."""

from __future__ import annotations

import configparser
import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from image_build import builders, cli, debian_base
from image_build.builders import Buildah, Docker, LocalImage, find_builder
from image_build.package_index import PackageIndex, build_secrets, package_index, pip_settings, uv_settings
from image_build.recipes import (
    ImageBuildError,
    Recipe,
    content_key,
    input_files,
    model,
    operator,
    revision,
    source,
    trainer,
)


@pytest.mark.parametrize(
    ("docker", "buildah", "found"), [(1, 0, "buildah"), (0, None, "docker"), (1, None, None), (None, None, None)]
)
def test_the_builder_that_works_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, docker: int | None, buildah: int | None, found: str | None
) -> None:
    """`docker`, `buildah`: exit status of the program, None without it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, status in (("docker", docker), ("buildah", buildah)):
        if status is not None:
            (tmp_path / name).write_text(f"#!/bin/sh\necho no engine answers >&2\nexit {status}\n")
            (tmp_path / name).chmod(0o755)
    if found:
        assert find_builder(None).name == found
        return
    with pytest.raises(ImageBuildError, match="buildah is not installed") as error:
        find_builder(None)
    assert ("no engine answers" in str(error.value)) == (docker is not None)
    assert "apt-get install buildah" in str(error.value)


@pytest.mark.parametrize("builder", [Buildah(), Docker()], ids=["buildah", "docker"])
def test_secrets_go_as_secrets_and_never_as_arguments(tmp_path: Path, builder: Buildah | Docker) -> None:
    command = builder.build_command(operator(), {"a": "b"}, {"pip.conf": tmp_path / "pip.conf"})
    assert f"--secret=id=pip.conf,src={tmp_path}/pip.conf" in command
    assert "--label=a=b" in command
    assert command[-1] == str(operator().context)


def test_tags_and_arguments_follow_the_device_the_model_and_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, gpu = trainer("cpu"), trainer("gpu")
    assert (cpu.tag.rpartition("-")[2], gpu.tag.rpartition("-")[2]) == ("cpu", "gpu")
    assert cpu.arguments["TORCH_VERSION"] != gpu.arguments["TORCH_VERSION"]
    directory = tmp_path / "localhost" / "models" / "tiny" / "1"
    directory.mkdir(parents=True)
    with pytest.raises(ImageBuildError, match="make model"):
        model(directory)
    (directory / "config.json").write_text("{}")
    assert model(directory).tag == "localhost/models/tiny:1"
    before = debian_base.tag()
    monkeypatch.setattr(debian_base, "PACKAGES", (*debian_base.PACKAGES, "gcc"))
    assert debian_base.tag() != before


def test_an_unknown_image_is_refused_with_the_names_there_are() -> None:
    script = Path(cli.__file__).parents[1] / "build"
    refused = subprocess.run([sys.executable, str(script), "opertor"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "operator, trainer, model" in refused.stderr


# --- skipped builds, and progress ---


class RecordingBuildah(Buildah):
    """A builder with one image, which only records builds."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels

    def find(self, reference: str) -> LocalImage:
        return LocalImage("id", "1 MB", self.labels)


def test_an_image_is_built_once_for_the_same_inputs_or_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[dict[str, str]] = []
    monkeypatch.setattr(cli, "build", lambda builder, wanted, labels: built.append(labels))
    for store, even_if_unchanged, builds in ((RecordingBuildah({}), False, 1), (None, False, 1), (None, True, 2)):
        cli.build_if_changed(
            store or RecordingBuildah(built[0]), operator(), "base", even_if_unchanged=even_if_unchanged
        )
        assert len(built) == builds


def test_progress_has_the_steps_and_a_failure_its_last_lines_and_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builders, "LOGS", tmp_path / "logs")
    program = "print('STEP 1/2: RUN install'); print('no such package'); exit({})"
    builders.run_with_progress("trainer", [sys.executable, "-c", program.format(0)], step=Buildah.step, environment={})
    command = [sys.executable, "-c", program.format(3)]
    with pytest.raises(ImageBuildError, match="no such package") as error:
        builders.run_with_progress("operator", command, step=Buildah.step, environment={})
    assert str(tmp_path / "logs" / "operator.log") in str(error.value)
    assert re.search(r"operator +\d+ s +STEP 1/2: RUN install", out := capsys.readouterr().out)
    assert "no such package" not in out
    assert Buildah().step.search("[2/4] STEP 3/5: COPY memory /source")
    assert Docker().step.search("#12 [dependencies 4/5] RUN install")


# --- the key of an image changes only with its inputs ---


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    context = tmp_path / "context"
    (context / "part" / "__pycache__").mkdir(parents=True)
    (context / "part" / "code.py").write_text("one = 1\n")
    (context / "part" / "__pycache__" / "code.pyc").write_text("compiled")
    (context / "lock.txt").write_text("a==1\n")
    (context / "notes.md").write_text("unrelated\n")
    containerfile = tmp_path / "Containerfile"
    containerfile.write_text("FROM scratch\nCOPY part lock.txt /\n")
    ignore = tmp_path / "Containerfile.dockerignore"
    ignore.write_text("# kept\n*\n!lock.txt\n!part\n**/__pycache__\n")
    return Recipe("image", "localhost/image:1", containerfile, context, ignore, arguments={"VERSION": "1"})


def test_the_ignore_file_selects_the_files(recipe: Recipe) -> None:
    assert [str(path.relative_to(recipe.context)) for path in input_files(recipe)] == ["lock.txt", "part/code.py"]
    assert len(input_files(dataclasses.replace(recipe, ignore=None))) == 4


def test_the_key_is_the_same_for_other_times_places_and_ignored_files(recipe: Recipe, tmp_path: Path) -> None:
    before = content_key(recipe, "base")
    for ignored in ("notes.md", "part/__pycache__/code.pyc"):
        (recipe.context / ignored).write_text("other")
        assert content_key(recipe, "base") == before
    os.utime(recipe.context / "lock.txt", (1, 1))
    moved = recipe.context.rename(tmp_path / "elsewhere")
    assert content_key(dataclasses.replace(recipe, context=moved), "base") == before


def test_each_input_changes_the_key(recipe: Recipe) -> None:
    code = recipe.context / "part" / "code.py"
    other = dataclasses.replace(recipe, arguments={"VERSION": "2"})
    keys = [content_key(recipe, "base"), content_key(recipe, "other"), content_key(other, "base")]
    changes: list[Callable[[], object]] = [
        lambda: recipe.containerfile.write_text("FROM scratch\nCOPY lock.txt /\n"),
        lambda: code.write_text("one = 2\n"),
        lambda: code.chmod(0o755),
        lambda: code.rename(code.with_name("other.py")),
        lambda: code.with_name("added.py").write_text(""),
    ]
    for change in changes:
        change()
        keys.append(content_key(recipe, "base"))
    assert len(set(keys)) == len(keys)


# --- the package index of the build machine, which the build gets as secrets ---

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
    assert uv_settings(PackageIndex("", ())) == ""
    assert "index" not in pip_settings(PackageIndex("", ()))


def test_variables_take_precedence_over_pips_file(tmp_path: Path) -> None:
    file = tmp_path / ".config" / "pip" / "pip.conf"
    file.parent.mkdir(parents=True)
    extra = "https://a.example\n    https://b.example"
    file.write_text(f"[global]\nindex-url = {MIRROR}\nextra-index-url =\n    {extra}\n")
    home = {"HOME": str(tmp_path)}
    assert package_index(home) == PackageIndex(MIRROR, ("https://a.example", "https://b.example"))
    for variable in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        assert package_index(home | {variable: "https://other.example"}).default == "https://other.example"


def test_the_secrets_are_gone_after_the_build(tmp_path: Path) -> None:
    certificates = tmp_path / "bundle.crt"
    certificates.write_text("certificate")
    with build_secrets({"UV_DEFAULT_INDEX": MIRROR, "SSL_CERT_FILE": str(certificates)}) as secrets:
        assert MIRROR in secrets["uv.toml"].read_text()
        assert secrets["ca-certificates"] == certificates
        written = [secrets["uv.toml"], secrets["pip.conf"]]
    assert not any(path.exists() for path in written)
    assert certificates.exists()


# --- images name their commit, and nothing about the machine that built them ---


def git(repository: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(repository), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    for name in ("code.py", "notes.md"):
        (tmp_path / name).write_text("first\n")
        git(tmp_path, "add", name)
        git(tmp_path, "commit", "--quiet", "-m", name)
    return tmp_path


def test_the_revision_is_the_last_commit_of_the_files_and_marks_changes(repository: Path) -> None:
    code, notes = [repository / "code.py"], [repository / "notes.md"]
    assert revision(repository, code) == git(repository, "rev-parse", "HEAD~1")
    code[0].write_text("second\n")
    assert revision(repository, code).endswith("-dirty")
    assert revision(repository, notes) == git(repository, "rev-parse", "HEAD")
    (repository / ".git").rename(repository / "no-repository")
    assert revision(repository, code) == "unknown"


@pytest.mark.parametrize(
    ("origin", "recorded"),
    [
        ("https://forge.example/rljob.git", "https://forge.example/rljob.git"),
        ("https://user:token@forge.example/rljob.git", ""),
        ("/home/someone/rljob", ""),
    ],
)
def test_only_a_public_address_is_recorded_as_the_source(repository: Path, origin: str, recorded: str) -> None:
    git(repository, "remote", "add", "origin", origin)
    assert source(repository) == recorded
