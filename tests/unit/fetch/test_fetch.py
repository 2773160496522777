"""`rljob fetch`: its archives, and the command with a kubectl whose cluster is a directory."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from rljob_client.cli import app
from rljob_client.errors import OutputUnavailable
from rljob_client.fetch_command import IncompleteArchive, extract, require_free
from rljob_trainer.models.resolve import resolve_model
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
    assert extract(io.BytesIO(WHOLE), "model", output) == 1502
    assert {file.name: file.stat().st_size for file in output.iterdir()} == {"weights": 1500, "config": 2}
    assert list(output.parent.iterdir()) == [output]


@pytest.mark.parametrize("length", [0, 100, 700, 512 + 1536, len(WHOLE) - 10240 + 1024, 512 + 1536 + 1024 + 100])
def test_a_stream_that_ends_early_leaves_nothing(tmp_path: Path, length: int) -> None:
    with pytest.raises(IncompleteArchive):
        extract(io.BytesIO(WHOLE[:length]), "model", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_path_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompleteArchive):
        extract(io.BytesIO(archive(**{"../../../escaped": b"x"})), "model", tmp_path / "a" / "model")
    assert not (tmp_path / "escaped").exists()


def test_files_of_the_user_are_not_overwritten(tmp_path: Path) -> None:
    require_free(tmp_path / "absent")
    require_free(tmp_path)
    (tmp_path / "mine").touch()
    with pytest.raises(OutputUnavailable, match="give another --output"):
        require_free(tmp_path)


# --- the command ---

KUBECTL = f"""#!{sys.executable}
import json, os, pathlib, subprocess, sys
cluster = pathlib.Path(os.environ["CLUSTER"])
words = [word for word in sys.argv[1:] if not word.startswith(("--context", "--namespace"))]
with (cluster / "log").open("a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if words[0] == "get":
    file = cluster / f"{{words[1]}}-{{words[2]}}.json"
    print(file.read_text() if file.exists() else "")
elif words[0] == "create":
    import yaml
    pod = yaml.safe_load(sys.stdin)
    pod["status"] = json.loads((cluster / "status").read_text())
    (cluster / f"pod-{{pod['metadata']['name']}}.json").write_text(json.dumps(pod))
elif words[0] == "exec":
    command = [word.replace("/run-files", str(cluster / "volume")) for word in words[3:]]
    sys.exit(subprocess.run(command).returncode)
elif words[0] == "delete":
    (cluster / f"pod-{{words[2]}}.json").unlink()
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster with the complete job `sums` and its pods."""
    folder = tmp_path / "cluster"
    program = tmp_path / "bin" / "kubectl"
    for directory in (folder, program.parent):
        directory.mkdir()
    program.write_text(KUBECTL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("CLUSTER", str(folder))
    monkeypatch.chdir(tmp_path)
    stored = job()
    put(folder, "rljob", "sums", stored.model_dump(mode="json", by_alias=True, exclude_none=True))
    put(folder, "pod", "sums-controller", pod_of(objects(stored), "controller"))
    (folder / "status").write_text(json.dumps({"conditions": [{"type": "Ready", "status": "True"}]}))
    model = resolve_model("random://qwen3?hidden=32&layers=1&heads=2&kvHeads=2", tmp_path / "cache")
    (folder / "volume").mkdir()
    model.rename(folder / "volume" / "model")
    return folder


def put(cluster: Path, kind: str, name: str, content: Any) -> None:
    (cluster / f"{kind}-{name}.json").write_text(json.dumps(content))


def fetch(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["fetch", *arguments])


def commands(cluster: Path) -> list[list[str]]:
    return [json.loads(line) for line in (cluster / "log").read_text().splitlines()]


def test_the_model_is_fetched_and_the_pod_deleted(cluster: Path, tmp_path: Path) -> None:
    result = fetch("sums", "-n", "research")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "runs/sums/model/model.safetensors").is_file()
    assert "runs/sums/model" in result.stdout
    assert not list(cluster.glob("pod-sums-fetch-*"))
    assert {words[0] for words in commands(cluster)} == {"--namespace=research"}


def test_the_pod_is_restricted_and_like_those_of_the_job(cluster: Path) -> None:
    result = fetch("sums", "--print-pod")
    pod = yaml.safe_load(result.stdout)
    assert restricted_violations(pod) == []
    assert pod["spec"]["containers"][0]["image"] == "registry/rljob/trainer:1"
    assert pod["spec"]["volumes"] == [{"name": "run", "persistentVolumeClaim": {"claimName": "sums-checkpoints"}}]
    assert pod["spec"]["containers"][0]["volumeMounts"][0]["readOnly"]
    assert not [words for words in commands(cluster) if "create" in words]


def test_a_retained_claim_of_a_deleted_job_is_read_without_its_cache(cluster: Path, tmp_path: Path) -> None:
    (cluster / "rljob-sums.json").unlink()
    (cluster / "pod-sums-controller.json").unlink()
    put(cluster, "persistentvolumeclaim", "sums-checkpoints", {"metadata": {"name": "sums-checkpoints"}})
    run = cluster / "volume" / "sums"
    for name in (".model-cache", "plots"):
        (run / name).mkdir(parents=True)
    (cluster / "volume" / "model").rename(run / "model")
    assert "name an image" in fetch("sums").stderr
    assert fetch("sums", "--image", "trainer", "-o", "mine").exit_code == 0
    assert (tmp_path / "mine" / "config.json").is_file()
    assert fetch("sums", "--image", "trainer", "--path", ".", "-o", "all").exit_code == 0
    assert sorted(file.name for file in (tmp_path / "all").iterdir()) == ["model", "plots"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nobody",), 1, "expected an RLJob nobody, or the claim nobody-checkpoints"),
        (("sums", "--path", "plots"), 1, "the run of sums has no plots"),
        (("sums", "--path", "../other"), 1, "expected a directory of the run"),
        (("sums", "-o", "cluster"), 85, "expected no directory cluster, or an empty one"),
    ],
)
def test_a_failure_is_explained(cluster: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = fetch(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert not list(cluster.glob("pod-*-fetch-*"))


def test_a_pod_that_does_not_start_or_a_missing_kubectl_is_explained(
    cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rljob_client.fetch_command._START_SECONDS", 0.0)
    waiting = {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    (cluster / "status").write_text(json.dumps({"containerStatuses": [waiting]}))
    result = fetch("sums")
    assert result.exit_code == 1
    assert "ErrImagePull: no such image" in result.stderr
    assert not list(cluster.glob("pod-sums-fetch-*"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert "expected kubectl in PATH" in fetch("sums").stderr
