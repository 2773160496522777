"""The cache of a job for models of the hub: downloaded once, reused without the hub."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HfHubHTTPError

from rljob_api.exit_codes import ExitCode
from rljob_testing.hub_server import REPOSITORY, HubServer
from rljob_trainer.models.hub import HubUnreachable, _may_pass, resolve_description
from rljob_trainer.models.resolve import resolve_model

PROGRAM = f"from rljob_trainer.models.resolve import resolve_model; print(resolve_model('hf://{REPOSITORY}'))"

FAILURE_PROGRAM = f"""
from rljob_client.errors import RunError
from rljob_trainer.models.resolve import resolve_model
try:
    resolve_model('hf://{REPOSITORY}')
except RunError as error:
    print(error.exit_code.name, f"{{type(error).__name__}}: {{error}}")
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    model = resolve_model("random://qwen3?hidden=32&layers=1&heads=2&kvHeads=2", tmp_path_factory.mktemp("model"))
    server = HubServer(model, delay_seconds=0.5)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def pod(cache: Path, home: Path, endpoint: str, program: str = PROGRAM) -> subprocess.Popen[str]:
    """A process with the variables of a pod, which resolves the model."""
    variables = {
        **{"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache / "huggingface"), "RLJOB_CACHE_DIR": str(cache)},
        **{"HOME": str(home), "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"},
        # Much more than this machine stalls: a repeated request would count twice.
        **{"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"},
    }
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True)


def test_pods_share_one_download_and_later_ones_need_no_hub(hub: HubServer, tmp_path: Path) -> None:
    hub.downloads.clear()
    leftover = tmp_path / "cache/huggingface/models--tests--tiny/blobs/x.1234.incomplete"
    recent = leftover.with_name("y.1234.incomplete")
    leftover.parent.mkdir(parents=True)
    for file in (leftover, recent):
        file.write_text("partial")
    os.utime(leftover, (0, 0))

    pods = [pod(tmp_path / "cache", tmp_path / f"home-{index}", hub.url) for index in range(3)]
    found = {process.communicate()[0].strip() for process in pods}
    assert [process.returncode for process in pods] == [0, 0, 0]
    assert len(found) == 1
    assert hub.downloads["model.safetensors"] == 1
    assert set(hub.downloads.values()) == {1}
    assert not leftover.exists()
    assert recent.exists()

    later = pod(tmp_path / "cache", tmp_path / "home-later", "http://127.0.0.1:9")
    assert later.communicate()[0].strip() in found
    assert later.returncode == 0


def test_an_incomplete_model_is_completed_and_not_begun_anew(hub: HubServer, tmp_path: Path) -> None:
    assert pod(tmp_path, tmp_path / "home", hub.url).wait() == 0
    hub.downloads.clear()
    (snapshot,) = (tmp_path / "huggingface").glob("models--*/snapshots/*")
    weights = snapshot / "model.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    assert pod(tmp_path, tmp_path / "home", hub.url).wait() == 0
    assert hub.downloads == {"model.safetensors": 1}


def test_a_hub_that_is_away_is_no_fault_of_the_job(tmp_path: Path) -> None:
    process = pod(tmp_path, tmp_path / "home", "http://127.0.0.1:9", FAILURE_PROGRAM)
    failure = process.communicate()[0].strip()
    assert failure.startswith("ERROR HubUnreachable: hf://tests/tiny is not in the local cache")
    assert ExitCode.ERROR.retry


def test_a_connection_that_breaks_is_no_fault_of_the_job(hub: HubServer, tmp_path: Path) -> None:
    server = HubServer(hub.directory, broken={"model.safetensors"})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    failure = pod(tmp_path / "cache", tmp_path / "home", server.url, FAILURE_PROGRAM).communicate()[0]
    server.shutdown()
    assert failure.startswith("ERROR HubUnreachable: the download of hf://tests/tiny failed (")
    assert "a retry continues it" in failure


def test_a_connection_of_xet_that_breaks_is_no_fault_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with hf_xet 1.8.0 and a port that nobody serves."""

    def failing(*_: object, **__: object) -> str:
        raise RuntimeError("Task error: File reconstruction error: CAS Client Error: Request middleware error")

    monkeypatch.setattr("huggingface_hub.snapshot_download", failing)
    with pytest.raises(HubUnreachable, match=r"failed \(Task error: File reconstruction error"):
        resolve_description(REPOSITORY)


def test_weights_of_a_model_that_cannot_train_are_not_downloaded(hub: HubServer, tmp_path: Path) -> None:
    model = shutil.copytree(hub.directory, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_moe", "num_experts": 128}))
    server = HubServer(model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    refused = pod(tmp_path / "cache", tmp_path / "home", server.url, FAILURE_PROGRAM).communicate()[0]
    server.shutdown()
    assert refused.startswith("BAD_INPUT BadInput: expected a dense model")
    assert "a mixture of experts of the kind qwen3_moe (num_experts: 128 in config.json)" in refused
    assert "config.json" in server.downloads
    assert "model.safetensors" not in server.downloads


def test_weights_of_a_model_that_the_job_refuses_are_not_downloaded(hub: HubServer, tmp_path: Path) -> None:
    hub.downloads.clear()
    program = FAILURE_PROGRAM.replace(
        f"resolve_model('hf://{REPOSITORY}')",
        f"resolve_model('hf://{REPOSITORY}', accept=lambda at: require_adaptable(at, ['query'], 4))",
    )
    program = f"from rljob_trainer.models.lora_targets import require_adaptable\n{program}"
    refused = pod(tmp_path / "cache", tmp_path / "home", hub.url, program).communicate()[0]
    assert refused.startswith("BAD_INPUT BadInput: policy.lora.targets: expected names of linear layers")
    assert hub.downloads["config.json"] == 1
    assert "model.safetensors" not in hub.downloads


def test_only_failures_of_hub_and_network_may_pass() -> None:
    def refused(status: int) -> HfHubHTTPError:
        response = SimpleNamespace(status_code=status, headers={}, request=None)
        return HfHubHTTPError("refused", response=response)  # type: ignore[arg-type]

    assert all(_may_pass(refused(status)) for status in (408, 429, 500, 503))
    assert not any(_may_pass(refused(status)) for status in (400, 401, 403))
    assert _may_pass(ConnectionError("reset by peer"))
    assert not _may_pass(OSError(errno.ENOSPC, "No space left on device"))
