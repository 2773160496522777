"""On a full file system, committed data is kept and no partial file remains."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.durable_files import write_atomically
from rljob_client.run_directory.ledger import Ledger
from rljob_trainer.ledger.checkpoint_store import CheckpointStore
from rljob_trainer.ledger.journal import RolloutJournal
from tests.unit.ledger.samples import rollout_batch, step_record

DISK_BYTES = 64 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", tmp_path], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a full disk needs the right to mount a tmpfs: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def fill(disk: Path, leave_bytes: int = 0) -> None:
    """Write until `leave_bytes`, in whole pages, are free."""
    (disk / "filler").unlink(missing_ok=True)
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(b"x" * 4096) == 4096:
                pass
        except OSError:
            pass
        filler.truncate(filler.tell() - leave_bytes)


def test_a_commit_on_a_full_disk_keeps_earlier_steps_and_can_be_retried(small_disk: Path) -> None:
    path = small_disk / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.commit(step_record(1))
        fill(small_disk)
        with pytest.raises(
            OutputUnavailable, match=r"the disk is full: .*ledger\.jsonl needs [\d,]+ bytes, 0 are free"
        ):
            # More than what is left of the file's last page.
            ledger.commit(step_record(2, metrics={f"metric_{i}": 0.5 for i in range(500)}))
        assert path.read_bytes().count(b"\n") == 1
        assert path.read_bytes().endswith(b"\n")

        (small_disk / "filler").unlink()
        ledger.commit(step_record(2))
    with Ledger(path) as ledger:
        assert ledger.last_step == 2


def test_rollouts_that_do_not_fit_leave_nothing_behind(small_disk: Path) -> None:
    journal = RolloutJournal(small_disk / "journal")
    journal.save(rollout_batch(1))
    fill(small_disk, leave_bytes=8192)
    with pytest.raises(OutputUnavailable, match=r"step-000002\.npz needs [\d,]+ bytes, [\d,]+ are free"):
        journal.save(rollout_batch(2, response_tokens=10_000))
    assert [path.name for path in journal.directory.iterdir()] == ["step-000001.npz"]
    assert journal.has(1)


def test_a_replaced_file_keeps_its_old_content(small_disk: Path) -> None:
    path = small_disk / "summary.json"
    write_atomically(path, b"old")
    fill(small_disk)
    with pytest.raises(OutputUnavailable, match=r"summary\.json needs 50,000 bytes"):
        write_atomically(path, b"n" * 50_000)
    assert path.read_bytes() == b"old"
    assert {file.name for file in small_disk.iterdir()} == {"summary.json", "filler"}


def test_a_checkpoint_that_does_not_fit_is_not_started(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints", keep=1)
    (store.begin(10) / "weights.bin").write_bytes(b"w" * 20_000)
    store.commit(10)
    fill(small_disk, leave_bytes=8192)
    with pytest.raises(OutputUnavailable, match=r"step-000020 needs 20,\d{3} bytes, 8,192 are free"):
        store.begin(20)
    found = store.latest_valid()
    assert found.checkpoint
    assert found.checkpoint.step == 10


def test_a_checkpoint_whose_manifest_does_not_fit_is_not_counted(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints", keep=1)
    (store.begin(10) / "weights.bin").write_bytes(b"w" * 4096)
    fill(small_disk)
    with pytest.raises(OutputUnavailable, match="the disk is full"):
        store.commit(10)
    assert store.newest_step() == 0
    assert store.latest_valid().checkpoint is None
