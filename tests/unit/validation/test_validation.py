"""`rljob validate` finds everything that can be known before a job starts, and names its line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rljob_api.job import RLJob
from rljob_api.manifest import dotted, load_manifest
from rljob_client.cli import app
from rljob_client.validation.suspicious_values import suspicious_values
from rljob_client.validation.validate_command import findings_in, inspect_job
from rljob_testing.hub_server import served_hub
from rljob_testing.repository import EXAMPLES
from rljob_trainer.hardware import Machine
from rljob_trainer.inspection import Inspection
from rljob_trainer.models.resolve import resolve_model

MODEL = "random://qwen3?hidden=64&layers=2&heads=4&kvHeads=2&headDim=32"
JOB = f"""\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata:
  name: my-task
spec:
  model:
    uri: "{MODEL}"
  task:
    name: jsonl
    args: {{path: prompts.jsonl}}
    reward: rewards:share
  algorithm:
    steps: 3
    promptsPerStep: 2
    maxPromptTokens: 8
    maxResponseTokens: 4
"""
CONFIG_MAP = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: my-task\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    (tmp_path / "rewards.py").write_text(
        "def share(answer, record):\n    return 0.5\n"
        "def trl(completions, **others):\n    return 0.5\n"
        "def raising(answer, record):\n    return record['anwser']\n"
        "def leaving(answer, record):\n    import os; os._exit(7)\n"
    )
    (tmp_path / "on_policy.py").write_text("from rewards import share\nMAX_STALENESS = 0\n")
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def validate(*arguments: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["validate", *map(str, arguments)], input=stdin)


def change(folder: Path, before: str, after: str) -> Path:
    manifest = folder / "job.yaml"
    manifest.write_text(manifest.read_text().replace(before, after))
    return manifest


def inspected(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Fields and messages by severity, found in this process."""
    entries: list[dict[str, Any]] = []
    Inspection(load_manifest(folder / "job.yaml"), folder, entries.append).run()
    found: dict[str, list[tuple[str, str]]] = {"error": [], "warning": [], "note": []}
    for entry in entries:
        if "severity" in entry:
            found[entry["severity"]].append((dotted(entry["field"]), entry["message"]))
    return found


def test_a_job_that_would_run_is_valid(folder: Path) -> None:
    result = validate(folder / "job.yaml")
    assert (result.exit_code, result.output) == (0, f"{folder}/job.yaml: valid\n")


def test_the_memory_of_a_model_of_ordinary_size_is_predicted(folder: Path) -> None:
    uri = "random://qwen3?hidden=512&layers=8&heads=8&kvHeads=4&headDim=64&intermediate=2048&vocabulary=100000"
    entries: list[dict[str, Any]] = []
    change(folder, MODEL, uri)
    change(folder, "steps: 3", "steps: 3\n    learningRate: 0.01")
    inspection = Inspection(load_manifest(folder / "job.yaml"), folder, entries.append)
    inspection._memory(None)
    found = {dotted(entry["field"]): entry["message"] for entry in entries if "severity" in entry}
    assert found["spec.policy"].startswith("predicted on a GPU: host memory ")
    assert found["spec.algorithm.learningRate"] == "0.01 is high for a pretrained model; 1e-6 is the default"


def test_no_problem_hides_another(folder: Path) -> None:
    """Neither one of the schema, nor one of the lengths, nor a missing function hides a missing file."""
    change(folder, "prompts.jsonl", "absent.jsonl")
    change(folder, "rewards:share", "rewards:absent")
    change(folder, "Tokens: 4", "Tokens: 900000")
    manifest = change(folder, "promptsPerStep: 2", "num_generations: 2")
    result = validate(manifest)
    assert result.exit_code == 2
    assert "did you mean groupSize?" in result.stderr
    for message in ("absent.jsonl", "expected a function absent", "the maximum length of the"):
        assert message in result.stderr


def test_no_error_of_a_replaced_value_is_reported(folder: Path) -> None:
    result = validate(change(folder, "name: jsonl", "name: json"))
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == ["spec.task.name"]


