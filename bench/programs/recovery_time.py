"""Seconds until a job has recovered from a failure, by part.

    python -m bench.programs.recovery_time [--manifest FILE] [--name recovery_time_h200]

Each of four recoveries has a run of its own with an injected fault: a retry in the same process, a new policy
(checkpoint and replay), a new engine, and a new attempt after a lost process. The start of the job is recorded for
comparison. Records `recovery_time.json`: seconds in all and by part (processes: spawn and imports; policy: model load;
engine: its start, on the CPU at the same time as the policy's load; checkpoint; replay; sync; for whole attempts also
reading and ray). Uses GPUs if there are any.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from bench.harness.record import RESULTS, record
from rljob_testing.repository import EXAMPLES

DIGITS = EXAMPLES / "digits.yaml"
TIMEOUT_SECONDS = 580
SHRINKABLE_KV_CACHE_BYTES = 256 << 20

ARMS = {
    "same process": "ActivationSpike@update:3",
    "new policy": "OptimizerState@optimizer:3",
    "new engine": "KVCacheOversized@rollout:3",
    "new attempt": "WorkerLost@update:3",
}


def main(manifest: Path, steps: int, device: str, directory: Path, name: str, arms: list[str]) -> None:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        job = short_job(manifest, steps, Path(scratch) / "job.yaml")
        plan = Path(scratch) / "plan.json"
        for arm in arms:
            output = Path(scratch) / arm.replace(" ", "-")
            rows.extend(measured(arm, job, device, output, plan))
            keep_plan_with_room(output / "ledger.jsonl", plan)
            # After each arm, so that its result is kept if a later one fails.
            path = record(name, rows, f"{manifest.name}, {steps} steps, a fault in step 3", directory)
    print_rows(rows)
    print(path)


def short_job(manifest: Path, steps: int, path: Path) -> Path:
    """The job of `manifest` with few steps and with fault injection enabled."""
    job = yaml.safe_load(manifest.read_text())
    job["spec"]["algorithm"]["steps"] = steps
    job["spec"]["faultInjection"] = {"enabled": True}
    path.write_text(yaml.safe_dump(job))
    return path


def keep_plan_with_room(ledger: Path, plan: Path) -> None:
    """Write the run's first plan with a KV cache that can shrink; that of a tiny model is already the smallest."""
    if ledger.exists() and not plan.exists():
        records = [json.loads(line) for line in ledger.read_text().splitlines()]
        first = next(record["plan"] for record in records if record["kind"] == "attempt")
        first["kvCache"] = max(first["kvCache"], SHRINKABLE_KV_CACHE_BYTES)
        plan.write_text(json.dumps(first))


def measured(arm: str, job: Path, device: str, output: Path, plan: Path) -> list[dict[str, Any]]:
    """The row of the arm, after a row for the start of the attempt. A failure is recorded in the row."""
    command: list[str | Path] = [sys.executable, "-m", "rljob_trainer", "run", job]
    command += ["--output", output, "--device", device, "--fault", ARMS[arm]]
    command += ["--plan", plan] if arm == "new engine" and plan.exists() else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [{"arm": arm, "failed": f"not done within {TIMEOUT_SECONDS} s"}]
    if done.returncode != 0:
        return [{"arm": arm, "failed": (done.stdout + done.stderr)[-2_000:]}]
    ledger = [json.loads(line) for line in (output / "ledger.jsonl").read_text().splitlines()]
    starts = [line["seconds"] for line in ledger if line["kind"] == "ready"]
    changes = [line for line in ledger if line["kind"] == "plan_change" and line["change"]["secondsToRecover"]]
    rows = [row(f"first start ({arm})", sum(starts[0].values()), starts[0])]
    if arm == "new attempt":
        return [*rows, row(arm, sum(starts[1].values()), starts[1])]
    return [*rows, *(row(arm, line["change"]["secondsToRecover"], line["seconds"]) for line in changes)]


def row(arm: str, seconds: float, parts: dict[str, float]) -> dict[str, Any]:
    return {"arm": arm, "seconds": round(seconds, 3), "parts": {name: round(part, 3) for name, part in parts.items()}}


def print_rows(rows: list[dict[str, Any]]) -> None:
    for found in rows:
        if "failed" in found:
            print(f"{found['arm']}: failed: {found['failed']}")
            continue
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found["parts"].items())
        print(f"{found['arm']}: {found['seconds']:.1f} s ({parts})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--manifest", type=Path, default=DIGITS)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the record")
    parser.add_argument("--name", default="recovery_time", help="of the record; of one H200: recovery_time_h200")
    parser.add_argument("--arm", action="append", choices=list(ARMS), help="default: all")
    arguments = parser.parse_args()
    arms = arguments.arm or list(ARMS)
    main(arguments.manifest, arguments.steps, arguments.device, arguments.output, arguments.name, arms)
