"""Seconds lost to the failure of one of two policy ranks or engines.

    python -m bench.programs.ranks_recover [ARM...] [--smoke] [--runs DIR]

Two runs of one job with two policy ranks and two engines, one after the other:

- `live`: rank 1 runs out of memory in an update, in an optimizer step and in a sync, each in a step of its own. The
  ranks leave the collective, restore their state and form a new group.
- `killed`: a policy rank is lost in an update, and later an engine while it generates.

Records `ranks_recover.json` (with `--smoke`: `ranks_recover_cpu.json`): for each failure the seconds that its step took
beyond the median of the steps without a failure, those from the failure to the end of the repeated phase, by part, the
median of the failed phase, the processes that were started, and the difference of the peaks in the steps before and
after. Rows of other arms are kept. `--smoke`: a tiny model on the CPU, 3 minutes; otherwise the job of
`h200_step.yaml`, of Qwen3-0.6B's shape, on two GPUs, 10 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from bench.harness.record import RESULTS, record, recorded, require_gpus
from bench.harness.run_arms import complete_lines, ledger_of
from rljob_testing.repository import EXAMPLES, ROOT

ARMS = ("live", "killed")
TIMEOUT_SECONDS = 900
OUT_OF_MEMORY = {
    "update": {"class": "ActivationSpike", "phase": "update", "step": 3, "rank": 1},
    "optimizer step": {"class": "OptimizerState", "phase": "optimizer", "step": 5, "rank": 1},
    "sync": {"class": "WeightSyncSpike", "phase": "sync", "step": 7, "rank": 1},
}
KILLED = {
    "policy rank killed": {"class": "WorkerLost", "phase": "update", "step": 3, "rank": 1},
    "engine killed": {"class": "WorkerLost", "phase": "rollout", "step": 5, "rank": 1},
}
PINNED = {
    "optimizerOffload": "Disabled",
    "weightExport": "SwitchSegments",
    "activationCheckpointing": "Disabled",
    "rolloutSleep": "Level2",
}
"""Changes of other settings need new processes."""
SMOKE_PLAN = {
    "generation": 1,
    "emptyCache": False,
    "expandableSegments": False,
    "rolloutSleep": "Disabled",
    "kvCache": 64 << 20,
    "microBatchTokens": 512,
    "logprobChunkTokens": 8192,
    "activationCheckpointing": False,
    "optimizerOffload": False,
    "syncBucketSize": 64 << 20,
}
GPU_PLAN = SMOKE_PLAN | {
    "emptyCache": True,
    "expandableSegments": True,
    "rolloutSleep": "Level2",
    "kvCache": 4 << 30,
    "microBatchTokens": 16_384,
    "logprobChunkTokens": 1_728,
    "syncBucketSize": 1 << 30,
}
"""First plans with room to shrink: the planned bucket of weights is as small as the largest of them allows."""

SMOKE_MODEL = "random://qwen3?hidden=128&layers=4&heads=4&kvHeads=2&headDim=32&tied=false&initializerRange=0.1"
"""Its 4 MB of weights can be sent in two halves."""


def main(arms: list[str], smoke: bool, output: Path, runs: Path) -> None:
    if not smoke:
        require_gpus(2)
    name, gpus = ("ranks_recover_cpu", 1) if smoke else ("ranks_recover", 2)
    rows = recorded(name, output, gpus)
    for arm in arms or ARMS:
        of_arm = rows_of(arm, runs / arm, smoke)
        rows = [*(other for other in rows if other["arm"] != arm), *of_arm]
        # After each arm, so that its result is kept if a later one fails.
        path = record(name, rows, f"{manifest_of(smoke).name}, two ranks", output, gpus)
    for row in rows:
        print(json.dumps(row))
    print(path)


def rows_of(arm: str, folder: Path, smoke: bool) -> list[dict[str, Any]]:
    """A row for each failure of the arm's run. A run that fails is recorded with its end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    faults = KILLED if arm == "killed" else OUT_OF_MEMORY
    write_job(list(faults.values()), folder / "job.yaml", smoke)
    command: list[str | Path] = [sys.executable, "-m", "rljob_client", "run", folder / "job.yaml"]
    command += ["--output", folder / "run", "--device", "cpu" if smoke else "cuda"]
    (folder / "plan.json").write_text(json.dumps(SMOKE_PLAN if smoke else GPU_PLAN))
    command += ["--plan", folder / "plan.json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "bench" / "programs"), *sys.path])}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        return [{"arm": arm, "failed": f"not done within {TIMEOUT_SECONDS} s"}]
    if done.returncode != 0:
        return [{"arm": arm, "failed": (done.stdout + done.stderr)[-2_000:]}]
    return [row(arm, name, fault, ledger_of(folder / "run"), folder / "run") for name, fault in faults.items()]


def manifest_of(smoke: bool) -> Path:
    return EXAMPLES / "digits.yaml" if smoke else Path(__file__).with_name("h200_step.yaml")


def write_job(faults: list[dict[str, Any]], path: Path, smoke: bool) -> None:
    job = yaml.safe_load(manifest_of(smoke).read_text())
    spec = job["spec"]
    pods = {"replicas": 2, "gpusPerReplica": 0} if smoke else {"gpusPerReplica": 2}
    spec["policy"] = spec.get("policy", {}) | pods
    spec["rollout"] = spec.get("rollout", {}) | {"tensorParallelSize": 1}
    spec["algorithm"]["steps"] = 1 + max(fault["step"] for fault in faults)
    spec["checkpoint"] = {"everySteps": 2}
    spec["recovery"] = {"maxAdjustments": 20}
    spec["faultInjection"] = {"enabled": True, "faults": faults}
    if smoke:
        spec["model"] = {"uri": SMOKE_MODEL}
    else:
        spec["memory"] = PINNED
    path.write_text(yaml.safe_dump(job))


def row(arm: str, name: str, fault: dict[str, Any], ledger: list[dict[str, Any]], run: Path) -> dict[str, Any]:
    steps = [line for line in ledger if line["kind"] == "step"]
    failing = {each["step"] for each in (*OUT_OF_MEMORY.values(), *KILLED.values())}
    calm_steps = [step for step in steps if step["step"] > 1 and step["step"] not in failing]
    calm = median(step["total_seconds"] for step in calm_steps)
    phase = "update" if fault["phase"] == "optimizer" else fault["phase"]
    [step] = [step for step in steps if step["step"] == fault["step"]]
    [before] = [step for step in steps if step["step"] == fault["step"] - 1]
    found = {
        "arm": arm,
        "failure": name,
        "seconds_lost": round(step["committed_at"] - before["committed_at"] - calm, 3),
        "calm_step_seconds": round(calm, 3),
        "calm_phase_seconds": round(median(step["seconds"][phase] for step in calm_steps), 3),
        "new_attempt": step["attempt"] != before["attempt"],
        "compilations": step["metrics"].get("compilations"),
        "processes_started": processes_started(run / "logs"),
    }
    since = ledger[ledger.index(before) : ledger.index(step)]
    if new := [line["seconds"] for line in since if line["kind"] == "ready"]:
        found["parts"] = {part: round(seconds, 3) for part, seconds in new[-1].items()}
    changes = [line for line in ledger if line["kind"] == "plan_change" and line["change"]["step"] == fault["step"]]
    if not changes:
        return found
    change = changes[-1]["change"]
    return found | {
        "level": change["level"],
        "change": f"{change['remedy']['setting']} {change['remedy']['before']} → {change['remedy']['after']}",
        "seconds_to_recover": change["secondsToRecover"],
        "parts": {part: round(seconds, 3) for part, seconds in changes[-1]["seconds"].items()},
        "freed_bytes": freed_bytes(run / "memory" / f"policy-{fault['rank']}.jsonl", change["phase"], fault["step"]),
    }


def freed_bytes(log: Path, phase: str, step: int) -> int | None:
    """Peak of a rank's tensors in `phase` of the step before `step`, minus that of the step after it. None on a CPU."""
    samples = [sample for sample in complete_lines(log) if sample["phase"] == phase]
    before, after = (
        [peak for sample in samples if sample["step"] == place and (peak := sample.get("peak_allocated_bytes"))]
        for place in (step - 1, step + 1)
    )
    return max(before) - max(after) if before and after else None


def processes_started(logs: Path) -> dict[str, int]:
    """Number of processes of each rank and engine in the whole run, from the first lines of their logs."""
    return {
        log.stem: log.read_text(errors="replace").count(f"{log.stem} starts as process")
        for log in sorted(logs.glob("*.log"))
        if log.stem.startswith(("policy-", "rollout-"))
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="*", choices=[*ARMS, []], metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory of the record")
    parser.add_argument("--runs", type=Path, default=Path("runs/ranks_recover"), help="of the runs (replaced)")
    main(**vars(parser.parse_args()))
