from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto import wandb_internal_pb2

from rljob_testing.patience import eventually
from tests.unit.trackers.tracked import attempt, sample


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb-home"))


def records(directory: Path) -> Iterator[wandb_internal_pb2.Record]:
    """The records of all offline runs in the directory, in the order of the runs."""
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for data in leveldb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            yield record


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, after a header of 7 bytes. Blocks have 32 KiB; a part of a record has
    its checksum, length and type before it: 1 whole, 2 first, 3 middle, 4 last."""
    place, whole = 7, b""
    while place + 7 <= len(log):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", log, place + 4)
        whole += log[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def wait_until_written(directory: Path, runs: int) -> None:
    """W&B's own process closes the files after the run is finished."""

    def ends() -> bool:
        return [record.WhichOneof("record_type") for record in records(directory)].count("exit") == runs

    eventually(ends, "the end of every run in its file")


def values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def history(directory: Path, name: str) -> list[tuple[int, Any]]:
    rows = [
        values(record.history.item) for record in records(directory) if record.WhichOneof("record_type") == "history"
    ]
    return [(row["step"], row[name]) for row in rows if name in row]


def test_an_offline_run_has_steps_evaluations_tables_tags_and_the_summary(tmp_path: Path) -> None:
    with attempt(tmp_path, name="wandb", project="research", args={"tags": ["grpo"], "group": "one"}) as run:
        run.commit(1, 0.1, metrics={"loss": 0.25, "rewards/format": 0.5})
        run.evaluate(1)
        run.listener.samples([sample(1)])
        run.recover(1)
        run.commit(2, 0.2)
    wait_until_written(tmp_path, 1)
    assert history(tmp_path, "reward/mean") == [(1, 0.1), (2, 0.2)]
    assert history(tmp_path, "evaluation/avg@8") == [(1, 0.75)]
    assert history(tmp_path, "rewards/format") == [(1, 0.5)]
    [table] = tmp_path.glob("wandb/offline-run-*/files/media/table/samples/*.json")
    assert json.loads(table.read_text())["data"][0][3:6] == ["4 + 3 =", "It is | 7.\nYes.", 1.0]
    last = [record.run for record in records(tmp_path) if record.WhichOneof("record_type") == "run"][-1]
    assert (last.project, last.display_name, last.run_group) == ("research", "sums", "one")
    assert list(last.tags) == ["grpo", "Recovered"]
    assert "resumed at step 1" in last.notes
    first = next(record.run for record in records(tmp_path) if record.WhichOneof("record_type") == "run")
    config = values(first.config.update)
    assert config["algorithm"]["steps"] == 4
    assert "in-plain-text" not in json.dumps(config)
    summary: dict[str, Any] = {}
    for record in records(tmp_path):
        if record.WhichOneof("record_type") == "summary":
            summary |= values(record.summary.update)
    assert (summary["status"], summary["steps"]) == ("Complete", 2)


def test_a_resumed_run_has_the_same_id_and_the_steps_that_were_not_reported(tmp_path: Path) -> None:
    with attempt(tmp_path, name="wandb") as stopped:
        stopped.commit(1, 0.1)
    with attempt(tmp_path, stopped.records, name="wandb") as resumed:
        resumed.commit(2, 0.2)
    wait_until_written(tmp_path, 2)
    assert history(tmp_path, "reward/mean") == [(1, 0.1), (2, 0.2)]
    runs = {record.run.run_id for record in records(tmp_path) if record.WhichOneof("record_type") == "run"}
    assert runs == {json.loads((tmp_path / ".trackers" / "wandb.json").read_text())["run_id"]}


UNREACHABLE = """
import sys, time
from pathlib import Path
from rljob_testing.patience import eventually
from tests.unit.trackers.tracked import TrackedAttempt

if __name__ == "__main__":
    run = TrackedAttempt(Path(sys.argv[1]), (), name="wandb", args={"settings": {"init_timeout": 1}})
    run.commit(1)
    run.listener.close(time.monotonic() + 60)
    print(run.warnings)
"""


def test_a_server_that_is_not_reachable_causes_one_warning_without_the_key(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": "0123456789" * 4,
        "PYTHONPATH": ":".join(path for path in sys.path if path),
    }
    done = subprocess.run(
        [sys.executable, "-c", UNREACHABLE, str(tmp_path)],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("[")]
    assert line.count("the tracker wandb failed") == 1, done.stdout
    assert "0123456789" not in line
