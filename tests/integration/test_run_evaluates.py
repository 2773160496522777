"""A run with evaluations that is killed between them, and its exported models."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from rljob_client.cli import app
from rljob_testing.runs import FinishedRun, rljob_run, write_manifest
from tests.integration.compared_runs import assert_same_end, completed_run, stop_after

STEPS = 8
EVALUATION = {
    "task": {"name": "digits"},
    "everySteps": 3,
    "samplesPerPrompt": 4,
    "temperature": 1.0,
    "topP": 0.9,
    "maxResponseTokens": 2,
    "keepBest": True,
    "bestMetric": "reward_mean",
    "successReward": 0.5,
}


def manifest_of(directory: Path, **changes: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    algorithm = {"steps": STEPS, "promptsPerStep": 4, "groupSize": 4}
    checkpoint = {"everySteps": 2, "exportEverySteps": 4, "keepExports": 1}
    return write_manifest(directory / "job.yaml", **{"algorithm": algorithm, "checkpoint": checkpoint, **changes})


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run with evaluations, killed after step 4, and completed."""
    directory = tmp_path_factory.mktemp("evaluated")
    manifest = manifest_of(directory, evaluation=EVALUATION, recovery={"maxRestarts": 0})
    code, printed = stop_after(4, "controller", signal.SIGKILL, manifest, directory / "run")
    assert code == -signal.SIGKILL, printed
    return completed_run(manifest, directory / "run")


def evaluations(run: FinishedRun) -> list[dict[str, Any]]:
    return [line for line in run.ledger if line["kind"] == "evaluation"]


def test_training_has_the_same_bits_with_and_without_evaluation(evaluated: FinishedRun, tmp_path: Path) -> None:
    assert_same_end(evaluated, completed_run(manifest_of(tmp_path), tmp_path / "run"))


def test_each_step_is_evaluated_once_and_reported(evaluated: FinishedRun) -> None:
    found = evaluations(evaluated)
    assert [line["step"] for line in found] == [0, 3, 6, 8]
    assert [line["attempt"] for line in found][-1] == 2
    for line in found:
        metrics = line["metrics"]
        assert 0 <= metrics["pass@1"] <= metrics["pass@2"] <= metrics["pass@4"] <= 1
        assert metrics["response_max_tokens"] <= 2
        assert f"evaluation after step {line['step']}  reward " in evaluated.printed or line["attempt"] == 1
    summary = evaluated.summary["evaluation"]
    best = max(found, key=lambda line: line["metrics"]["reward_mean"])
    assert (evaluated.summary["evaluations"], summary["last"]["step"]) == (4, 8)
    assert summary["best"]["step"] == best["step"]
    assert summary["best"]["score"] == best["metrics"]["reward_mean"]


def test_exported_models_are_loaded_by_transformers(evaluated: FinishedRun) -> None:
    score = json.loads((evaluated.output / "best" / "evaluation.json").read_text())
    assert score["step"] == evaluated.summary["evaluation"]["best"]["step"]
    assert [path.name for path in (evaluated.output / "models").iterdir()] == ["step-000008"]
    for path in ("best", "models/step-000008", "model"):
        model = AutoModelForCausalLM.from_pretrained(evaluated.output / path)
        tokenizer = AutoTokenizer.from_pretrained(evaluated.output / path)
        with torch.no_grad():
            logits = model(**tokenizer("7:", return_tensors="pt")).logits
        assert bool(torch.isfinite(logits).all())
    of_step, last = (
        load_file(evaluated.output / path / "model.safetensors") for path in ("models/step-000008", "model")
    )
    assert all((of_step[name] == last[name]).all() for name in last)


def export(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_model_of_a_checkpoint_has_the_bits_of_the_runs_own_export(evaluated: FinishedRun, tmp_path: Path) -> None:
    code, printed = export(evaluated.output, "--step", 8, "--output", tmp_path / "copied")
    assert code == 0, printed
    (evaluated.output / "models").rename(tmp_path / "models")
    try:
        code, printed = export(evaluated.output, "--output", tmp_path / "exported")
        assert code == 0, printed
    finally:
        (tmp_path / "models").rename(evaluated.output / "models")
    files = {path.name for path in (evaluated.output / "model").iterdir()}
    assert {path.name for path in (tmp_path / "exported").iterdir()} == files
    for name in files:
        assert (tmp_path / "exported" / name).read_bytes() == (evaluated.output / "model" / name).read_bytes(), name
    code, printed = export(evaluated.output, "--step", 6, "--output", tmp_path / "earlier")
    assert code == 0, printed
    assert (
        load_file(tmp_path / "earlier/model.safetensors").keys()
        == load_file(tmp_path / "exported/model.safetensors").keys()
    )
    code, printed = export(evaluated.output, "--step", "best", "--output", tmp_path / "best")
    assert code == 0, printed
    assert (tmp_path / "best" / "evaluation.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["--step", "5"], 85, "of step 5, found those of these steps: 6, 8"),
        (["--step", "last"], 2, "expected the number of a step, or best"),
        (["--step", "6", "--output", "."], 85, "expected no directory ., or an empty one"),
    ],
)
def test_an_export_that_cannot_be_made_is_explained(
    evaluated: FinishedRun, arguments: list[str], code: int, expected: str
) -> None:
    found, printed = export(evaluated.output, *arguments)
    assert (found, expected in printed) == (code, True), printed


