from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from rljob_api.tracking import TrackerSpec
from rljob_trainer.trackers.registry import is_installed, unknown_args
from tests.unit.trackers.tracked import attempt, sample


def metrics(directory: Path) -> pd.DataFrame:
    """The numbers by step and name, as the table of trackers in the docs describes the file."""
    rows = pd.read_csv(directory / "metrics.csv").drop_duplicates(["step", "name"], keep="last")
    return rows.pivot(index="step", columns="name", values="value")


def test_numbers_and_notes_of_two_attempts_are_in_the_files(tmp_path: Path) -> None:
    with attempt(tmp_path, name="csv") as stopped:
        stopped.commit(1, 0.1, metrics={"loss": float("nan"), 'rewards/a "b", c': 0.5})
        stopped.evaluate(1)
        stopped.listener.samples([sample(1)])
        stopped.recover(1)
    with attempt(tmp_path, stopped.records, name="csv") as resumed:
        resumed.commit(2, 0.2)
    found = metrics(tmp_path / "csv")
    assert found["reward/mean"].tolist() == [0.1, 0.2]
    assert found.loc[1, 'rewards/a "b", c'] == 0.5
    assert found.loc[1, "evaluation/avg@8"] == 0.75
    assert found["loss"].isna().tolist() == [True, False]
    notes = pd.read_csv(tmp_path / "csv" / "notes.csv")
    assert notes[["step", "title"]].values.tolist() == [[1, "Recovered"]]
    assert "resumed at step 1" in notes["text"][0]


@pytest.mark.parametrize("torn", ["3,1003.0,rew", "3,1003.0,reward/mean,0.9\n3,1003.0,"])
def test_a_step_that_was_written_in_part_is_written_again(tmp_path: Path, torn: str) -> None:
    with attempt(tmp_path, finish=False, name="csv", args={"logdir": "tables"}) as killed:
        killed.commit(1, 0.1)
        killed.commit(2, 0.2)
    with (tmp_path / "tables" / "metrics.csv").open("a") as file:
        file.write(torn)
    with attempt(tmp_path, killed.records, name="csv", args={"logdir": "tables"}) as resumed:
        resumed.commit(3, 0.3)
    assert metrics(tmp_path / "tables")["reward/mean"].tolist() == [0.1, 0.2, 0.3]


def test_it_needs_no_library_and_has_one_argument() -> None:
    spec = TrackerSpec(name="csv", args={"logdir": "tables", "log_dir": "tables"})
    assert is_installed(spec)
    [(path, message)] = unknown_args([spec]).items()
    assert path == ("spec", "tracking", 0, "args", "log_dir")
    assert message == "csv has no such argument; did you mean logdir?"
