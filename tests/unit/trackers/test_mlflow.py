from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from rljob_testing.patience import PATIENCE_SECONDS, eventually
from tests.unit.trackers.tracked import TrackedAttempt, attempt, sample


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a real MLflow server."""
    directory = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (directory / "log").open("wb")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{directory / 'runs.db'}", "--artifacts-destination", str(directory)),
        ],
        stdout=log,
        stderr=log,
        cwd=directory,
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # saves it seven processes
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (directory / "log").read_text()
        try:
            return bool(urllib.request.urlopen(f"{address}/health", timeout=5).status == 200)
        except OSError:
            return False

    try:
        eventually(answers, "the server's answer", timeout=PATIENCE_SECONDS)
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait(60)


def run_of(server: str, directory: Path) -> Run:
    run_id = json.loads((directory / ".trackers" / "mlflow.json").read_text())["run_id"]
    return MlflowClient(server).get_run(run_id)


def history(server: str, directory: Path, name: str) -> list[tuple[int, float]]:
    found = MlflowClient(server).get_metric_history(run_of(server, directory).info.run_id, name)
    return [(metric.step, metric.value) for metric in found]


def test_a_server_has_steps_evaluations_tables_tags_and_the_summary(server: str, tmp_path: Path) -> None:
    args = {"tracking_uri": server, "tags": {"team": "one"}, "description": "a trial"}
    with attempt(tmp_path, name="mlflow", project="research", runName="first", args=args) as run:
        run.commit(1, 0.1, metrics={"loss": float("nan"), "rewards/format": 0.5})
        run.evaluate(1)
        run.listener.samples([sample(1)])
        run.recover(1)
        run.commit(2, 0.2)
    found = run_of(server, tmp_path)
    assert history(server, tmp_path, "reward/mean") == [(1, 0.1), (2, 0.2)]
    assert history(server, tmp_path, "evaluation/avg_8") == [(1, 0.75)]
    assert history(server, tmp_path, "summary/steps") == [(0, 2)]
    assert (found.info.status, found.info.run_name) == ("FINISHED", "first")
    assert found.data.params["algorithm.steps"] == "4"
    assert "in-plain-text" not in str(found.data.params)
    assert found.data.tags["team"] == "one"
    assert "resumed at step 1" in found.data.tags["rljob.Recovered.step-1"]
    assert found.data.tags["rljob.status"] == "Complete"
    client = MlflowClient(server)
    table = json.loads(
        Path(client.download_artifacts(found.info.run_id, "samples/train-000001.json", str(tmp_path))).read_text()
    )
    assert table["columns"][3] == "prompt"
    assert table["data"][0][3] == "4 + 3 ="


def test_a_resumed_run_is_the_same_and_a_deleted_one_begins_again(server: str, tmp_path: Path) -> None:
    args = {"tracking_uri": server}
    with attempt(tmp_path, finish=False, name="mlflow", args=args) as killed:
        killed.commit(1, 0.1)
    first = run_of(server, tmp_path).info.run_id
    with attempt(tmp_path, killed.records, name="mlflow", args=args) as resumed:
        resumed.commit(2, 0.2)
    assert run_of(server, tmp_path).info.run_id == first
    assert history(server, tmp_path, "reward/mean") == [(1, 0.1), (2, 0.2)]
    MlflowClient(server).delete_run(first)
    with attempt(tmp_path, resumed.records, name="mlflow", args=args) as again:
        again.commit(3, 0.3)
    assert run_of(server, tmp_path).info.run_id != first
    assert history(server, tmp_path, "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_without_an_address_the_runs_are_in_the_output_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    output, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    output.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with attempt(output, name="mlflow") as run:
        run.commit(1, 0.1)
        run.listener.samples([sample(1)])
    store = f"sqlite:///{output / 'mlflow.db'}"
    assert history(store, output, "reward/mean") == [(1, 0.1)]
    assert [path.name for path in (output / "mlartifacts").rglob("*.json")] == ["train-000001.json"]
    assert list(elsewhere.iterdir()) == []


def test_a_server_that_never_answers_neither_stops_nor_delays_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://user:hidden-password@127.0.0.1:{silent.getsockname()[1]}"
        run = TrackedAttempt(tmp_path, (), name="mlflow", args={"tracking_uri": address})
        for step in range(1, 2000):  # more than wait at a time
            run.commit(step)
        run.listener.close(time.monotonic() + 0.1)
    [warning] = run.warnings
    assert warning.startswith("the tracker mlflow is too slow")
    assert "hidden-password" not in warning
