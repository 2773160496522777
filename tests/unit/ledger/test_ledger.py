"""The ledger and the journal: committed steps and the rollouts of them survive kills, and damage is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_trainer.errors import OutputUnavailable
from rljob_trainer.ledger.journal import RolloutJournal
from rljob_trainer.ledger.ledger import Ledger, read_ledger
from rljob_trainer.ledger.records import RestoreRecord, step_records
from tests.unit.ledger.samples import rollout_batch, step_record, write_ledger


def test_a_ledger_continues_after_its_last_step(tmp_path: Path) -> None:
    with Ledger(tmp_path / "new.jsonl") as ledger:
        assert (ledger.last_step, list(ledger.remaining(3))) == (0, [1, 2, 3])
    path = write_ledger(tmp_path, [0.1, 0.2])
    with Ledger(path) as ledger:
        assert [list(ledger.remaining(steps)) for steps in (4, 1)] == [[3, 4], []]
        assert [step.reward.mean for step in ledger.steps] == [0.1, 0.2]
        ledger.commit(step_record(3, 0.3))
    assert [step.step for step in step_records(read_ledger(path).records)] == [1, 2, 3]


@pytest.mark.parametrize("step", [1, 2, 4])
def test_only_the_next_step_can_be_committed(tmp_path: Path, step: int) -> None:
    path = write_ledger(tmp_path, [0.1, 0.2])
    before = path.read_bytes()
    with Ledger(path) as ledger, pytest.raises(ValueError, match=f"expected step 3 .* found step {step}"):
        ledger.commit(step_record(step))
    assert path.read_bytes() == before


def test_attempts_are_numbered_and_record_their_first_step(tmp_path: Path) -> None:
    path = write_ledger(tmp_path, [0.1, 0.2])
    with Ledger(path) as ledger:
        attempt = ledger.begin_attempt(2000.0, {"torch": "2"}, {"generation": 1}, {"controller": 7})
        ledger.record(RestoreRecord(attempt=2, checkpoint_step=1, replayed_steps=1))
    assert (attempt.attempt, attempt.resumed_from) == (2, 2)
    reread = read_ledger(path).records
    assert reread[-2] == attempt
    assert reread[-1] == RestoreRecord(attempt=2, checkpoint_step=1, replayed_steps=1)


def test_a_diverged_loss_survives_a_round_trip_as_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.commit(step_record(1, metrics={"loss": float("nan"), "grad_norm": float("inf")}))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    metrics = step_records(read_ledger(path).records)[0].metrics
    assert str(metrics["loss"]) == "nan"
    assert metrics["grad_norm"] == float("inf")


@given(torn_bytes=st.integers(min_value=0), steps=st.integers(min_value=1, max_value=4))
def test_a_kill_at_any_byte_of_an_append_keeps_all_earlier_steps(torn_bytes: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write_ledger(Path(directory), [step / 10 for step in range(steps)])
        whole = path.read_bytes()
        line = step_record(steps + 1).model_dump_json().encode() + b"\n"
        path.write_bytes(whole + line[: torn_bytes % len(line)])

        with Ledger(path) as ledger:
            assert ledger.last_step == steps
            assert path.read_bytes() == whole
            ledger.commit(step_record(steps + 1))
        assert path.read_bytes() == whole + line


def test_reading_leaves_a_line_that_is_being_written_alone(tmp_path: Path) -> None:
    path = write_ledger(tmp_path, [0.1])
    growing = path.read_bytes() + b'{"kind": "st'
    path.write_bytes(growing)
    assert len(step_records(read_ledger(path).records)) == 1
    assert path.read_bytes() == growing


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("garbage", "line 3 is corrupt.*Invalid JSON"),
        ("", "line 3 is corrupt"),
        ('{"kind": "other"}', "line 3 is corrupt.*kind|other"),
        (step_record(3).model_dump_json(), "line 3 is corrupt: expected step 2, found step 3"),
    ],
)
def test_damage_in_the_middle_is_refused_and_names_the_line(tmp_path: Path, line: str, expected: str) -> None:
    path = write_ledger(tmp_path, [0.1, 0.2, 0.3])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[3:]]) + "\n")
    with pytest.raises(OutputUnavailable, match=expected):
        Ledger(path)


def test_a_record_is_on_disk_before_commit_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power failure, which no test can cause, loses what is written and not synchronized."""
    calls: list[tuple[str, int]] = []
    write, fsync = os.write, os.fsync

    def recorded_write(file: int, data: bytes) -> int:
        calls.append(("write", file))
        return write(file, data)

    def recorded_fsync(file: int) -> None:
        calls.append(("fsync", file))
        fsync(file)

    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        monkeypatch.setattr(os, "write", recorded_write)
        monkeypatch.setattr(os, "fsync", recorded_fsync)
        ledger.commit(step_record(1))
        monkeypatch.undo()
    [(first, written), (last, synchronized)] = calls
    assert (first, last) == ("write", "fsync")
    assert written == synchronized


