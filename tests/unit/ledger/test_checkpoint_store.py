"""Checkpoints are whole, checked and pruned. A full disk keeps committed data and no partial file."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.durable_files import write_atomically
from rljob_client.run_directory.ledger import Ledger
from rljob_trainer.ledger.checkpoint_manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    FileDigest,
    digest_of,
    find_damage,
    share_of_reader,
)
from rljob_trainer.ledger.checkpoint_store import CheckpointStore
from rljob_trainer.ledger.journal import RolloutJournal
from tests.unit.ledger.samples import rollout_batch, step_record


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def write_checkpoint(store: CheckpointStore, step: int) -> Path:
    directory = store.begin(step)
    (directory / "shards").mkdir()
    (directory / "shards" / "rank-0.bin").write_bytes(bytes([step]) * 1000)
    (directory / "optimizer.bin").write_bytes(b"o" * 10)
    return store.commit(step)


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def found(store: CheckpointStore, **search: Any) -> tuple[int, str]:
    """The step of the checkpoint that an attempt finds, 0 without, and the problems of newer ones."""
    result = CheckpointStore(store.directory, store.keep).latest_valid(**search)
    return result.step, "; ".join(result.problems)


def test_the_newest_checkpoints_are_kept_and_found(store: CheckpointStore) -> None:
    assert (found(store), store.oldest_step(), store.newest_step()) == ((0, ""), 0, 0)
    for step in (10, 20, 30):
        write_checkpoint(store, step)
    assert names(store) == ["step-000020", "step-000030"]
    assert (found(store), store.oldest_step(), store.newest_step()) == ((30, ""), 20, 30)
    (store.begin(30) / "optimizer.bin").write_bytes(b"other")
    kept = store.commit(30) / "shards" / "rank-0.bin"
    assert kept.read_bytes() == bytes([30]) * 1000, "a valid checkpoint of the same step is not replaced"
    with pytest.raises(ValueError, match="at least 1"):
        CheckpointStore(store.directory, keep=0)


def test_a_writer_of_an_earlier_attempt_cannot_reach_the_new_files(store: CheckpointStore) -> None:
    """It may still write on an unreachable node; in pods, both controllers have the same process id."""
    stale = store.begin(10)
    new_attempt = CheckpointStore(store.directory, keep=2)
    directory = new_attempt.begin(10)
    (stale / "shard.bin").write_bytes(b"stale")
    assert list(directory.iterdir()) == []
    (directory / "shard.bin").write_bytes(b"new")
    assert (new_attempt.commit(10) / "shard.bin").read_bytes() == b"new"
    new_attempt.latest_valid()
    assert names(new_attempt) == ["step-000010"]


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(999)


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage", "expected"),
    [
        ("shards/rank-0.bin", _flip_a_bit, "shards/rank-0.bin is corrupt (its checksum differs)"),
        ("shards/rank-0.bin", _truncate, "shards/rank-0.bin has 999 bytes instead of 1,000"),
        ("shards", shutil.rmtree, "shards/rank-0.bin is missing"),
        ("checkpoint.json", Path.unlink, "checkpoint.json is missing"),
        ("checkpoint.json", lambda path: path.write_text("{"), "checkpoint.json is corrupt"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_named(
    store: CheckpointStore, file: str, damage: Callable[[Path], None], expected: str
) -> None:
    write_checkpoint(store, 10)
    damage(write_checkpoint(store, 20) / file)
    step, problem = found(store)
    assert step == store.newest_step() == store.oldest_step() == 10
    assert problem.startswith(f"the checkpoint of step 20 is not used: {expected}")
    assert names(store) == ["step-000010", "step-000020.rejected"]
    write_checkpoint(store, 20)
    assert names(store) == ["step-000010", "step-000020"]
    assert found(store) == (20, "")


def test_checkpoints_of_other_steps_are_not_used(store: CheckpointStore) -> None:
    path = write_checkpoint(store, 10)
    path.rename(path.with_name("step-000012"))
    write_checkpoint(store, 20)
    step, problems = found(store, through=19)
    assert step == 0
    assert "step 20 is not used: it is ahead of the ledger, which ends at step 19; " in problems
    assert "checkpoint.json is for step 10" in problems


@pytest.mark.parametrize("killed_at", range(1, 16))
def test_a_kill_at_any_change_of_files_keeps_the_newest_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    for step in (10, 20):
        write_checkpoint(store, step)
    changes = itertools.count(1)

    def mortal(change: Callable[..., Any]) -> Callable[..., Any]:
        def changing(*arguments: Any, **options: Any) -> Any:
            if next(changes) == killed_at:
                raise KeyboardInterrupt
            return change(*arguments, **options)

        return changing

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        for place, name in ((Path, "mkdir"), (Path, "rename"), (os, "fsync"), (shutil, "rmtree")):
            patch.setattr(place, name, mortal(getattr(place, name)))
        write_checkpoint(store, 30)
    assert found(store) in ((20, ""), (30, ""))
    assert set(names(store)) <= {"step-000010", "step-000020", "step-000030"}


def test_files_are_on_disk_before_they_get_their_names(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure, which no test can cause, loses what is written and not synchronized."""
    fsync, rename, replace = os.fsync, Path.rename, Path.replace
    on_disk: set[Path] = set()
    named: list[str] = []

    def synchronize(descriptor: int) -> None:
        on_disk.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def name_only_what_is_on_disk(change: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def named_if_on_disk(path: Path, target: Path) -> Path:
            files = [path, *path.rglob("*")] if path.is_dir() else [path]
            assert on_disk.issuperset(files)
            named.append(target.name)
            return change(path, target)

        return named_if_on_disk

    monkeypatch.setattr(os, "fsync", synchronize)
    monkeypatch.setattr(Path, "rename", name_only_what_is_on_disk(rename))
    monkeypatch.setattr(Path, "replace", name_only_what_is_on_disk(replace))
    write_checkpoint(store, 10)
    assert named == ["checkpoint.json", "step-000010"]


def test_checksums_of_the_writers_are_used_without_reading_their_files(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = store.begin(10)
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata"):
        (directory / name).write_bytes(name.encode())
    digests = {name: digest_of(directory / name) for name in ("__0_0.distcp", "__1_0.distcp")}
    read: list[str] = []

    def reading(path: Path) -> FileDigest:
        read.append(path.name)
        return digest_of(path)

    monkeypatch.setattr("rljob_trainer.ledger.checkpoint_manifest.digest_of", reading)
    store.commit(10, digests=digests)
    assert found(store, use=partial(find_damage, reads=lambda name: name == ".metadata")) == (10, "")
    assert read == [".metadata"] * 2
    assert found(store) == (10, "")
    assert sorted(read[2:]) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


def test_ranks_check_their_own_files_or_equal_shares() -> None:
    names = [".metadata", "__0_0.distcp", "__0_1_0.distcp", "__10_0.distcp", "__1_0_0.distcp", "__1_1_0.distcp"]
    state = set(names[1:])
    assert share_of_reader(names[:3], 0, 1) == {"__0_0.distcp", "__0_1_0.distcp"}
    assert share_of_reader([*names[:3], *names[4:]], 1, 2) == {"__1_0_0.distcp", "__1_1_0.distcp"}
    for ranks in (1, 2, 3, 8):
        shares = [share_of_reader(names, rank, ranks) for rank in range(ranks)]
        assert sorted(name for share in shares for name in share) == sorted(state), "each once"
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("name", ["n" * 70_000, "null\0character", "../" * 500])
def test_an_impossible_file_name_in_a_manifest_is_damage(tmp_path: Path, name: str) -> None:
    digest = FileDigest(size_bytes=1, sha256="0")
    (tmp_path / MANIFEST_NAME).write_bytes(CheckpointManifest(step=3, files={name: digest}).to_json())
    damage = find_damage(tmp_path, step=3)
    assert damage is not None
    assert len(damage) < 300


# --- full disks ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a full disk needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def fill(disk: Path, leave_bytes: int = 0) -> None:
    """Write until `leave_bytes`, in whole pages, are free."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        with suppress(OSError):
            while filler.write(b"x" * 4096) == 4096:
                pass
        filler.truncate(filler.tell() - leave_bytes)


def test_a_commit_on_a_full_disk_keeps_earlier_steps_and_can_be_retried(small_disk: Path) -> None:
    path = small_disk / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.commit(step_record(1))
        before = path.read_bytes()
        fill(small_disk)
        larger_than_the_rest_of_a_page = step_record(2, metrics={f"metric_{i}": 0.5 for i in range(500)})
        with pytest.raises(OutputUnavailable, match=r"is full: .*ledger\.jsonl needs [\d,]+ bytes, 0 are free"):
            ledger.commit(larger_than_the_rest_of_a_page)
        assert path.read_bytes() == before
        (small_disk / "filler").unlink()
        ledger.commit(step_record(2))
    with Ledger(path) as ledger:
        assert ledger.last_step == 2


def test_files_that_do_not_fit_leave_nothing_behind(small_disk: Path) -> None:
    journal = RolloutJournal(small_disk / "journal")
    journal.save(rollout_batch(1))
    write_atomically(small_disk / "summary.json", b"old")
    fill(small_disk, leave_bytes=8192)
    with pytest.raises(OutputUnavailable, match=r"step-000002\.npz needs [\d,]+ bytes, [\d,]+ are free"):
        journal.save(rollout_batch(2, response_tokens=10_000))
    with pytest.raises(OutputUnavailable, match=r"summary\.json needs 50,000 bytes"):
        write_atomically(small_disk / "summary.json", b"n" * 50_000)
    assert (small_disk / "summary.json").read_bytes() == b"old"
    assert journal.find(1) is not None
    files = {path.name for path in small_disk.rglob("*") if path.is_file()}
    assert files == {"step-000001.npz", "summary.json", "filler"}


def test_a_checkpoint_that_does_not_fit_does_not_count(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints", keep=1)
    (store.begin(10) / "weights.bin").write_bytes(b"w" * 20_000)
    fill(small_disk)
    with pytest.raises(OutputUnavailable, match="the disk is full"):
        store.commit(10)
    assert (store.newest_step(), found(store)) == (0, (0, ""))
    (small_disk / "filler").unlink()
    (store.begin(10) / "weights.bin").write_bytes(b"w" * 20_000)
    store.commit(10)
    fill(small_disk, leave_bytes=8192)
    with pytest.raises(OutputUnavailable, match=r"step-000020 needs 20,\d{3} bytes, 8,192 are free"):
        store.begin(20)
    assert found(store) == (10, "")
