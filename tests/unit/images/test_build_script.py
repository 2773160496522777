"""`images/build`: builders, commands, skipped builds and errors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from image_build import cli, debian_base, progress
from image_build.builders import Buildah, Docker, LocalImage, find_builder
from image_build.errors import ImageBuildError
from image_build.recipes import model, operator, trainer


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Puts a program with this name and exit status on the path, and no other builder."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(name: str, status: int) -> None:
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\necho no engine answers >&2\nexit {status}\n")
        script.chmod(0o755)

    return put


class TestBuilder:
    def test_buildah_is_used_if_docker_has_no_engine(self, program: Callable[[str, int], None]) -> None:
        program("docker", 1)
        program("buildah", 0)
        assert find_builder(None).name == "buildah"

    def test_docker_is_used_if_buildah_is_missing(self, program: Callable[[str, int], None]) -> None:
        program("docker", 0)
        assert find_builder(None).name == "docker"

    def test_without_a_builder_the_error_has_both_reasons_and_a_command(
        self, program: Callable[[str, int], None]
    ) -> None:
        program("docker", 1)
        with pytest.raises(ImageBuildError) as error:
            find_builder(None)
        assert "buildah is not installed" in str(error.value)
        assert "no engine answers" in str(error.value)
        assert "apt-get install buildah" in str(error.value)


class TestCommand:
    def test_secrets_go_as_secrets_and_never_as_arguments(self, tmp_path: Path) -> None:
        for builder in (Buildah(), Docker()):
            command = builder.build_command(operator(), {"a": "b"}, {"pip.conf": tmp_path / "pip.conf"})
            assert f"--secret=id=pip.conf,src={tmp_path}/pip.conf" in command
            assert "--label=a=b" in command
            assert command[-1] == str(operator().context)

    def test_the_trainers_tag_and_torch_version_follow_the_device(self) -> None:
        cpu, gpu = trainer("cpu"), trainer("gpu")
        assert (cpu.tag.rpartition("-")[2], gpu.tag.rpartition("-")[2]) == ("cpu", "gpu")
        assert cpu.arguments["TORCH_VERSION"] != gpu.arguments["TORCH_VERSION"]

    def test_the_models_tag_is_its_place_in_the_models_cache(self, tmp_path: Path) -> None:
        directory = tmp_path / "localhost" / "models" / "tiny" / "1"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        assert model(directory).tag == "localhost/models/tiny:1"

    def test_a_missing_model_is_refused_with_the_command_that_makes_it(self, tmp_path: Path) -> None:
        with pytest.raises(ImageBuildError, match="make model"):
            model(tmp_path)


class Store(Buildah):
    """A builder with one image, which only records builds."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels

    def find(self, reference: str) -> LocalImage:
        return LocalImage("id", "1 MB", self.labels)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Labels of each image that a test builds."""
    built_labels: list[dict[str, str]] = []
    monkeypatch.setattr(cli, "build", lambda builder, wanted, labels: built_labels.append(labels))
    return built_labels


class TestSkipping:
    def test_an_image_is_built_once_for_the_same_inputs(self, built: list[dict[str, str]]) -> None:
        cli.build_if_changed(Store({}), operator(), "base", even_if_unchanged=False)
        cli.build_if_changed(Store(built[0]), operator(), "base", even_if_unchanged=False)
        assert len(built) == 1

    def test_rebuild_builds_an_unchanged_image(self, built: list[dict[str, str]]) -> None:
        cli.build_if_changed(Store({}), operator(), "base", even_if_unchanged=False)
        cli.build_if_changed(Store(built[0]), operator(), "base", even_if_unchanged=True)
        assert len(built) == 2


class TestBase:
    def test_another_set_of_packages_is_another_image(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = debian_base.tag()
        monkeypatch.setattr(debian_base, "PACKAGES", (*debian_base.PACKAGES, "gcc"))
        assert debian_base.tag() != before


class TestProgress:
    @pytest.fixture(autouse=True)
    def _logs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(progress, "LOGS", tmp_path / "logs")

    def test_a_failed_build_shows_its_last_lines_and_its_log(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", "print('STEP 1/2: RUN install'); print('no such package'); exit(3)"]
        with pytest.raises(ImageBuildError) as error:
            progress.run_with_progress("operator", command, step=Buildah.step, environment={})
        assert "no such package" in str(error.value)
        assert str(tmp_path / "logs" / "operator.log") in str(error.value)

    def test_steps_are_shown_but_not_the_noise_between(self, capsys: pytest.CaptureFixture[str]) -> None:
        command = [sys.executable, "-c", "print('STEP 1/2: RUN install'); print('noise')"]
        progress.run_with_progress("operator", command, step=Buildah.step, environment={})
        assert re.search(r"operator +\d+ s +STEP 1/2: RUN install", out := capsys.readouterr().out)
        assert "noise" not in out

    @pytest.mark.parametrize(
        ("builder", "line"),
        [(Buildah(), "[2/4] STEP 3/5: COPY memory /source"), (Docker(), "#12 [dependencies 4/5] RUN install")],
        ids=["buildah", "docker"],
    )
    def test_the_steps_of_each_builder_are_recognised(self, builder: Buildah | Docker, line: str) -> None:
        assert builder.step.search(line)


def test_an_unknown_image_is_refused_with_the_names_there_are() -> None:
    script = Path(cli.__file__).parents[1] / "build"
    refused = subprocess.run([sys.executable, str(script), "opertor"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "operator, trainer, model" in refused.stderr