def test_a_confirmed_commit_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    committing = (
        "import sys; from pathlib import Path; from rljob_trainer.ledger.ledger import Ledger\n"
        "from tests.unit.ledger.samples import step_record\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "while True: ledger.commit(step_record(ledger.next_step)); print(ledger.last_step, flush=True)\n"
    )
    root = Path(__file__).parents[3]
    process = subprocess.Popen([sys.executable, "-c", committing, path], cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    for _ in range(20):
        reported = int(process.stdout.readline())
    process.kill()
    reported = max([reported, *map(int, process.stdout.read().splitlines())])
    process.wait()
    with Ledger(path) as ledger:
        assert reported <= ledger.last_step <= reported + 1
        ledger.commit(step_record(ledger.next_step))


@pytest.fixture
def journal(tmp_path: Path) -> RolloutJournal:
    return RolloutJournal(tmp_path / "journal")


def test_saved_rollouts_are_those_of_their_step(journal: RolloutJournal) -> None:
    """`test_rollouts` compares every array of a saved batch."""
    journal.save(rollout_batch(7))
    assert journal.has(7)
    assert not journal.has(8)
    np.testing.assert_array_equal(journal.load(7).response_ids[0], rollout_batch(7).response_ids[0])


@settings(max_examples=40)
@given(kept=st.floats(min_value=0, max_value=1, exclude_max=True))
def test_a_file_torn_at_any_byte_counts_as_absent(tmp_path_factory: pytest.TempPathFactory, kept: float) -> None:
    journal = RolloutJournal(tmp_path_factory.mktemp("journal"))
    journal.save(rollout_batch(3))
    (path,) = journal.directory.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    assert not journal.has(3)


def test_a_flipped_bit_in_the_tokens_counts_as_absent(journal: RolloutJournal) -> None:
    journal.save(rollout_batch(3, response_tokens=100))
    (path,) = journal.directory.iterdir()
    content = bytearray(path.read_bytes())
    content[content.index(np.arange(50, 60, dtype=np.int32).tobytes())] ^= 1
    path.write_bytes(content)
    assert not journal.has(3)


def test_a_file_of_another_step_counts_as_absent(journal: RolloutJournal) -> None:
    journal.save(rollout_batch(3))
    (path,) = journal.directory.iterdir()
    path.rename(path.with_name("step-000004.npz"))
    assert not journal.has(4)
    with pytest.raises(OutputUnavailable, match=r"committed step 4 .* found the file of step 3"):
        journal.load(4)


def test_unusable_rollouts_of_a_committed_step_are_an_error_with_advice(journal: RolloutJournal) -> None:
    with pytest.raises(OutputUnavailable, match=r"committed step 5 in .*step-000005\.npz, found the file missing"):
        journal.load(5)
    journal.save(rollout_batch(5))
    (path,) = journal.directory.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(OutputUnavailable, match=r"found the file corrupt.*Restore the file.*another --output"):
        journal.load(5)


def test_discarding_keeps_the_steps_after(journal: RolloutJournal) -> None:
    for step in (1, 2, 3):
        journal.save(rollout_batch(step))
    (journal.directory / "step-000002.npz.partial").write_bytes(b"torn")
    journal.discard_through(2)
    assert [path.name for path in journal.directory.iterdir()] == ["step-000003.npz"]
