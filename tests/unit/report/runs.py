"""An invented run with everything that a report shows, some of it hostile."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path

from rljob_api.evaluation import EvaluationScore
from rljob_api.exit_codes import ExitCode
from rljob_api.memory_failure import DeviceMemory, FailureKind, MemoryFailure
from rljob_api.plan_change import DiagnosisStatus, PlanChange, RemedyStatus
from rljob_client.run_directory.ledger import Ledger
from rljob_client.run_directory.records import EvaluationRecord, FaultRecord, PlanChangeRecord
from rljob_client.run_directory.summary import summarize
from rljob_testing.memory_plans import memory_plan
from tests.unit.ledger.samples import GIB, step_record

BEGUN = 1_790_000_000.0
HOSTILE = "</pre></script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>"
PLAN = memory_plan(micro_batch_tokens=1024, logprob_chunk_tokens=256, sync_bucket_bytes=GIB, generation=2)
MANIFEST = f"""\
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata: {{name: sums}}
spec:
  model: {{uri: hf://org/name}} # {HOSTILE}
  task: {{name: digits}}
  algorithm: {{steps: 40}}
  env: [{{name: HF_TOKEN, value: hf_very_secret}}]
"""


def write_run(directory: Path, steps: int = 40, *, is_ended: bool = True) -> Path:
    """Write a run of `steps` steps of ten seconds, whose second attempt recovered from a failure in step 3."""
    (directory / "job.yaml").write_text(MANIFEST)
    with Ledger(directory / "ledger.jsonl") as ledger:
        ledger.begin_attempt(BEGUN, {"torch": "2.13.0", "odd": HOSTILE}, {}, {})
        ledger.record(evaluation(1, 0))
        for step in range(1, steps + 1):
            if step == 3:
                ledger.record(FaultRecord(attempt=1, fault_class="ActivationSpike", phase="update", step=3, rank=0))
                ledger.record(PlanChangeRecord(change=change(BEGUN + 25), plan=PLAN))
                ledger.begin_attempt(BEGUN + 4000, {"torch": "2.13.0", "odd": HOSTILE}, {}, {})
            begun = BEGUN if step < 3 else BEGUN + 4000
            share = step / max(steps, 1)
            metrics = {"loss": math.nan if step == 7 else 1 - share, "entropy": 2 - share, "grad_norm": 1 + share}
            metrics |= {"ppo_kl": 0.01, "kl": 0.02, "uniform_groups": 0.5 * share, f"rewards/{HOSTILE}": share}
            record = step_record(
                step,
                0.9 * share,
                attempt=1 if step < 3 else 2,
                metrics=metrics,
                seconds={"rollout": 5.5, "reward": 0.2, "update": 3.0, "sync": 0.3},
                total_seconds=10.0,
                committed_at=begun + 10 * step + 15,
            )
            ledger.commit(record)
        ledger.record(evaluation(2, steps))
        if is_ended:
            summary = summarize(ledger.records, job="sums", total_steps=40, exit_code=ExitCode.COMPLETE)
            (directory / "summary.json").write_bytes(summary.to_json())
    _write_samples(directory / "samples.jsonl", steps)
    _write_memory(directory / "memory", steps)
    account = MemoryFailure(
        kind=FailureKind.ALLOCATOR,
        text=f"CUDA out of memory {HOSTILE}",
        time=datetime.fromtimestamp(BEGUN + 4100, UTC),
        step=9,
        phase="update",
        device=DeviceMemory(requested_bytes=3 * GIB),
    )
    (directory / "oom").mkdir()
    (directory / "oom" / "policy-0.json").write_text(account.model_dump_json(by_alias=True))
    (directory / "oom" / "torn.json").write_text("torn")
    return directory


def evaluation(attempt: int, step: int) -> EvaluationRecord:
    metrics = {"reward_mean": 0.01 * step, "pass@1": 0.01 * step}
    best = EvaluationScore(step=step, metric="reward_mean", score=0.01 * step)
    return EvaluationRecord(
        attempt=attempt, step=step, prompts=8, samples_per_prompt=1, metrics=metrics, seconds=1, best=best
    )


def change(time: float, *, preventive: bool = False) -> PlanChange:
    return PlanChange(
        generation=2,
        time=datetime.fromtimestamp(time, UTC),
        attempt=1,
        step=3,
        phase="update",
        role="policy",
        diagnosis=DiagnosisStatus(class_name="ActivationSpike", confidence=0.7, message=f"It was full. {HOSTILE}"),
        remedy=RemedyStatus(
            setting="microBatchTokens", before="4096", after="1024", expected_bytes=6 * GIB, observed_bytes=5 * GIB
        ),
        level="Live",
        preventive=preventive,
        seconds_to_recover=6.0,
    )


def _write_samples(path: Path, steps: int) -> None:
    lines = [
        {
            **{"step": step, "kind": "train", "prompt_index": index, "prompt": f"1 + {index} = {HOSTILE}"},
            **{"response": f"{1 + index}\n{HOSTILE}" * (400 if index == 1 else 1), "reward": index / 4, "tokens": 3},
            **{"rewards": {"exact": index / 4, HOSTILE: None}, "advantage": 0.5, "finished": index != 2},
        }
        for step in range(1, steps + 1)
        for index in range(4)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 41, "torn')


def _write_memory(directory: Path, steps: int) -> None:
    """Ten seconds a step: 5.5 s rollout, 0.5 s later an update of 3 s with growing memory."""
    directory.mkdir()
    logs: dict[str, list[str]] = {"policy-0": [], "rollout-0": []}
    for step in range(1, steps + 1):
        start = (BEGUN if step < 3 else BEGUN + 4000) + 10 * step + 5
        for actor, phase, began, ended, peak in (
            ("rollout-0", "rollout", start, start + 5.5, 30),
            ("policy-0", "update", start + 6, start + 9, 40 + step % 5),
        ):
            sample = {"time": ended, "began": began, "step": step, "phase": phase, "device_total": 80 * GIB}
            sample |= {"allocated": 8 * GIB, "reserved": 12 * GIB, "device_free": 40 * GIB, "micro_batch": None}
            sample |= {"peak_allocated": (peak - 4) * GIB, "peak_reserved": peak * GIB}
            logs[actor].append(json.dumps(sample))
    for actor, lines in logs.items():
        (directory / f"{actor}.jsonl").write_text("\n".join(lines) + "\n")
