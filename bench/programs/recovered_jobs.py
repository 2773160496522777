"""Jobs that run out of memory on this machine, each without recovery and with it.

    python -m bench.programs.recovered_jobs --output DIR [--jobs DIR] [--only JOB …] [--device cpu]

The jobs are in bench/programs/failing_jobs; its README describes them. After each job, `DIR/recovered_jobs.json` is
complete up to that job and `DIR/recorded.tar.gz` has the ledgers and the evidence. A second run with the same DIR
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
from bench.harness.recovery_rows import GIB, Arm, FailingJob, Run, line, merged, row_of, row_of_job
from rljob_client.run_directory.records import parse_record
from rljob_testing.ballast import DriverError, ballast
from rljob_testing.bounded_process import run_for
from rljob_testing.induced_failures.induce import diagnose
from rljob_testing.induced_failures.recorded_evidence import pack

JOBS = Path(__file__).parent / "failing_jobs"
LONGEST_RUN_SECONDS = 150
LEAST_SECONDS = 170
"""No job starts with less time left, because each runs twice."""
# Compiled kernels would save memory that these jobs are to run out of, and take long to make.
VARIABLES = {"TORCH_COMPILE_DISABLE": "1"}
ARMS: tuple[Arm, ...] = ("without", "with")


def main(output: Path, jobs: Path, only: Sequence[str], device: str, seconds: float) -> None:
    output.mkdir(parents=True, exist_ok=True)
    plan, deadline = yaml.safe_load((jobs / "plan.yaml").read_text()), time.monotonic() + seconds
    manifest = yaml.safe_load((jobs / "manifest.yaml").read_text())
    rows = recorded_rows(output)
    failing = [job for job in read_jobs(jobs, plan) if job.name in (only or unrecorded(jobs, plan, rows))]
    if unknown := set(only) - {job.name for job in failing}:
        sys.exit(f"expected names of files in {jobs}, found {', '.join(sorted(unknown))}")
    if not any(row["arm"] == "calm" for row in rows):
        calm = run(FailingJob("calm", "none", plan), "calm", manifest, output, device, deadline)
        rows = merged(rows, [row_of(calm) | {"job": "calm", "arm": "calm"}])
        save(rows, output)
        print(line(rows[0]), flush=True)
    for job in failing:
        if time.monotonic() > deadline - LEAST_SECONDS:
            print(f"no time left for {job.name} and what follows it: run again with the same output", flush=True)
            break
        try:
            rows = merged(rows, rows_of_both_arms(job, rows[0], manifest, output, device, deadline))
        except DriverError as problem:
            print(f"{job.name} was not run: {problem}", flush=True)
        save(rows, output)


def recorded_rows(output: Path) -> list[dict[str, Any]]:
    """The rows of the record in `output`; the calm run's comes first, if it exists."""
    path = output / "recovered_jobs.json"
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def unrecorded(jobs: Path, plan: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of the jobs in the folder `jobs` that have no rows."""
    return {job.name for job in read_jobs(jobs, plan)} - {row["job"] for row in rows}


def rows_of_both_arms(
    job: FailingJob, calm: Mapping[str, Any], manifest: Mapping[str, Any], output: Path, device: str, deadline: float
) -> list[dict[str, Any]]:
    rows = []
    with ballast(hold_bytes=job.ballast_gib * GIB) if job.ballast_gib else nullcontext():
        for arm in ARMS:
            done = run(job, arm, manifest, output, device, deadline)
            died = diagnoses_of(job, output) if arm == "without" else []
            rows.append(row_of_job(job, arm, done, calm, died))
            print(line(rows[-1]), flush=True)
    return rows


def read_jobs(folder: Path, plan: Mapping[str, Any]) -> list[FailingJob]:
    """The failing jobs of `folder`, by name. `plan`: the plan that they change."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        if path.stem in ("manifest", "plan"):
            continue
        fields = yaml.safe_load(path.read_text())
        found.append(
            FailingJob(
                name=path.stem,
                failure_class=fields["class"],
                plan={**plan, **fields.get("plan", {})},
                faults=fields.get("faults", ()),
                ballast_gib=fields.get("ballastGiB", 0),
                recovery=fields.get("recovery", {}),
                ends=fields.get("ends", "Complete"),
            )
        )
    return found


def run(job: FailingJob, arm: Arm, manifest: Mapping[str, Any], output: Path, device: str, deadline: float) -> Run:
    """Run the job once, within the time that is left. Leaves no process, checkpoint or model."""
    folder = output / "runs" / job.name / arm
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    spec = {**manifest["spec"], "memory": {"mode": "Disabled" if arm == "without" else "Auto"}}
    spec["recovery"] = {**spec.get("recovery", {}), **job.recovery}
    if job.faults:
        spec["faultInjection"] = {"enabled": True, "faults": list(job.faults)}
    (folder / "job.yaml").write_text(yaml.safe_dump({**manifest, "spec": spec}))
    (folder / "plan.json").write_text(json.dumps(dict(job.plan)))
    rljob = (sys.executable, "-m", "rljob_client")
    options: list[str | Path] = ["--plan", folder / "plan.json", "--output", folder / "run", "--device", device]
    begun = time.monotonic()
    seconds = min(LONGEST_RUN_SECONDS, max(deadline - begun, 1.0))
    exit_code = run_for(
        [*rljob, "run", folder / "job.yaml", *options], folder / "terminal.log", seconds, os.environ | VARIABLES
    )
    for large in ("checkpoints", "model"):
        shutil.rmtree(folder / "run" / large, ignore_errors=True)
    summary, ledger = folder / "run" / "summary.json", folder / "run" / "ledger.jsonl"
    return Run(
        exit_code,
        round(time.monotonic() - begun, 1),
        json.loads(summary.read_text()) if summary.exists() else {},
        [parse_record(text) for text in ledger.read_bytes().splitlines()] if ledger.exists() else [],
    )


def diagnoses_of(job: FailingJob, output: Path) -> list[dict[str, Any]]:
    """Diagnoses by `rljob diagnose` of the run without recovery; its evidence is packed."""
    failure = output / "failures" / job.failure_class / f"job-{job.name}"
    failure.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(failure, ignore_errors=True)
    try:
        (output / "runs" / job.name / "without" / "run").rename(failure)
        pack(failure, output / "recorded", f"job {job.name} of bench/programs/failing_jobs")
        return diagnose(failure)
    except (subprocess.SubprocessError, ValueError, OSError) as problem:
        return [{"problem": str(problem)[:300]}]


def save(rows: Sequence[Mapping[str, Any]], output: Path) -> None:
    """Write the record and the packed evidence so far."""
    record(
        "recovered_jobs",
        [dict(row) for row in rows],
        "each job of bench/programs/failing_jobs, without recovery and with",
        output,
    )
    with tarfile.open(output / "recorded.tar.gz", "w:gz") as archive:
        if (output / "recorded").exists():
            archive.add(output / "recorded", "recorded")
        for kept in sorted((output / "runs").glob("*/*/run/ledger.jsonl")) + sorted(output.glob("runs/*/*/*.log")):
            archive.add(kept, kept.relative_to(output))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="where runs and record go")
    parser.add_argument("--jobs", type=Path, default=JOBS, help="folder with the jobs")
    parser.add_argument("--only", nargs="*", default=[], metavar="JOB", help="jobs to run, recorded or not")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=540, help="end what still runs after so long")
    main(**vars(parser.parse_args()))
