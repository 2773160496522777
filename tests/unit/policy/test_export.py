"""The files of an exported model besides its weights, and their rehearsal before the first step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rljob_client.errors import BadInput, OutputUnavailable
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.policy.config import LoraConfig, PolicyConfig
from rljob_trainer.policy.export import rehearse_output, write_description

REFUSED_BY_TRANSFORMERS = '{"temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 20], "max_new_tokens": 3}'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model with settings that transformers reads, and refuses to save."""
    model = resolve_model("random://qwen3", tmp_path / "cache")
    (model / "generation_config.json").write_text(REFUSED_BY_TRANSFORMERS, encoding="utf-8")
    (model / "LICENSE").write_text("é", encoding="utf-8")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (model / "original").mkdir()
    for untrained in ("flax_model.msgpack", "tf_model.h5", "consolidated.00.pth", "model.safetensors.index.json"):
        (model / untrained).write_text("weights of the initial model")
    return model


def config_of(source: Path, output: Path, lora: LoraConfig | None = None) -> PolicyConfig:
    return PolicyConfig(source, output, "cpu", "float32", learning_rate=1.0, memory=memory_plan(), lora=lora)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({}, {"dtype": "bfloat16"}),
    ],
)
def test_settings_are_written_as_they_are_except_the_data_type(
    source: Path, tmp_path: Path, given: dict[str, Any], written: dict[str, Any]
) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8")) | {"temperature": 0.6}
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config | given), encoding="utf-8")
    write_description(source, tmp_path / "model", torch.bfloat16)
    assert json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8")) == config | written
    assert (tmp_path / "model" / "generation_config.json").read_text(encoding="utf-8") == REFUSED_BY_TRANSFORMERS
    assert {path.relative_to(tmp_path / "model").as_posix() for path in (tmp_path / "model").rglob("*")} == {
        *("LICENSE", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("additional_chat_templates", "additional_chat_templates/tools.jinja"),
    }


@pytest.mark.parametrize("lora", [None, LoraConfig(4, 8.0, ("q_proj",), export="Adapter")])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_rehearsal_leaves_nothing_behind(source: Path, tmp_path: Path, lora: LoraConfig | None, rank: int) -> None:
    run = tmp_path / "run"
    rehearse_output(config_of(source, run, lora), rank)
    assert [path.relative_to(run).as_posix() for path in run.rglob("*")] == ["checkpoints"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_checkpoints_says_so(source: Path, tmp_path: Path, rank: int) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(OutputUnavailable, match=r"checkpoints could not be written"):
        rehearse_output(config_of(source, tmp_path), rank)


def test_an_unreadable_file_of_the_model_is_no_fault_of_the_output(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copyfile(path: Path, _target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with pytest.raises(BadInput, match=r"cannot read .*Permission denied; make it readable"):
        rehearse_output(config_of(source, tmp_path / "run"), 0)
