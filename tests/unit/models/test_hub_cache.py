"""The cache of a job for models of the hub: downloaded once, reused without the hub."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub.errors import HfHubHTTPError

from rljob_api.exit_codes import ExitCode
from rljob_testing.hub_server import REPOSITORY, HubServer, served_hub
from rljob_trainer.models.hub import HubUnreachable, _may_pass, resolve_description
from rljob_trainer.models.resolve import resolve_model

PROGRAM = f"""
import sys
from rljob_trainer.errors import TrainerError
from rljob_trainer.models.lora_targets import require_adaptable
from rljob_trainer.models.resolve import resolve_model
try:
    targets = sys.argv[1:]
    print(resolve_model('hf://{REPOSITORY}', accept=lambda at: targets and require_adaptable(at, targets, 4)))
except TrainerError as error:
    print(error.exit_code.name, f"{{type(error).__name__}}: {{error}}")
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    model = resolve_model("random://qwen3?hidden=32&layers=1&heads=2&kvHeads=2", tmp_path_factory.mktemp("model"))
    with served_hub(model, delay_seconds=0.5) as server:
        yield server


def pod(cache: Path, endpoint: str, *targets: str, home: str = "home", **more: str) -> subprocess.Popen[str]:
    """A process with the variables of a pod, and `more`, which resolves the model if it has the targets of adapters."""
    variables = {
        **{"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache / "huggingface"), "RLJOB_CACHE_DIR": str(cache)},
        **{"HOME": str(cache / home), "HF_HOME": str(cache / home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"},
        # Much more than this machine stalls: a repeated request would count twice.
        **{"HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120"},
    }
    command = [sys.executable, "-c", PROGRAM, *targets]
    return subprocess.Popen(command, env=os.environ | variables | more, stdout=subprocess.PIPE, text=True)


def resolved(cache: Path, endpoint: str, *targets: str, **more: str) -> str:
    return pod(cache, endpoint, *targets, **more).communicate()[0].strip()


def test_pods_share_one_download_which_later_ones_use_or_complete(hub: HubServer, tmp_path: Path) -> None:
    hub.downloads.clear()
    leftover = tmp_path / "huggingface/models--tests--tiny/blobs/x.1234.incomplete"
    recent = leftover.with_name("y.1234.incomplete")
    leftover.parent.mkdir(parents=True)
    for file in (leftover, recent):
        file.write_text("partial")
    os.utime(leftover, (0, 0))

    pods = [pod(tmp_path, hub.url, home=f"home-{index}") for index in range(3)]
    [found] = {process.communicate()[0].strip() for process in pods}
    assert hub.downloads["model.safetensors"] == 1
    assert set(hub.downloads.values()) == {1}
    assert not leftover.exists()
    assert recent.exists()
    assert resolved(tmp_path, "http://127.0.0.1:9") == found
    assert resolved(tmp_path, hub.url, HF_HUB_OFFLINE="1", RLJOB_CACHE_DIR="") == found, "outside Kubernetes"

    hub.downloads.clear()
    weights = Path(found) / "model.safetensors"
    weights.resolve().unlink()
    weights.unlink()
    assert resolved(tmp_path, hub.url) == found
    assert hub.downloads == {"model.safetensors": 1}


def test_a_hub_or_connection_that_fails_is_no_fault_of_the_job(hub: HubServer, tmp_path: Path) -> None:
    assert ExitCode.ERROR.retry
    failure = resolved(tmp_path / "away", "http://127.0.0.1:9")
    assert failure.startswith("ERROR HubUnreachable: hf://tests/tiny is not in the local cache")
    with served_hub(hub.directory, broken={"model.safetensors"}) as server:
        failure = resolved(tmp_path / "broken", server.url)
    assert failure.startswith("ERROR HubUnreachable: the download of hf://tests/tiny failed (")
    assert "a retry continues it" in failure


def test_a_connection_of_xet_that_breaks_is_no_fault_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with hf_xet 1.8.0 and a port that nobody serves."""

    def failing(*_: object, **__: object) -> str:
        raise RuntimeError("Task error: File reconstruction error: CAS Client Error: Request middleware error")

    monkeypatch.setattr("huggingface_hub.snapshot_download", failing)
    with pytest.raises(HubUnreachable, match=r"failed \(Task error: File reconstruction error"):
        resolve_description(REPOSITORY)


def test_weights_of_a_refused_model_are_not_downloaded(hub: HubServer, tmp_path: Path) -> None:
    hub.downloads.clear()
    refused = resolved(tmp_path / "adapters", hub.url, "query")
    assert refused.startswith("BAD_INPUT BadInput: policy.lora.targets: expected names of linear layers")

    model = shutil.copytree(hub.directory, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_moe", "num_experts": 128}))
    with served_hub(model) as server:
        refused = resolved(tmp_path / "experts", server.url)
    assert refused.startswith("BAD_INPUT BadInput: expected a dense model")
    assert "a mixture of experts of the kind qwen3_moe (num_experts: 128 in config.json)" in refused
    for downloads in (hub.downloads, server.downloads):
        assert downloads["config.json"] == 1
        assert "model.safetensors" not in downloads


def test_only_failures_of_hub_and_network_may_pass() -> None:
    def refused(status: int) -> HfHubHTTPError:
        response = SimpleNamespace(status_code=status, headers={}, request=None)
        return HfHubHTTPError("refused", response=response)  # type: ignore[arg-type]

    assert all(_may_pass(refused(status)) for status in (408, 429, 500, 503))
    assert not any(_may_pass(refused(status)) for status in (400, 401, 403))
    assert _may_pass(ConnectionError("reset by peer"))
    assert not _may_pass(OSError(errno.ENOSPC, "No space left on device"))
