"""The ledger and the journal: committed steps and the rollouts of them survive kills, and damage is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_client.errors import OutputUnavailable
from rljob_client.run_directory.ledger import Ledger, read_ledger
from rljob_client.run_directory.records import RestoreRecord, step_records
from rljob_testing.repository import ROOT
from rljob_trainer.ledger.journal import RolloutJournal
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
    restored = RestoreRecord(attempt=2, checkpoint_step=1, replayed_steps=1)
    with Ledger(path) as ledger:
        attempt = ledger.begin_attempt(2000.0, {"torch": "2"}, {"generation": 1}, {"controller": 7})
        ledger.record(restored)
    assert (attempt.attempt, attempt.resumed_from) == (2, 2)
    assert read_ledger(path).records[-2:] == [attempt, restored]


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
        path.write_bytes(torn := whole + line[: torn_bytes % len(line)])

        assert len(step_records(read_ledger(path).records)) == steps
        assert path.read_bytes() == torn, "reading leaves a line that is being written alone"
        with Ledger(path) as ledger:
            assert ledger.last_step == steps
            assert path.read_bytes() == whole
            ledger.commit(step_record(steps + 1))
        assert path.read_bytes() == whole + line


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
    calls: list[tuple[Any, int]] = []

    def recorded(call: Callable[..., Any]) -> Callable[..., Any]:
        def recording(file: int, *data: bytes) -> Any:
            calls.append((call, file))
            return call(file, *data)

        return recording

    write, fsync = os.write, os.fsync
    with Ledger(tmp_path / "ledger.jsonl") as ledger, monkeypatch.context() as patch:
        patch.setattr(os, "write", recorded(write))
        patch.setattr(os, "fsync", recorded(fsync))
        ledger.commit(step_record(1))
    assert [call for call, _ in calls] == [write, fsync]
    assert len({file for _, file in calls}) == 1


COMMIT_FOR_EVER = """
import sys
from pathlib import Path
from rljob_client.run_directory.ledger import Ledger
from tests.unit.ledger.samples import step_record
ledger = Ledger(Path(sys.argv[1]))
while True:
    ledger.commit(step_record(ledger.next_step))
    print(ledger.last_step, flush=True)
"""


def test_a_confirmed_commit_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    command = [sys.executable, "-c", COMMIT_FOR_EVER, str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    while process.stdout.readline() != "20\n":
        pass
    process.kill()
    confirmed = [20, *map(int, process.stdout.read().splitlines())][-1]
    process.wait()
    with Ledger(path) as ledger:
        assert confirmed <= ledger.last_step <= confirmed + 1
        ledger.commit(step_record(ledger.next_step))


# --- the journal ---


@pytest.fixture
def journal(tmp_path: Path) -> RolloutJournal:
    return RolloutJournal(tmp_path / "journal")


@settings(max_examples=40)
@given(kept=st.floats(min_value=0, max_value=1, exclude_max=True))
def test_a_file_torn_at_any_byte_counts_as_absent(tmp_path_factory: pytest.TempPathFactory, kept: float) -> None:
    journal = RolloutJournal(tmp_path_factory.mktemp("journal"))
    journal.save(rollout_batch(3))
    (path,) = journal.directory.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    assert journal.find(3) is None


def test_a_damaged_or_misnamed_file_counts_as_absent(journal: RolloutJournal) -> None:
    saved = rollout_batch(3, response_tokens=100)
    journal.save(saved)
    assert [journal.find(step) is None for step in (3, 4)] == [False, True]
    np.testing.assert_array_equal(journal.load(3).response_ids[0], saved.response_ids[0])
    (path,) = journal.directory.iterdir()
    content = bytearray(path.read_bytes())
    path = path.rename(path.with_name("step-000004.npz"))
    assert journal.find(4) is None
    with pytest.raises(OutputUnavailable, match=r"committed step 4 .* found the file of step 3"):
        journal.load(4)
    content[content.index(np.arange(50, 60, dtype=np.int32).tobytes())] ^= 1
    path.with_name("step-000003.npz").write_bytes(content)
    assert journal.find(3) is None


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
