from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = """
import json, sys
from pathlib import Path
from tests.unit.trackers.tracked import attempt, sample

directory = Path(sys.argv[1])
with attempt(directory, name="trackio", project="research") as stopped:
    stopped.commit(1, 0.1, metrics={"loss": float("nan")})
    stopped.evaluate(1)
    stopped.listener.samples([sample(1)])
    stopped.recover(1)
with attempt(directory, stopped.records, name="trackio", project="research") as resumed:
    resumed.commit(2, 0.2)

from trackio.sqlite_storage import SQLiteStorage

[run] = SQLiteStorage.get_runs("research")
name = run["name"] if isinstance(run, dict) else run
print("FOUND", json.dumps({
    "name": name,
    "logs": SQLiteStorage.get_logs("research", name),
    "alerts": SQLiteStorage.get_alerts("research"),
}, default=str))
"""


def test_a_local_run_has_steps_evaluations_tables_and_alerts_over_two_attempts(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRACKIO_")}
    environment["PYTHONPATH"] = ":".join(path for path in sys.path if path)
    environment["HOME"] = str(tmp_path / "home")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    assert found["name"].startswith("sums-")
    rewards = [(log["step"], log["reward/mean"]) for log in found["logs"] if "reward/mean" in log]
    assert rewards == [(1, 0.1), (2, 0.2)]
    assert [log["evaluation/avg@8"] for log in found["logs"] if "evaluation/avg@8" in log] == [0.75]
    assert "4 + 3 =" in json.dumps([log["samples/train"] for log in found["logs"] if "samples/train" in log])
    assert [log["summary/steps"] for log in found["logs"] if "summary/steps" in log] == [1, 2]
    assert "Recovered" in json.dumps(found["alerts"])
    assert list((tmp_path / "trackio").iterdir()), "the data is in the output directory"