@pytest.mark.parametrize(
    ("before", "after", "field", "message"),
    [
        ("rewards:share", "rewards:trl", "task.reward", "returned 0.5, expected a list of 1 numbers"),
        ("rewards:share", "rewards:raising", "task.reward", "raised KeyError: 'anwser'"),
        ("rewards:share", "nothing:share", "task.reward", "cannot import nothing"),
        ("prompts.jsonl", "absent.jsonl", "task.args", "absent.jsonl"),
        ("prompts.jsonl", "rewards.py", "task.args", "rewards.py, line 1: expected one JSON object"),
        ("maxPromptTokens: 8", "maxPromptTokens: 2", "algorithm.maxPromptTokens", "Write algorithm.maxPromptTokens: 4"),
        ("Tokens: 4", "Tokens: 900000", "algorithm.maxPromptTokens", "the maximum length of the model, found 900008"),
        ("hidden=64", "hiden=64", "model.uri", "hiden"),
        ("random:", "oci:", "model.uri", "expected an image as oci://registry/name:tag"),
        *(
            ("steps: 3", f"steps: 3\n    {added}", f"algorithm.{field}", message)
            for added, field, message in [
                ("loss: rewards:share", "loss", "expected the loss from the loss function rewards:share ("),
                ("advantage: rewards:share", "advantage", "expected an array of [prompts, group size] = [2, 8] from"),
                (
                    "learningRateSchedule: {name: cosine, args: {min_lr: 1.0}}",
                    "learningRateSchedule.args",
                    "unexpected keyword argument 'min_lr'",
                ),
            ]
        ),
        *(
            ("spec:\n", f"spec:\n  {added}\n", field, message)
            for added, field, message in [
                ("rollout: {engineArgs: {foo: 1}}", "rollout.engineArgs.foo", "not an engine argument"),
                ("policy: {lora: {targets: [query]}}", "policy.lora", "found query; write some of down_proj"),
                ("policy: {lora: {rank: 512}}", "policy.lora", "lora.rank: expected at most 64"),
                ("rollout: {quantization: Fp8PerBlock}", "rollout.quantization", "64; write Fp8PerChannel"),
            ]
        ),
        (
            "rewards:share\n  algorithm:\n",
            "on_policy:share\n  topology: Disaggregated\n  algorithm:\n    maxStaleness: 1\n",
            "algorithm.maxStaleness",
            "on_policy (task.reward) sets MAX_STALENESS = 0, found 1; write algorithm: {maxStaleness: 0}",
        ),
    ],
)
def test_failures_of_the_job_are_found_before_it_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, field: str, message: str
) -> None:
    for module in ("rewards", "on_policy"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    change(folder, before, after)
    [(found, text)] = inspected(folder)["error"]
    assert found == f"spec.{field}"
    assert message in text


@pytest.mark.parametrize(
    ("template", "severity", "field"),
    [
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}", "error", "systemPrompt"),
        ("{{ strftime_now('%d') }}{{ messages[0].content }}", "warning", "chatTemplate"),
    ],
)
def test_a_chat_template_is_tried_out(folder: Path, template: str, severity: str, field: str) -> None:
    model = shutil.copytree(resolve_model("random://qwen3?hidden=32&layers=1"), folder / "model")
    (model / "chat_template.jinja").write_text(template + "{{ messages[-1].content }}")
    change(folder, MODEL, f"file://{model}")
    change(folder, "name: jsonl", "name: jsonl\n    systemPrompt: Be brief.")
    change(folder, "maxPromptTokens: 8", "maxPromptTokens: 64")
    found = inspected(folder)
    assert f"spec.task.{field}" in dict(found[severity]), found


def test_8_bits_that_this_machine_cannot_compute_are_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(folder, "spec:\n", "spec:\n  rollout: {kvCacheDtype: Fp8}\n")
    for capability, expected in (((9, 0), False), (None, False), ((8, 0), True)):
        machine = Machine((80 << 30,), 64 << 30, 8, capability)
        monkeypatch.setattr("rljob_trainer.inspection.this_machine", lambda machine=machine: machine)
        found = dict(inspected(folder)["warning"])
        assert list(found) == ["spec.rollout.kvCacheDtype"] * expected
    assert "expected Auto on a GPU of compute capability 8.0" in found["spec.rollout.kvCacheDtype"]


def test_an_unusable_job_is_reported_with_its_line(folder: Path) -> None:
    manifest = change(folder, "rewards:share", "rewards:leaving")
    result = validate(manifest)
    assert result.exit_code == 84
    assert f"{manifest}:11: spec.task.reward: the reward function ended the process of the check" in result.stderr
    assert validate("--schema-only", manifest).exit_code == 0


def test_a_check_that_takes_too_long_is_stopped(folder: Path) -> None:
    (folder / "rewards.py").write_text("import time\ntime.sleep(3600)\n")
    (finding,) = inspect_job(load_manifest(folder / "job.yaml"), folder, timeout_seconds=0.05)
    assert finding.severity == "error"
    assert finding.message.endswith(" takes longer than 0.05 s: not checked")