def test_a_damaged_checkpoint_or_another_directory_is_not_exported(evaluated: FinishedRun, tmp_path: Path) -> None:
    code, printed = export(tmp_path)
    assert (code, "expected the output directory of a run" in printed) == (85, True), printed
    shard = next((evaluated.output / "checkpoints" / "step-000006").glob("*.distcp"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        code, printed = export(evaluated.output, "--step", 6, "--output", tmp_path / "damaged")
    finally:
        shard.write_bytes(whole)
    assert (code, "is corrupt (its checksum differs)" in printed) == (85, True), printed
    assert not (tmp_path / "damaged").exists()


@pytest.mark.parametrize("form", ["Merged", "Adapter"])
def test_adapters_of_a_checkpoint_are_exported_like_those_of_the_run(tmp_path: Path, form: str) -> None:
    policy = {"lora": {"rank": 4, "export": form}}
    run = completed_run(
        manifest_of(tmp_path, policy=policy, algorithm={"steps": 2, "learningRate": 0.01}), tmp_path / "run"
    )
    code, printed = export(run.output, "--output", tmp_path / "exported")
    assert code == 0, printed
    files = {path.name for path in (run.output / "model").iterdir()}
    assert {path.name for path in (tmp_path / "exported").iterdir()} == files
    [weights] = [name for name in files if name.endswith(".safetensors")]
    own, exported = (load_file(directory / weights) for directory in (run.output / "model", tmp_path / "exported"))
    assert own.keys() == exported.keys()
    assert all((own[name] == exported[name]).all() for name in own)


# --- the hub ---


class _Hub(BaseHTTPRequestHandler):
    """Accepts one token."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        allowed = self.headers.get("Authorization") == "Bearer hf_right"
        content = b'{"url": "http://hub/org/name", "error": "Invalid username or password."}'
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_arguments: object) -> None:
        pass


@contextmanager
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_refused_token_loses_nothing(evaluated: FinishedRun, tmp_path: Path) -> None:
    from rljob_testing.runs import start_rljob

    with hub() as url:
        process = start_rljob(
            "export",
            evaluated.output,
            "--output",
            tmp_path / "exported",
            "--push-to-hub",
            "org/name",
            HF_ENDPOINT=url,
            HF_TOKEN="hf_wrong",
            HF_HUB_OFFLINE="0",
            HF_HOME=str(tmp_path / "home"),
        )
        printed = process.communicate()[0]
    assert process.returncode == 84, printed
    assert "the hub refuses the token for org/name (401): set HF_TOKEN to a token with write access" in printed
    assert f"The model is in {tmp_path / 'exported'}: nothing is lost" in printed
    assert "hf_wrong" not in printed
    assert (tmp_path / "exported" / "model.safetensors").is_file()


# --- bad input ---


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        ({"heldOut": 10}, "expected evaluation.heldOut to be less than 10"),
        (
            {"task": {"name": "jsonl", "args": {"path": "empty.jsonl"}, "reward": "scores:score"}},
            "evaluation: expected at least one item in the task jsonl, found none",
        ),
        (
            {"task": {"name": "jsonl", "args": {"path": "none.jsonl"}, "reward": "scores:score"}},
            "evaluation: task.args.path: expected a file with prompts in",
        ),
    ],
)
def test_an_evaluation_without_prompts_is_refused_before_the_start(
    tmp_path: Path, evaluation: dict[str, Any], expected: str
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "scores.py").write_text("def score(answer, record):\n    return 0.0\n")
    manifest = manifest_of(tmp_path)
    job = yaml.safe_load(manifest.read_text())
    job["spec"]["evaluation"] = evaluation
    manifest.write_text(yaml.safe_dump(job))
    run = rljob_run(manifest, tmp_path / "run")
    assert run.exit_code == 84, run.printed
    assert expected in run.printed
    result = CliRunner().invoke(app, ["validate", str(manifest)])
    assert result.exit_code == 84, result.output
    assert expected.removeprefix("evaluation: ") in result.output
