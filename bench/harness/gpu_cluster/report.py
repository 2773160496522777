"""Files that remain of a recording, complete or not."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.harness.gpu_cluster.job import RecoveryJob
from bench.harness.gpu_cluster.one_node import OneNodeCluster
from bench.harness.gpu_cluster.recording import Recording
from bench.harness.record import record

_EVENT_COLUMNS = (
    "TIME:.metadata.creationTimestamp,KIND:.involvedObject.kind,NAME:.involvedObject.name,REASON:.reason,NOTE:.message"
)
_KUBECTL_SECONDS = 30
_LOG_LINES, _LOG_LINES_OF_A_FAILURE = 60, 400


def write_report(
    cluster: OneNodeCluster,
    job: RecoveryJob,
    left_gib: float | None,
    recording: Recording,
    start_seconds: dict[str, float],
    out: Path,
) -> None:
    """`left_gib`: GPU memory that another process left. `start_seconds`: start-up of the cluster, by part."""
    described = _kubectl_output(cluster, "describe", "rljobs", job.name)
    events = _kubectl_output(
        cluster, "get", "events", "--sort-by=.metadata.creationTimestamp", f"--output=custom-columns={_EVENT_COLUMNS}"
    )
    (out / "describe.txt").write_text(f"{described}\n{events}")
    if job.ledger.exists():
        shutil.copy(job.ledger, out)
    lines = _LOG_LINES if recording.complete else _LOG_LINES_OF_A_FAILURE
    (out / "logs.txt").write_text(_log_tails([job.output, cluster.pod_logs, cluster.layout.logs], lines))
    print(record("recovery_in_pods", [_row(recording, start_seconds, _ledger(job))], _note(job, left_gib), out))


def _kubectl_output(cluster: OneNodeCluster, *words: str) -> str:
    """Output and errors of kubectl; the cluster may be broken."""
    try:
        done = subprocess.run(
            [*cluster.kubectl, *words], capture_output=True, text=True, check=False, timeout=_KUBECTL_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"kubectl {' '.join(words)}: no answer in {_KUBECTL_SECONDS} s\n"
    return done.stdout + done.stderr


def _log_tails(folders: Iterable[Path], lines: int) -> str:
    logs = [log for folder in folders for log in sorted(folder.rglob("*.log"))]
    return "\n".join(f"=== {log}\n{_tail(log, lines)}\n" for log in logs)


def _tail(log: Path, lines: int) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _ledger(job: RecoveryJob) -> list[dict[str, Any]]:
    """Its complete lines."""
    text = job.ledger.read_text() if job.ledger.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def _row(recording: Recording, start_seconds: dict[str, float], ledger: list[dict[str, Any]]) -> dict[str, Any]:
    status = recording.last.status
    return {
        "start_seconds": start_seconds,
        "seconds_from_apply": recording.moments,
        "attempt_ready_seconds": {line["attempt"]: line["seconds"] for line in ledger if line["kind"] == "ready"},
        "recovery_seconds": {
            line["change"]["generation"]: line["seconds"] for line in ledger if line["kind"] == "plan_change"
        },
        "pods": recording.pods,
        "plan_changes": recording.last.plan_changes,
        "attempts": status.get("attempts"),
        "adjustments": status.get("adjustments"),
        "restarts": status.get("restarts"),
        "conditions": status.get("conditions"),
        "steps": recording.last.steps,
        "reward": status.get("reward"),
    }


def _note(job: RecoveryJob, left_gib: float | None) -> str:
    spec = job.manifest["spec"]
    disturbances = [f"{fault['class']} injected into {fault['phase']} of step {fault['step']}" for fault in job.faults]
    if left_gib is not None:
        disturbances.insert(0, f"another process that leaves {left_gib:g} GiB of the GPU until the plan is changed")
    return (
        f"one RLJob ({spec['model']['uri']}, {spec['algorithm']['steps']} steps) in two pods on one node with a real "
        f"kubelet; disturbances: {'; '.join(disturbances) or 'none'}"
    )
