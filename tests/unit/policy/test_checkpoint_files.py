"""Checkpoint files that several threads write are complete, or writing fails."""

from __future__ import annotations

import os
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

from rljob_trainer.ledger.checkpoint_manifest import digest_of
from rljob_trainer.policy import checkpoint_files
from rljob_trainer.policy.checkpoint import CheckpointWriter
from rljob_trainer.policy.checkpoint_files import ParallelWriter, threads_for

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
