"""The files of checkpoints, which several threads write, and of an exported model in addition to its weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rljob_api.algorithm import AlgorithmSpec
from rljob_api.roles import LoraSpec
from rljob_client.errors import BadInput, OutputUnavailable
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.ledger.checkpoint_manifest import digest_of
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.policy import checkpoint_files
from rljob_trainer.policy.checkpoint import CheckpointWriter
from rljob_trainer.policy.checkpoint_files import ParallelWriter, threads_for
from rljob_trainer.policy.config import PolicyConfig
from rljob_trainer.policy.export import rehearse_output, write_description

STATE = {f"part-{number}": torch.arange(1000 * number, 1000 * (number + 1)).float() for number in range(9)}


@pytest.fixture
def three_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "FILE_BYTES", 12_000)
    monkeypatch.setattr(checkpoint_files, "visible_cores", lambda: 8)


@pytest.mark.usefixtures("three_files")
def test_torch_reads_what_several_threads_have_written(tmp_path: Path) -> None:
    writer = ParallelWriter(tmp_path)
    save(dict(STATE), storage_writer=writer, no_dist=True)
    assert sorted(writer.digests) == ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"]
    assert writer.digests == {name: digest_of(tmp_path / name) for name in writer.digests}
    found: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    load(found, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())


@pytest.mark.usefixtures("three_files")
@pytest.mark.parametrize("lost", [*STATE])
def test_an_error_of_any_thread_is_raised(tmp_path: Path, lost: str) -> None:
    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            if write_item.index.fqn == lost:
                raise OSError("no space left on device")
            return super().resolve_data(write_item)

    with pytest.raises(CheckpointException, match="no space left on device"):
        save(dict(STATE), storage_writer=ParallelWriter(tmp_path), planner=Failing(), no_dist=True)
    assert not (tmp_path / ".metadata").exists()


def test_a_view_is_written_without_the_memory_that_it_belongs_to(tmp_path: Path) -> None:
    save({"row": torch.zeros(1000, 100)[3]}, storage_writer=ParallelWriter(tmp_path), no_dist=True)
    assert (tmp_path / "__0_0.distcp").stat().st_size < 4_000


@pytest.mark.usefixtures("three_files")
def test_files_become_durable_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An fsync of another file then waits for little."""
    sizes: list[int] = []

    def durable(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(checkpoint_files, "_DURABLE_BYTES", 5_000)
    monkeypatch.setattr(os, "fdatasync", durable)
    save(dict(STATE), storage_writer=ParallelWriter(tmp_path), no_dist=True)
    written = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    assert len(sizes) >= written // 10_000
    assert min(sizes) >= 5_000


def test_there_are_as_many_files_as_cores_and_bytes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "visible_cores", lambda: 64)
    gib = 1 << 30
    assert [threads_for(nbytes) for nbytes in (0, gib, 100 * gib)] == [1, 4, 8]
    assert threads_for(None) == 8
    monkeypatch.setattr(checkpoint_files, "visible_cores", lambda: 2)
    assert (threads_for(100 * gib), threads_for(None)) == (2, 2)


def test_a_refused_copy_is_named_and_done_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_arguments: Any, **_options: Any) -> None:
        raise OSError(12, os.strerror(12))

    monkeypatch.setattr("rljob_trainer.policy.host_array.mmap.mmap", refused)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **_options: None)
    writer = CheckpointWriter(copies=True)
    assert writer._memory(3 << 30, of_device=True) is None
    printed = capsys.readouterr().err
    assert (
        "checkpoints are written without a copy: expected 3.0 GiB of host memory for a copy of the policy's" in printed
    )
    assert "optimizerOffload" not in printed
    assert writer._memory(3 << 30, of_device=True) is None
    assert capsys.readouterr().err == "", "it is not tried again"


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


def config_of(source: Path, output: Path, lora: LoraSpec | None = None) -> PolicyConfig:
    return PolicyConfig(source, output, "cpu", "float32", AlgorithmSpec(steps=1), memory=memory_plan(), lora=lora)


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


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4, targets=["q_proj"], export="Adapter")])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_rehearsal_leaves_nothing_behind(source: Path, tmp_path: Path, lora: LoraSpec | None, rank: int) -> None:
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
