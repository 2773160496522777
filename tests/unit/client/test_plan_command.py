"""`rljob plan`: the verdict, its reasons, other machines, and bad input."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_client.plan_command import PlanOptions, run_plan
from rljob_memory.hardware import GPU_TYPES

QWEN3_8B = "random://qwen3?hidden=4096&intermediate=12288&layers=36&heads=32&kvHeads=8&headDim=128&vocabulary=151936&tied=false"
LONG = {"steps": 2, "maxPromptTokens": 16, "maxResponseTokens": 65_536}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}


def manifest(directory: Path, uri: str = QWEN3_8B, **sections: Any) -> Path:
    spec: dict[str, Any] = {
        "model": {"uri": uri},
        "task": {"name": "digits"},
        "algorithm": {"steps": 2, "maxPromptTokens": 16, "maxResponseTokens": 1024},
        "policy": {"gpusPerReplica": 1},
    }
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "job"}, "spec": spec | sections}
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def planned(capsys: pytest.CaptureFixture[str], path: Path, **options: Any) -> tuple[int, dict[str, Any]]:
    code = run_plan(path, PlanOptions(**options, as_json=True))
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("gpu", "host", "code", "verdict", "gpus"),
    [
        ("h100", "512Gi", 0, "fits at a price", 1),
        ("h200", "512Gi", 0, "fits at a price", 1),
        ("b200", "512Gi", 0, "fits", 1),
        ("a100-40", "512Gi", 1, "does not fit", 4),
    ],
)
def test_the_verdict_and_the_fewest_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: str, host: str, code: int, verdict: str, gpus: int
) -> None:
    found = planned(capsys, manifest(tmp_path), gpu=gpu, host=host)
    assert (found[0], found[1]["verdict"], found[1]["fewestGpus"]) == (code, verdict, gpus)
    again = planned(capsys, manifest(tmp_path), gpu=gpu, gpus=gpus, host="2Ti")
    assert again[0] == 0, "with that many it fits"


def test_lines_add_up_to_the_peaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = planned(capsys, manifest(tmp_path), gpu="h200", host="512Gi")
    lines = [line for line in found["lines"] if line["place"] == "gpu"]
    for phase in ("rollout", "update", "sync"):
        total = sum(line["bytes"] for line in lines if phase in line["phases"])
        assert total == found["peakBytes"]["gpu"]["policy"][phase]
    assert found["secondsPerStep"] == pytest.approx(sum(found["seconds"].values()))


@pytest.mark.parametrize(
    ("gpu", "sections", "first"),
    [
        ("h100", {"memory": {"kvCache": "70Gi"}}, "memory.kvCache: Auto"),
        ("h100", {"algorithm": LONG}, "algorithm.maxResponseTokens: "),
        ("a100-40", {}, "policy.gpusPerReplica: 4"),
        ("h100", {"algorithm": LONG | {"maxPromptTokens": 65_000}}, "h200 GPUs"),
    ],
)
def test_each_change_that_is_named_makes_the_job_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: str, sections: dict[str, Any], first: str
) -> None:
    code, found = planned(capsys, manifest(tmp_path, **sections), gpu=gpu, host="2Ti")
    _, _, changes = found["message"].partition("; it fits with ")
    assert code == 1
    assert changes.startswith(first)
    for change in changes.split(", or with "):
        path, on = manifest(tmp_path, **sections), gpu
        if change.endswith(" GPUs"):
            on = change.removesuffix(" GPUs")
        else:
            job = yaml.safe_load(path.read_text())
            for field in change.split(" and "):
                name, _, value = field.partition(": ")
                section, _, key = name.partition(".")
                job["spec"].setdefault(section, {})[key] = yaml.safe_load(value)
            path.write_text(yaml.safe_dump(job))
        assert run_plan(path, PlanOptions(on, host="2Ti")) == 0, change
        capsys.readouterr()


def test_the_longest_responses_that_fit_are_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def code(tokens: int) -> int:
        algorithm = {"steps": 2, "maxPromptTokens": 16, "maxResponseTokens": tokens}
        return run_plan(manifest(tmp_path, algorithm=algorithm), PlanOptions("h100", 1, "512Gi", as_json=True))

    _, found = planned(capsys, manifest(tmp_path), gpu="h100", gpus=1, host="512Gi")
    longest = found["longestResponseTokens"]
    assert 1024 < longest < 1 << 20
    assert (code(longest), code(longest * 11 // 10)) == (0, 1)


def test_pinned_settings_stay_and_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = manifest(tmp_path, memory={"microBatchTokens": 2080, "optimizerOffload": "Disabled"})
    assert run_plan(path, PlanOptions("b200", 1, "512Gi")) == 0
    printed = capsys.readouterr().out
    assert "microBatchTokens        2080        pinned" in printed
    assert "optimizerOffload        Disabled    pinned" in printed


@pytest.mark.parametrize(
    ("gpus", "given", "row"),
    [
        (4, {}, "2           2 engines"),
        (2, {}, "1           2 engines"),
        (4, {"tensorParallelSize": 4}, "4           pinned"),
    ],
)
def test_the_gpus_of_an_engine_are_part_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gpus: int, given: dict[str, int], row: str
) -> None:
    path = manifest(tmp_path, policy={"gpusPerReplica": gpus}, rollout=given)
    assert run_plan(path, PlanOptions("h200", host="1Ti")) == 0
    printed = capsys.readouterr().out
    assert f"tensorParallelSize      {row}" in printed
    assert ("with rollout.tensorParallelSize: 2, a step is predicted" in printed) is bool(given)


def test_a_sweep_compares_all_types_of_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, manifest(tmp_path), gpu="h100", host="2Ti", sweep=True)
    assert code == 0
    assert found.keys() == GPU_TYPES.keys()
    assert (found["h200"]["gpus"], found["a100-40"]["gpus"]) == (1, 4)
    assert found["b200"]["secondsPerStep"] < found["h100"]["secondsPerStep"]
    assert run_plan(manifest(tmp_path), PlanOptions("h100", host="2Ti", sweep=True)) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("a100-40 ")]
    assert row.split()[:4] == ["a100-40", "39.40", "GiB", "4"]


def test_a_host_that_is_too_small_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(manifest(tmp_path), PlanOptions("b200", 1, "16Gi")) == 1
    assert "of the host, and 15.20 GiB can be used" in capsys.readouterr().out


def test_a_job_on_cpus_needs_host_memory_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "random://qwen3?hidden=64&layers=2&heads=4&kvHeads=2&headDim=32"
    assert run_plan(manifest(tmp_path, small, policy={"gpusPerReplica": 0}), PlanOptions(host="16Gi")) == 0
    printed = capsys.readouterr().out
    assert "parameters on CPUs, 16.00 GiB of host memory" in printed
    assert "s a step" not in printed


def test_a_local_model_is_read_from_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    _, found = planned(capsys, manifest(tmp_path, f"file://{tmp_path}"), gpu="h100")
    assert found["model"]["parameters"] == pytest.approx(596e6, rel=0.01)


def refused(capsys: pytest.CaptureFixture[str], path: Path, **options: Any) -> str:
    """The only sentence about bad input."""
    assert run_plan(path, PlanOptions(**options)) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    return printed.err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"gpu": "h1000"}, "--gpu: expected one of b200, h200,"),
        ({"gpu": "h1000"}, "did you mean h100?"),
        *(({"gpu": gpu}, "--gpu: expected one of") for gpu in ("h2oo", "", "nan", "-5Gi", "NaNGi", "h100,h200", "٣Gi")),
        *(
            ({"gpu": gpu}, "--gpu: expected a size from 1Gi to 64Ti")
            for gpu in ("80", "0Gi", "9999Ti", "1e400Gi", "80Gi\n")
        ),
        *(({"host": host}, "--host: expected a size from") for host in ("lots", "", "1", "-1Gi", "inf", "NaN", "0.5")),
        *(({"gpus": gpus}, f"from 1 to 4,096, found {gpus}") for gpus in (0, -1, 10**9, 10**30)),
    ],
)
def test_bad_options_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], part: str
) -> None:
    assert part in refused(capsys, manifest(tmp_path), **options)


@pytest.mark.parametrize(
    ("uri", "part"),
    [
        ("pvc://claim/model", "expected a model whose size is known here, found pvc://claim/model"),
        ("hf://gpt2", "expected a model whose size is known here"),
        ("file:///absent/model", "expected config.json in the model directory /absent/model, found none"),
        ("s3://a/b", "spec.model.uri"),
        ("random://qwen3?hidden=-5", "expected a model whose size is known here"),
        (f"random://qwen3?hidden={'9' * 40}", "expected a model whose size is known here"),
    ],
)
def test_a_model_of_unknown_size_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], uri: str, part: str
) -> None:
    assert part in refused(capsys, manifest(tmp_path, uri))


def kind(name: str, architecture: str, **more: Any) -> str:
    return json.dumps({**CONFIG, "model_type": name, "architectures": [architecture], **more})


@pytest.mark.parametrize(
    ("config", "part"),
    [
        *(
            (json.dumps({**CONFIG, name: value}), f"expected a positive integer as {name}, at most 16,777,216, found ")
            for name, values in {
                "hidden_size": ("many", -1, 0, 1024.5, True, [8], 10**30, float("nan")),
                "num_hidden_layers": (None, 10**9),
                "num_key_value_heads": (-8, "8", [8]),
                "head_dim": (-3, "x"),
                "vocab_size": (10**15,),
            }.items()
            for value in values
        ),
        (json.dumps({**CONFIG, "num_key_value_heads": 3}), "to divide num_attention_heads, found 3 and 16"),
        (
            json.dumps({**CONFIG, "hidden_size": 1 << 24, "num_hidden_layers": 1 << 24}),
            "expected at most 1e+13 parameters",
        ),
        (json.dumps({name: CONFIG[name] for name in CONFIG if name != "hidden_size"}), "found no 'hidden_size'"),
        (json.dumps({**CONFIG, "architectures": [1]}), "expected architectures in "),
        (kind("mixtral", "MixtralForCausalLM", num_local_experts=8), "not known: the activations of experts"),
        (kind("mamba", "MambaForCausalLM", state_size=16), "not known: the state of recurrent layers"),
        (
            kind("qwen3_next", "Qwen3NextForCausalLM", linear_num_key_heads=16),
            "not known: the state of recurrent layers",
        ),
        (kind("minicpm3", "MiniCPM3ForCausalLM", kv_lora_rank=512), "not known: a compressed KV cache"),
        (kind("t5", "T5ForConditionalGeneration", is_encoder_decoder=True), "not known: an encoder"),
        (kind("qwen2_vl", "Qwen2VLForConditionalGeneration", vision_config={"depth": 32}), "of images or sound"),
        (
            kind("qwen3", "Qwen3ForCausalLM", quantization_config={"quant_method": "awq"}),
            "training of quantized weights",
        ),
        (kind("bert", "BertForMaskedLM"), "not known: its output layer"),
        (kind("new", "NewForCausalLM"), "found NewForCausalLM with model_type: new in "),
        (kind("new", "NewForCausalLM"), "known: num_hidden_layers 28, hidden_size 1024, num_attention_heads 16"),
        ("[1]", "expected a JSON object in "),
        ("", "cannot read "),
        (json.dumps(CONFIG).encode("utf-16"), "cannot read "),
        (bytes(range(256)), "cannot read "),
        ("[" * 100_000, "cannot read "),
        ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_a_model_that_is_not_understood_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str | bytes, part: str
) -> None:
    (tmp_path / "config.json").write_bytes(config if isinstance(config, bytes) else config.encode())
    assert part in refused(capsys, manifest(tmp_path, f"file://{tmp_path}"), gpu="h100")


def test_a_configuration_that_is_no_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, config = manifest(tmp_path, f"file://{tmp_path}"), tmp_path / "config.json"
    os.mkfifo(config)
    assert "found no regular file" in refused(capsys, path)
    config.unlink()
    config.symlink_to(config)
    assert "Too many levels of symbolic links" in refused(capsys, path)


BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{{', '.join(f'k{key}: *a{n - 1}' for key in range(9))}}}\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "expected an RLJob, found an empty file"),
        (b"- 1\n", "found a list"),
        (b"42\n", "found the text 42"),
        (b"a: [1, 2\nb: }", "is not YAML"),
        (b"\x92\x00", "expected UTF-8 text"),
        ("kind: RLJob\n".encode("utf-16"), "found UTF-16"),
        (b"a: &a {b: *a}\n", "an alias that contains itself"),
        (BOMB.encode(), "found more than 100000 fields, aliases included"),
        (b"[" * 10_000, "too many levels of nesting"),
        (b"a: 1\n" * (1 << 20), "expected at most 2 MiB"),
    ],
)
def test_a_file_that_is_no_manifest_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, part: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    assert part in refused(capsys, path)


def test_an_invalid_manifest_is_reported_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("apiVersion: rljob.dev/v1alpha1\nkind: RLJob\nmetadata: {name: a}\nspec: {}\n")
    assert run_plan(path, PlanOptions()) == 2
    assert f"{path}:4" in capsys.readouterr().err


def test_it_imports_neither_torch_nor_numpy_and_is_quick(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from rljob_client.plan_command import PlanOptions, run_plan\n"
        "from pathlib import Path\n"
        f"run_plan(Path({str(manifest(tmp_path))!r}), PlanOptions('h100', 1, '512Gi'))\n"
        "found = {'torch', 'numpy', 'safetensors', 'transformers', 'vllm', 'ray'} & sys.modules.keys()\n"
        "sys.exit(f'imported {found}' if found else 0)\n"
    )
    began = _seconds_of_children()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert _seconds_of_children() - began < 3, "0.7 s if the machine does nothing else"


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