def test_an_interruption_is_blamed_on_the_check_that_began_last(tmp_path: Path) -> None:
    entries = [
        {"check": "the prompts", "field": ["spec", "algorithm", "maxPromptTokens"]},
        {"severity": "note", "field": ["spec", "model", "uri"], "message": "not here"},
        {"check": "the reward function", "field": ["spec", "task", "reward"]},
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, entries)))
    note, blamed = findings_in(tmp_path / "results.jsonl", "takes longer than 9 s: not checked")
    assert (note.severity, note.message) == ("note", "not here")
    assert (blamed.severity, blamed.field) == ("error", ("spec", "task", "reward"))
    assert blamed.message == "the reward function takes longer than 9 s: not checked"


def test_a_warning_is_an_error_only_if_strict(folder: Path) -> None:
    small = "policy: {template: {spec: {containers: [{resources: {limits: {memory: 2Gi}}}]}}}"
    change(folder, "  algorithm:", f"  {small}\n  algorithm:")
    manifest = change(folder, "promptsPerStep: 2", "promptsPerStep: 3")
    result = validate(manifest)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, f"{manifest}: valid, with 2 warnings")
    assert f"{manifest}:15: warning: spec.algorithm.promptsPerStep: the task has 2 prompts" in result.stderr
    assert "expected a memory limit of at least 4.97 GiB in spec.policy.template" in result.stderr
    assert "found 2.00 GiB" in result.stderr
    assert validate("--strict", manifest).exit_code == 2


def test_what_only_the_cluster_has_is_noted(folder: Path) -> None:
    result = validate("--strict", change(folder, "random://qwen3?", "pvc://models/qwen?"))
    assert result.exit_code == 0
    note = "note: spec.model.uri: model and prompt lengths are not checked: pvc://models"
    assert f"{folder}/job.yaml:7: {note}" in result.stdout


