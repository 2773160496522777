"""Models that are made from a description, or downloaded from the hub once and reused."""

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
import torch
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModelForCausalLM

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJobSpec
from rljob_client.errors import BadInput
from rljob_client.model_files import weight_shapes
from rljob_memory.model_shape import shape_in_uri
from rljob_testing.hub_server import REPOSITORY, HubServer, served_hub
from rljob_trainer.models.checkpoint import load_tokenizer, model_dimensions, validate_checkpoint
from rljob_trainer.models.hub import HubUnreachable, may_pass, resolve_description
from rljob_trainer.models.resolve import resolve_model


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_the_same_query_is_made_once_and_gives_the_same_weights_anywhere(tmp_path: Path) -> None:
    first = resolve_model("random://qwen3?hidden=32&seed=3", tmp_path / "a")
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_model("random://qwen3?seed=3&hidden=32", tmp_path / "a") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert weights(resolve_model("random://qwen3?hidden=32&seed=3", tmp_path / "b")) == weights(first)
    assert weights(resolve_model("random://qwen3?hidden=32&seed=4", tmp_path / "a")) != weights(first)


SIZES = "hidden=48&intermediate=80&layers=3&heads=6&kvHeads=3&headDim=16&vocabulary=96&tied=true"


def test_the_query_sets_the_architecture(tmp_path: Path) -> None:
    shape = model_dimensions(resolve_model(f"random://llama?{SIZES}", tmp_path))
    assert (shape.hidden, shape.intermediate, shape.layers, shape.heads) == (48, 80, 3, 6)
    assert (shape.kv_heads, shape.head_dim, shape.vocabulary, shape.tied) == (3, 16, 96, True)
    attention, mlp, norms = 2 * 48 * 96 + 2 * 48 * 48, 3 * 48 * 80, 2 * 48
    assert shape.parameters == 96 * 48 + 3 * (attention + mlp + norms) + 48


@pytest.mark.parametrize("query", ["qwen3", f"llama?{SIZES}"])
def test_the_predicted_shape_is_that_of_the_weights(query: str, tmp_path: Path) -> None:
    spec = {"model": {"uri": f"random://{query}"}, "task": {"name": "digits"}, "algorithm": {"steps": 1}}
    predicted = shape_in_uri(RLJobSpec.model_validate(spec), 4)
    assert predicted is not None
    written = model_dimensions(resolve_model(f"random://{query}", tmp_path))
    assert predicted.parameters == pytest.approx(written.parameters, rel=0.01)
    assert (predicted.layers, predicted.hidden, predicted.heads) == (written.layers, written.hidden, written.heads)


def test_ids_decode_characters_come_back_and_special_tokens_agree(tmp_path: Path) -> None:
    directory = resolve_model("random://qwen3?vocabulary=100", tmp_path)
    config, tokenizer = json.loads((directory / "config.json").read_text()), load_tokenizer(directory)
    assert tokenizer.decode(tokenizer("7: a+b=?").input_ids) == "7: a+b=?"
    assert all(tokenizer.decode([index]) for index in range(100))
    assert tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=True) == ""
    assert config["eos_token_id"] == tokenizer.eos_token_id
    assert config["pad_token_id"] == tokenizer.pad_token_id


@pytest.mark.parametrize(
    ("uri", "messages"),
    [
        ("random://gpt2", ["architecture", "'qwen3' or 'llama'"]),
        ("random://qwen3?hiden=64&layers=two", ["hiden", "layers", "integer", "any of hidden"]),
        ("random://qwen3?layers=0", ["layers", "greater than or equal to 1"]),
        ("random://qwen3?heads=4&kvHeads=3", ["heads (4) must be a multiple of kvHeads (3)"]),
        ("random://qwen3?vocabulary=10", ["vocabulary"]),
        ("random://qwen3?kv_heads=2", ["kv_heads"]),
    ],
)
def test_every_wrong_part_of_the_query_is_named(tmp_path: Path, uri: str, messages: list[str]) -> None:
    with pytest.raises(BadInput) as raised:
        resolve_model(uri, tmp_path)
    assert all(message in str(raised.value) for message in messages)
    assert not list(tmp_path.iterdir())


def test_a_model_that_the_job_refuses_is_not_written(tmp_path: Path) -> None:
    seen: list[str] = []

    def refuse(directory: Path) -> None:
        seen.extend(file.name for file in directory.iterdir())
        raise BadInput("not this one")

    with pytest.raises(BadInput, match="not this one"):
        resolve_model("random://qwen3", tmp_path, accept=refuse)
    assert sorted(seen) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert not list((tmp_path / "random").iterdir())


def test_a_cache_that_cannot_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"cannot write .*file/cache: Not a directory; set XDG_CACHE_HOME"):
        resolve_model("random://qwen3", tmp_path / "file" / "cache")


def test_processes_can_write_the_same_model_at_once(tmp_path: Path) -> None:
    def another(_: Path) -> None:
        resolve_model("random://qwen3", tmp_path)

    found = resolve_model("random://qwen3", tmp_path, accept=another)
    assert [path.name for path in (tmp_path / "random").iterdir()] == [found.name]


def test_weights_in_a_file_or_one_a_layer_have_the_same_shapes(tmp_path: Path) -> None:
    query = "qwen3?hidden=64&layers=2&vocabulary=300&initializerRange=0.5"
    whole, in_layers = (resolve_model(f"random://{query}{dtype}", tmp_path) for dtype in ("", "&dtype=bfloat16"))
    assert whole != in_layers
    validate_checkpoint(in_layers)
    assert weight_shapes(in_layers) == weight_shapes(whole)
    assert len(list(in_layers.glob("*.safetensors"))) == 2 + 3
    for directory, dtype in ((whole, torch.float32), (in_layers, torch.bfloat16)):
        model = AutoModelForCausalLM.from_pretrained(directory)
        assert model.dtype == dtype
        for name, parameter in model.named_parameters():
            if "norm" in name:
                assert bool((parameter == 1).all())
            else:
                assert float(parameter.detach().float().std()) == pytest.approx(0.5, rel=0.05)
                assert abs(float(parameter.detach().float().mean())) < 0.02
    again = resolve_model(f"random://{query}&dtype=bfloat16", tmp_path / "again")
    for file in in_layers.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes()


# --- the cache of a job for models of the hub ---


PROGRAM = f"""
import sys
from rljob_client.errors import RunError
from rljob_trainer.models.lora_targets import require_adaptable
from rljob_trainer.models.resolve import resolve_model
try:
    targets = sys.argv[1:]
    print(resolve_model('hf://{REPOSITORY}', accept=lambda at: targets and require_adaptable(at, targets, 4)))
except RunError as error:
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
    assert "a dense model, not a mixture of experts, found num_experts: 128 in " in refused
    for downloads in (hub.downloads, server.downloads):
        assert downloads["config.json"] == 1
        assert "model.safetensors" not in downloads


def test_only_failures_of_hub_and_network_may_pass() -> None:
    def refused(status: int) -> HfHubHTTPError:
        response = SimpleNamespace(status_code=status, headers={}, request=None)
        return HfHubHTTPError("refused", response=response)  # type: ignore[arg-type]

    assert all(may_pass(refused(status)) for status in (408, 429, 500, 503))
    assert not any(may_pass(refused(status)) for status in (400, 401, 403))
    assert may_pass(ConnectionError("reset by peer"))
    assert not may_pass(OSError(errno.ENOSPC, "No space left on device"))
