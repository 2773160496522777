"""Judges and reward models on vLLM's own server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import vllm

from rljob_api.built_in_rewards import JudgeArgs, RewardModelArgs
from rljob_client.errors import BadInput
from rljob_testing.patience import PATIENCE_SECONDS, eventually
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.rewards import servers
from rljob_trainer.rewards.servers import judge, reward_model
from rljob_trainer.rollout.config import engine_environment

_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@contextmanager
def _served(directory: Path, *options: str) -> Iterator[str]:
    """The address of a server with random weights."""
    # vLLM asks for the version of a distribution of its name; here it comes from the one for CPUs.
    metadata = directory / f"vllm-{vllm.__version__}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm.__version__}+cpu\n")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(resolve_model("random://qwen3")),
    ]
    command += ["--served-model-name", "judge", "--load-format", "dummy", "--dtype", "float32", "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", address.rpartition(":")[2], "--chat-template", _TEMPLATE, *options]
    variables = os.environ | engine_environment("cpu") | {"PYTHONPATH": str(directory), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (
        (directory / "server.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=variables, start_new_session=True) as server,
    ):
        try:
            eventually(
                lambda: server.poll() is not None or _answers(f"http://{address}/health"),
                "a server that answers",
                PATIENCE_SECONDS,
            )
            assert server.poll() is None, (directory / "server.log").read_text()[-2000:]
            yield f"http://{address}"
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # with the process of its engine


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url):
        return True
    return False


@pytest.fixture(autouse=True)
def _own_client() -> None:
    """Connections belong to the event loop of a test."""
    servers._client.cache_clear()


@pytest.mark.long
def test_a_judge_answers_on_vllms_server(tmp_path: Path) -> None:
    with _served(tmp_path) as url:
        args = JudgeArgs(url=f"{url}/v1", model="judge", prompt="{response}", score_pattern="(?s)^(.*)$", max_tokens=8)
        with pytest.raises(BadInput, match=r"got the score '.*', expected a number"):  # random weights write no number
            asyncio.run(judge("What is 1 + 1?", "2", {}, args))


@pytest.mark.long
def test_a_reward_model_scores_on_vllms_server(tmp_path: Path) -> None:
    classifier = '{"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}'
    with _served(tmp_path, "--runner", "pooling", "--hf-overrides", classifier) as url:
        models = [RewardModelArgs(url=url, model="judge", endpoint=each) for each in ("Classify", "Pooling", "Score")]

        async def scored() -> list[float]:
            return [await reward_model("What is 1 + 1?", "2", args) for args in models]

        classified, pooled, compared = asyncio.run(scored())
    assert classified == pooled, "the same text, by two endpoints"
    assert isinstance(compared, float)