def test_a_hub_model_is_checked_without_its_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = change(folder, MODEL, "hf://tests/tiny")
    with served_hub(resolve_model(MODEL, tmp_path / "models")) as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hub")}
        patience = {"HF_HUB_ETAG_TIMEOUT": "60", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
        for name, value in (variables | patience).items():
            monkeypatch.setenv(name, value)
        assert validate(manifest).output.splitlines()[-1] == f"{manifest}: valid"
        assert "config.json" in hub.downloads

        assert "model.safetensors" not in hub.downloads
        absent = validate(change(folder, "hf://tests/tiny", "hf://tests/absent"))
        assert (absent.exit_code, "the hub has no model hf://tests/absent" in absent.stderr) == (84, True)
    unreachable = validate(manifest)
    assert unreachable.exit_code == 0
    assert f"{manifest}:7: warning: spec.model.uri: model and prompt lengths are not checked" in unreachable.stderr


def test_a_data_set_of_an_unreachable_hub_is_a_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    jsonl, of_the_hub = "name: jsonl\n    args: {path: prompts.jsonl}", "name: dataset\n    args: {path: tests/tiny}"
    manifest = change(folder, jsonl, of_the_hub)
    result = validate(manifest)
    assert result.exit_code == 0, result.stderr
    assert f"{manifest}:10: warning: spec.task.args: there is no file or directory" in result.stderr


def test_each_document_of_a_file_is_checked(folder: Path) -> None:
    text = f"{CONFIG_MAP}---\n{JOB}---\n{JOB.replace('steps: 3', 'steps: many')}"
    (folder / "job.yaml").write_text(text)
    result = validate("--schema-only", folder / "job.yaml")
    assert result.exit_code == 2
    assert result.stdout.splitlines() == [
        f"{folder}/job.yaml (document 1): skipped: ConfigMap",
        f"{folder}/job.yaml (document 2): valid",
    ]
    assert result.stderr.startswith(f"{folder}/job.yaml:35 (document 3): spec.algorithm.steps: expected a whole number")


def test_standard_input_is_read() -> None:
    assert validate("--schema-only", "-", stdin=JOB).output == "stdin: valid\n"
    result = validate("-", stdin="kind: [")
    assert (result.exit_code, result.stderr.startswith("stdin:1: is not YAML")) == (2, True)


def test_other_objects_may_stand_beside_a_job_but_not_alone(folder: Path) -> None:
    (folder / "job.yaml").write_text(f"{CONFIG_MAP}---\n{JOB}")
    assert load_manifest(folder / "job.yaml").metadata.name == "my-task"
    (folder / "job.yaml").write_text(f"{CONFIG_MAP}---\n{CONFIG_MAP}")
    result = validate(folder / "job.yaml")
    assert result.exit_code == 2
    assert "found other kinds of objects only" in result.stderr


# --- values that are valid and probably a mistake ---


LORA: dict[str, Any] = {"policy": {"lora": {}}}


def warnings(**spec: Any) -> dict[str, str]:
    algorithm = {"steps": 20} | spec.pop("algorithm", {})
    data = {
        "metadata": {"name": "job"},
        "spec": {"model": {"uri": "hf://org/name"}, "task": {"name": "digits"}, "algorithm": algorithm, **spec},
    }
    job = RLJob.model_validate(data, by_alias=True, by_name=False)
    return {dotted(finding.field): finding.message for finding in suspicious_values(job, data)}


@pytest.mark.parametrize(
    ("spec", "field", "message"),
    [
        ({"memory": {"kvCache": 1}}, "memory.kvCache", "did you mean 1Gi?"),
        ({"memory": {"kvCache": "0.9"}}, "memory.kvCache", "did you mean 0.9Gi?"),
        ({"recovery": {"maxHostMemory": "64"}}, "recovery.maxHostMemory", "did you mean 64Gi?"),
        ({"recovery": None}, "recovery", "has no value"),
        ({"memory": {"microBatchTokens": 10_000_000}}, "memory.microBatchTokens", "more than an update can have"),
        ({"memory": {"microBatchTokens": 100}}, "memory.microBatchTokens", "a prompt and a response can have (768"),
        ({"rollout": {"maxConcurrentSequences": 999}}, "rollout.maxConcurrentSequences", "has (128 responses)"),
        (
            {"algorithm": {"promptsPerStep": 3, "groupSize": 4, "updatesPerStep": 7}},
            "algorithm.updatesPerStep",
            "the 12 responses of a step (promptsPerStep x groupSize) are split into unequal parts of 1 or 2: write a "
            "divisor of 12, such as 6",
        ),
        ({"algorithm": {"groupSize": None}}, "algorithm.groupSize", "has no value: the default 8 applies"),
        (
            {"rollout": {"engineArgs": {"gpu_memory_utilization": 0.5}}},
            "rollout.engineArgs.gpu_memory_utilization",
            "has no effect on the KV cache",
        ),
        ({"algorithm": {"learningRate": 0.01}}, "algorithm.learningRate", "high for a pretrained model"),
        (
            LORA | {"algorithm": {"learningRate": 0.02}},
            "algorithm.learningRate",
            "0.02 is high for adapters of a pretr",
        ),
        ({"checkpoint": {"everySteps": 50}}, "checkpoint.everySteps", "no checkpoint is written before the end"),
        ({"checkpoint": {"volume": {"emptyDir": {}}}}, "checkpoint.volume", "deleted with its pod"),
        ({"env": [{"name": "HF_TOKEN", "value": "hf_x"}]}, "env[0].value", "in plain text"),
        (
            {"policy": {"template": {"spec": {"nodeselector": {}}}}},
            "policy.template.spec.nodeselector",
            "did you mean nodeSelector?",
        ),
    ],
)
def test_a_suspicious_value_is_questioned(spec: dict[str, Any], field: str, message: str) -> None:
    [(found, text)] = warnings(**spec).items()
    assert found == f"spec.{field}"
    assert message in text


@pytest.mark.parametrize(
    "spec",
    [
        {"memory": {"kvCache": "1Gi", "microBatchTokens": 4096}},
        {"memory": {"kvCache": 4294967296}},
        {"algorithm": {"learningRate": 0.003}, "model": {"uri": "random://qwen3"}},
        {"env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}]},
        {"algorithm": {"learningRate": 0.003}, "model": {"uri": "file:///models/tiny"}},
        LORA | {"algorithm": {"learningRate": 0.003}},
        {"rollout": {"engineArgs": {"seed_offset": None}}},
        {"env": [{"name": "HF_ENDPOINT", "value": "https://hub.example.com"}]},
    ],
)
def test_ordinary_values_are_not(spec: dict[str, Any]) -> None:
    assert warnings(**spec) == {}


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_no_example_is_suspicious(example: Any) -> None:
    job = load_manifest(example)
    data = {"spec": job.spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)}
    assert list(suspicious_values(job, data)) == []
