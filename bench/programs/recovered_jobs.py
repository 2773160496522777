"""Jobs that run out of memory on this machine, each without recovery and with it.

    python -m bench.programs.recovered_jobs --output DIR [--jobs FILE] [--only JOB …] [--device cpu]

The jobs are in bench/programs/failing_jobs.yaml, which describes its fields. After each job, `DIR/recovered_jobs.json`
is complete up to that job and `DIR/recorded.tar.gz` has the ledgers and the evidence. A second run with the same DIR
resumes with the jobs that are not recorded there; to extend an older record, put it into DIR. About two minutes per job
on one H200.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import yaml

from bench.harness.record import record
from rljob_api.exit_codes import ExitCode
from rljob_client.run_directory.records import (
    PlanChangeRecord,
    ReadyRecord,
    parse_record,
    plan_change_records,
    step_records,
)
from rljob_memory.sizes import GIB
from rljob_testing.ballast import DriverError, ballast
from rljob_testing.induced_failures.induce import diagnose
from rljob_testing.induced_failures.recorded_evidence import pack
from rljob_testing.machine import run_for

JOBS = Path(__file__).with_name("failing_jobs.yaml")
LONGEST_RUN_SECONDS = 150
# Compiled kernels would save memory that these jobs are to run out of, and take long to make.
VARIABLES = {"TORCH_COMPILE_DISABLE": "1"}
OUT_OF_MEMORY = (ExitCode.DEVICE_OUT_OF_MEMORY, ExitCode.HOST_OUT_OF_MEMORY, ExitCode.SHARED_MEMORY_EXHAUSTED)

Row = dict[str, Any]
Job = Mapping[str, Any]
"""An entry of `jobs`."""


def main(output: Path, jobs: Path, only: Sequence[str], device: str) -> None:
    output.mkdir(parents=True, exist_ok=True)
    given = yaml.safe_load(jobs.read_text())
    plan, manifest = given["plan"], given["manifest"]
    failing: dict[str, Job] = given["jobs"]
    if unknown := set(only) - set(failing):
        sys.exit(f"expected names of jobs in {jobs}, found {', '.join(sorted(unknown))}")
    path = output / "recovered_jobs.json"
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.exists() else []
    if not rows:
        rows = [run("calm", "calm", {"class": "none", "plan": plan}, manifest, output, device)]
    for name in only or sorted(set(failing) - {row["job"] for row in rows}):
        job = {**failing[name], "plan": {**plan, **failing[name].get("plan", {})}}
        try:
            newer = rows_of_both_arms(name, job, rows[0], manifest, output, device)
        except DriverError as problem:
            print(f"{name} was not run: {problem}", flush=True)
            continue
        others = [row for row in rows[1:] if row["job"] != name]
        rows = [rows[0], *sorted([*others, *newer], key=lambda row: str(row["job"]))]
        save(rows, output)


def rows_of_both_arms(name: str, job: Job, calm: Row, manifest: Job, output: Path, device: str) -> list[Row]:
    ballast_gib = job.get("ballastGiB", 0)
    with ballast(hold_bytes=ballast_gib * GIB) if ballast_gib else nullcontext():
        without, recovered = (run(name, arm, job, manifest, output, device) for arm in ("without", "with"))
    ends = OUT_OF_MEMORY if job.get("ends") == "GiveUp" else (ExitCode.COMPLETE,)
    differences = [abs(mine - other) for mine, other in zip(recovered["rewards"], calm["rewards"], strict=False)]
    return [
        without | {"as_intended": without["exit_code"] in OUT_OF_MEMORY, "diagnoses": diagnoses_of(name, job, output)},
        recovered
        | {
            "as_intended": recovered["exit_code"] in ends,
            "largest_reward_difference": max(differences, default=None),
        },
    ]


def run(name: str, arm: str, job: Job, manifest: Job, output: Path, device: str) -> Row:
    """Run the job once. Leaves no process, checkpoint or model."""
    folder = output / "runs" / name / arm
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    spec = {**manifest["spec"], "memory": {"mode": "Disabled" if arm == "without" else "Auto"}}
    spec["recovery"] = {**spec.get("recovery", {}), **job.get("recovery", {})}
    if faults := job.get("faults"):
        spec["faultInjection"] = {"enabled": True, "faults": faults}
    (folder / "job.yaml").write_text(yaml.safe_dump({**manifest, "spec": spec}))
    (folder / "plan.json").write_text(json.dumps(job["plan"]))
    command: list[str | Path] = [sys.executable, "-m", "rljob_client", "run", folder / "job.yaml"]
    command += ["--plan", folder / "plan.json", "--output", folder / "run", "--device", device]
    begun = time.monotonic()
    exit_code = run_for(command, folder / "terminal.log", LONGEST_RUN_SECONDS, os.environ | VARIABLES)
    seconds = round(time.monotonic() - begun, 1)
    for large in ("checkpoints", "model"):
        shutil.rmtree(folder / "run" / large, ignore_errors=True)
    file = folder / "run" / "summary.json"
    summary = json.loads(file.read_text()) if file.exists() else {}
    file = folder / "run" / "ledger.jsonl"
    ledger = [parse_record(text) for text in file.read_bytes().splitlines()] if file.exists() else []
    changes = plan_change_records(ledger)
    rewards = [record.reward.mean for record in step_records(ledger)]
    print(f"{seconds:6.1f} s  {name:<20} {arm:<8} exit {exit_code}, {len(rewards)} steps", flush=True)
    return {
        "job": name,
        "class": job["class"],
        "arm": arm,
        "injected": bool(faults),
        "exit_code": exit_code,
        "exit_reason": summary.get("exit_reason", ""),
        "attempts": summary.get("attempts"),
        "seconds": seconds,
        "start": next((record.seconds for record in ledger if isinstance(record, ReadyRecord)), {}),
        "rewards": rewards,
        "remedies": [remedy_of(record) for record in changes],
        "seconds_lost": sum(record.change.seconds_to_recover or 0.0 for record in changes),
    }


def remedy_of(record: PlanChangeRecord) -> Row:
    """A change of the plan: its diagnosis, and its effect in bytes and in seconds, in all and by part."""
    change, remedy = record.change, record.change.remedy
    return {
        "diagnosed": change.diagnosis.class_name,
        "confidence": change.diagnosis.confidence,
        "setting": remedy.setting,
        "before": remedy.before,
        "after": remedy.after,
        "level": change.level,
        "expected_bytes": remedy.expected_bytes,
        "observed_bytes": remedy.observed_bytes,
        "seconds": change.seconds_to_recover,
        "parts": record.seconds,
    }


def diagnoses_of(name: str, job: Job, output: Path) -> list[Row]:
    """Diagnoses by `rljob diagnose` of the run without recovery; its evidence is packed."""
    failure = output / "failures" / job["class"] / f"job-{name}"
    failure.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(failure, ignore_errors=True)
    try:
        (output / "runs" / name / "without" / "run").rename(failure)
        pack(failure, output / "recorded", f"job {name} of bench/programs/failing_jobs.yaml")
        return [{key: found[key] for key in ("class", "confidence")} for found in diagnose(failure)]
    except (subprocess.SubprocessError, ValueError, OSError) as problem:
        return [{"problem": str(problem)[:300]}]


def save(rows: list[Row], output: Path) -> None:
    """Write the record and the packed evidence so far."""
    record("recovered_jobs", rows, "each job of bench/programs/failing_jobs.yaml, without recovery and with", output)
    with tarfile.open(output / "recorded.tar.gz", "w:gz") as archive:
        if (output / "recorded").exists():
            archive.add(output / "recorded", "recorded")
        for kept in sorted((output / "runs").glob("*/*/run/ledger.jsonl")) + sorted(output.glob("runs/*/*/*.log")):
            archive.add(kept, kept.relative_to(output))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="where runs and record go")
    parser.add_argument("--jobs", type=Path, default=JOBS, help="file with the jobs")
    parser.add_argument("--only", nargs="*", default=[], metavar="JOB", help="jobs to run, recorded or not")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    main(**vars(parser.parse_args()))
