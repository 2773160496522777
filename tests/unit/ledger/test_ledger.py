from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.ledger import Ledger, read_ledger
from rljob_client.run_directory.records import RestoreRecord, step_records
from tests.unit.ledger.samples import step_record, write_ledger


def test_a_new_ledger_starts_at_step_one(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        assert ledger.last_step == 0
        assert list(ledger.remaining(3)) == [1, 2, 3]


def test_a_reopened_ledger_continues_after_its_last_step(tmp_path: Path) -> None:
    path = write_ledger(tmp_path, [0.1, 0.2])
    with Ledger(path) as ledger:
        assert ledger.last_step == 2
        assert list(ledger.remaining(4)) == [3, 4]
        assert [step.reward.mean for step in ledger.steps] == [0.1, 0.2]
        ledger.commit(step_record(3, 0.3))
    assert [step.step for step in step_records(read_ledger(path).records)] == [1, 2, 3]


def test_a_job_with_fewer_steps_than_committed_has_none_left(tmp_path: Path) -> None:
    with Ledger(write_ledger(tmp_path, [0.1, 0.2])) as ledger:
        assert list(ledger.remaining(1)) == []


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
        "import sys; from pathlib import Path; from rljob_client.run_directory.ledger import Ledger\n"
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
