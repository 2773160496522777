"""Valid inputs of the parsers."""

from __future__ import annotations

import json
from typing import Any

from rljob_api.exit_codes import ExitCode
from rljob_api.plan_change import DiagnosisStatus
from rljob_api.status import AttemptStatus, Condition, RLJobStatus
from rljob_api.step_report import Evidence, StepReportStatus
from rljob_api.termination_message import TerminationMessage
from rljob_testing.repository import EXAMPLES, ROOT
from rljob_testing.simulated_cluster import PLAN, START, job_spec, rank_memory
from rljob_trainer.ledger.checkpoint_manifest import CheckpointManifest, FileDigest
from rljob_trainer.ledger.records import ResponseStatistics, RewardStatistics, StepRecord

MANIFESTS = tuple(path.read_bytes() for path in sorted(EXAMPLES.glob("*.yaml")))

JOB_METADATA = {
    "name": "demo",
    "namespace": "team",
    "uid": "job-uid",
    "resourceVersion": "10",
    "creationTimestamp": "2026-01-01T00:00:00Z",
}
_DIAGNOSIS = DiagnosisStatus(
    class_name="Fragmentation", confidence=0.9, message="6 of 80 GiB are unusable", numbers={"limit_bytes": 1 << 36}
)
_EVIDENCE = Evidence(
    time=START,
    attempt=1,
    role="policy",
    rank=0,
    step=4,
    phase="update",
    message="CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.00 GiB",
    memory=rank_memory(),
    diagnoses=[_DIAGNOSIS],
)
_CHANGE = {
    "generation": 2,
    "time": START.isoformat(),
    "attempt": 1,
    "step": 4,
    "phase": "update",
    "role": "policy",
    "rank": 0,
    "diagnosis": _DIAGNOSIS.model_dump(mode="json", by_alias=True),
    "remedy": {"setting": "microBatchTokens", "before": "4096", "after": "2048", "expectedBytes": 1 << 30},
    "level": "Live",
    "secondsToRecover": 3.5,
}
_STATUS = RLJobStatus(
    step=3,
    steps=60,
    attempts=[AttemptStatus(number=1, plan_generation=1, start_time=START, from_step=1)],
    conditions=[
        Condition(type="Running", status="True", reason="StepsCommitted", message="", last_transition_time=START)
    ],
    plan=PLAN,
)
STORED_JOBS = tuple(
    json.dumps({"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "spec": spec, "status": status}).encode()
    for spec in (job_spec(), job_spec(trainer={"image": "registry.example/verl:1"}), job_spec(gang="Volcano"))
    for status in ({}, _STATUS.model_dump(mode="json", by_alias=True, exclude_none=True))
)
STEP_REPORTS = tuple(
    json.dumps(fields).encode()
    for fields in (
        {"attempt": 1, "step": 0, "plan": PLAN.model_dump(mode="json", by_alias=True, exclude_none=True)},
        StepReportStatus(
            attempt=1,
            step=3,
            reward=0.5,
            tokens_per_second=1e4,
            phase="update",
            memory=[rank_memory(), rank_memory(rank=1)],
            last_evidence=_EVIDENCE,
            update_time=START,
        ).model_dump(mode="json", by_alias=True, exclude_none=True),
        {
            "attempt": 1,
            "step": 4,
            "pendingExit": {"exitCode": 80, "message": "out of memory"},
            "planChanges": [_CHANGE],
        },
        {
            "attempt": 1,
            "step": 4,
            "seconds": {"rollout": 3.0, "update": 1.0},
            "updateTime": START.isoformat(),
            "memoryPressure": {"diagnosis": _CHANGE["diagnosis"], "role": "policy", "rank": 0, "stepsLeft": 4},
            "trainingWarning": {"reason": "RewardsEqual", "message": "step 4: equal rewards"},
            "plan": PLAN.model_copy(update={"generation": 2}).model_dump(mode="json", by_alias=True, exclude_none=True),
            "planChanges": [_CHANGE],
        },
    )
)
TERMINATION_MESSAGES = (
    TerminationMessage(exit_code=ExitCode.DEVICE_OUT_OF_MEMORY, message="m", step=3, evidence=_EVIDENCE).to_json(),
    TerminationMessage(exit_code=ExitCode.COMPLETE, message="60 steps are committed", step=60).to_json(),
    b"Traceback (most recent call last):\nRuntimeError: CUDA error",
)
LOGS = tuple(path.read_bytes() for path in sorted((ROOT / "tests" / "data" / "oom").glob("*/*.txt")))
CHECKPOINT_MANIFESTS = (
    CheckpointManifest(
        step=20,
        metadata={"plan": {"generation": 1}, "ranks": 2},
        files={
            "policy/__0_0.distcp": FileDigest(size_bytes=4, sha256="0" * 64),
            ".metadata": FileDigest(size_bytes=0, sha256="1"),
        },
    ).to_json(),
)
_STEP = StepRecord(
    step=1,
    attempt=1,
    reward=RewardStatistics(mean=0.5, std=0.1, min=0.0, max=1.0),
    response=ResponseStatistics(mean_tokens=3.25, max_tokens=8, clipped_ratio=0.25),
    seconds={"rollout": 0.6, "update": 0.3},
    total_seconds=1.0,
    tokens=1000,
    metrics={"loss": 0.25},
    memory_bytes={"policy-0": {"update": 1 << 30}},
    memory_counts="device",
    weights_version=1,
    committed_at=1000.0,
)
LEDGERS = (b"".join(_STEP.model_copy(update={"step": step}).model_dump_json().encode() + b"\n" for step in (1, 2, 3)),)


def failed_pod(message: str) -> dict[str, Any]:
    """A worker pod of the job `demo` whose container ended with this termination message."""
    terminated = {"exitCode": 80, "reason": "Error", "finishedAt": "2026-01-01T00:00:01Z", "message": message}
    return {
        "metadata": {
            "name": "demo-policy-0",
            "namespace": "team",
            "uid": "pod-uid",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"rljob.dev/role": "policy", "rljob.dev/index": "0", "rljob.dev/attempt": "1"},
        },
        "status": {
            "phase": "Failed",
            "containerStatuses": [{"name": "rljob", "restartCount": 0, "state": {"terminated": terminated}}],
        },
    }
