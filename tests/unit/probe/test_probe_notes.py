"""Notes of processes that are killed, or discard theirs, while another one reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rljob_probe import notes


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(notes.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(notes, "_own", None)
    return tmp_path


def noted(directory: Path, pid: int, text: str, seconds_ago: float = 0) -> None:
    path = directory / f"{pid}.json"
    path.write_text(text)
    changed_at = path.stat().st_mtime - seconds_ago
    os.utime(path, (changed_at, changed_at))


def test_a_torn_note_does_not_hide_the_others(directory: Path) -> None:
    noted(directory, 1, '{"message": "CUDA out', seconds_ago=60)
    noted(directory, 2, json.dumps({"message": "whole"}), seconds_ago=30)
    noted(directory, 3, json.dumps({"message": "later"}))
    assert notes.earliest_of_others() == {"message": "whole"}


def test_stale_and_unfinished_notes_do_not_count(directory: Path) -> None:
    noted(directory, 1, json.dumps({"message": "old"}), seconds_ago=2 * notes.STALE_SECONDS)
    (directory / "2.json.part").write_text("{}")
    (directory / "3.json").symlink_to(directory / "gone.json")
    assert notes.earliest_of_others() is None


def test_a_note_is_whole_once_it_has_its_name(directory: Path) -> None:
    notes.save({"message": "own"})
    assert [path.name for path in directory.iterdir()] == [f"{os.getpid()}.json"]
    assert json.loads((directory / f"{os.getpid()}.json").read_text()) == {"message": "own"}
    assert notes.earliest_of_others() is None
