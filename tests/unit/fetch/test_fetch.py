"""`rljob fetch`: its archives and its pod. The command is tested with a real API server."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rljob_client.cli import app
from rljob_client.errors import OutputUnavailable
from rljob_client.fetch_command import (
    IncompleteArchive,
    RunFiles,
    extract,
    image_of,
    reader_pod,
    start_obstacle,
)
from rljob_client.model_files import is_model, model_of_step
from rljob_client.run_directory.durable_files import require_free
from tests.unit.operator.objects.builders import job, objects, pod_of
from tests.unit.operator.objects.pod_security import restricted_violations


def archive(**files: bytes) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"model/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


WHOLE = archive(weights=b"w" * 1500, config=b"{}")


def test_a_directory_of_the_archive_becomes_the_output(tmp_path: Path) -> None:
    output = tmp_path / "runs" / "job" / "model"
    assert extract(io.BytesIO(WHOLE).read, "model", output) == 1502
    assert {file.name: file.stat().st_size for file in output.iterdir()} == {"weights": 1500, "config": 2}
    assert list(output.parent.iterdir()) == [output]


def test_a_file_of_the_archive_becomes_the_output(tmp_path: Path) -> None:
    assert extract(io.BytesIO(WHOLE).read, "model/weights", tmp_path / "w") == 1502
    assert (tmp_path / "w").read_bytes() == b"w" * 1500


@pytest.mark.parametrize("length", [0, 100, 700, 512 + 1536, len(WHOLE) - 10240 + 1024, 512 + 1536 + 1024 + 100])
def test_a_stream_that_ends_early_leaves_nothing(tmp_path: Path, length: int) -> None:
    with pytest.raises(IncompleteArchive):
        extract(io.BytesIO(WHOLE[:length]).read, "model", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_path_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompleteArchive):
        extract(io.BytesIO(archive(**{"../../../escaped": b"x"})).read, "model", tmp_path / "a" / "model")
    assert not (tmp_path / "escaped").exists()


def test_files_of_the_user_are_not_overwritten(tmp_path: Path) -> None:
    require_free(tmp_path / "absent")
    require_free(tmp_path)
    (tmp_path / "mine").touch()
    with pytest.raises(OutputUnavailable, match="give another --output"):
        require_free(tmp_path)


def test_the_reader_pod_is_restricted_and_like_those_of_the_job() -> None:
    stored = job()
    files = RunFiles.of("sums", stored.spec.checkpoint)
    controller = pod_of(objects(stored), "controller")
    pod = reader_pod(files, "sums-fetch-1", image_of(controller), controller)
    assert restricted_violations(pod) == []
    assert pod["spec"]["containers"][0]["image"] == "registry/rljob/trainer:1"
    assert pod["spec"]["volumes"] == [{"name": "run", "persistentVolumeClaim": {"claimName": "sums-checkpoints"}}]
    assert pod["spec"]["containers"][0]["volumeMounts"][0]["readOnly"]


@pytest.mark.parametrize(
    ("status", "obstacle"),
    [
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}]},
            "ErrImagePull: no such image",
        ),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, None),
        ({"conditions": [{"type": "PodScheduled", "reason": "Unschedulable", "message": "no node"}]}, "no node"),
    ],
)
def test_the_obstacle_of_a_reader_pod_is_named(status: dict[str, Any], obstacle: str | None) -> None:
    assert start_obstacle({"status": status}) == obstacle


def test_the_step_of_a_model_is_a_number_or_best() -> None:
    refused = CliRunner().invoke(app, ["fetch", "sums", "--step", "last"], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert "expected the number of a step, or best, found last" in refused.output
    assert model_of_step(40) == "models/step-000040"
    assert [path for path in ("model", "best", "models/step-000040", "models", "logs") if is_model(path)] == [
        "model",
        "best",
        "models/step-000040",
    ]
