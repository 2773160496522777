"""TRL and verl programs that run out of memory: their cause, and an adapter's changes until they train.

    python -m bench.programs.adapter_recovery cpu | trl [FAILURE...] | verl [FAILURE...]

`cpu`: `images/trl/train.py` under a limit of private memory (RLIMIT_DATA). With torch's build for CUDA, 2,100 MiB are
private before the first step; TRL's tile for log-probabilities has 512 MiB until a micro-batch has fewer than 4,096
tokens. Records `bench/results/adapter_recovery.json`.

`trl`, `verl` (0.9): failures of GRPO of Qwen3-0.6B's shape on one GPU next to vLLM, responses of 512 tokens. Records
one row for each in `trl_failures.json` or `verl_failures.json`:

    update             128 responses a micro-batch, without gradient checkpointing
    awake              the engine has 85 % of the GPU and keeps its memory during the update
    engine-too-large   the engine asks for more than the policy has left free

Each attempt runs under the probe. Its diagnosis and the recovery engine choose the next attempt's changes, and the
adapter makes them, as in pods. Needs that trainer and the packages of requirements/operator.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.harness.record import RESULTS, record, record_row, require_gpus, require_package
from bench.harness.trl import COLOCATED, trl_command
from bench.harness.verl import ACTOR, MODEL, ROLLOUT, Batch, grpo_settings, verl_command
from rljob_api.job import RLJobSpec
from rljob_api.step_report import Evidence
from rljob_api.termination_message import read_termination_message
from rljob_memory.diagnosis import diagnosed
from rljob_memory.next_plan import adapter_changes, other_trainers_first_plan
from rljob_memory.recovery import Changed, Constraints, FailureReport, RecoveryState, Restart, respond
from rljob_testing.plan_accuracy.jobs import SHAPES
from rljob_testing.repository import ROOT
from rljob_testing.verl_output import STEP_MARK
from rljob_trainer.models.resolve import resolve_model

SITE = ROOT / "images" / "probe" / "rljob_probe" / "site"
MOST_ATTEMPTS = 8
DATA_LIMIT_MIB = 2_600
STEPS = 3
BATCH = Batch(prompts=16, group_size=8, response_tokens=512)
TRL: dict[str, dict[str, Any]] = {
    "update": {"per_device_train_batch_size": 128},
    "awake": {"per_device_train_batch_size": 32, "vllm_enable_sleep_mode": False, "vllm_gpu_memory_utilization": 0.85},
    "engine-too-large": {"per_device_train_batch_size": 16, "vllm_gpu_memory_utilization": 0.985},
}
VERL = {
    "update": [
        f"{ACTOR}.ppo_micro_batch_size_per_gpu={BATCH.prompts * BATCH.group_size}",
        f"{MODEL}.enable_gradient_checkpointing=False",
    ],
    "awake": [
        f"{ROLLOUT}.gpu_memory_utilization=0.85",
        f"{ROLLOUT}.free_cache_engine=False",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=32",
        f"{MODEL}.enable_gradient_checkpointing=False",
    ],
    "engine-too-large": [f"{ROLLOUT}.gpu_memory_utilization=0.985"],
}


def main(trainer: str, failures: list[str], results: Path, output: Path) -> None:
    if trainer == "cpu":
        recovered_on_cpu(results, output)
    else:
        recovered_on_gpu(trainer, failures, results, output)


def recovered_on_cpu(results: Path, output: Path) -> None:
    command, directory = [sys.executable, "images/trl/train.py"], new_directory(output / "cpu")
    attempts = recovered(job_spec("TRL", gpus=0), command, DATA_LIMIT_MIB, directory)
    note = f"images/trl/train.py, each process limited to {DATA_LIMIT_MIB} MiB of private memory"
    record("adapter_recovery", attempts, note, results)
    if attempts[-1]["exit_code"] != 0:
        sys.exit("the program did not complete; the last attempt has the reason")


def recovered_on_gpu(trainer: str, failures: list[str], results: Path, output: Path) -> None:
    is_verl = trainer == "verl"
    require_package("verl", without="trl") if is_verl else require_package("trl")
    require_gpus(1)
    name = f"{trainer}_failures"
    options: Mapping[str, Any] = VERL if is_verl else TRL
    spec = job_spec("Verl" if is_verl else "TRL", gpus=1)
    model = resolve_model(f"random://qwen3?{SHAPES['0.6b']}")
    for failure in failures or list(options):
        directory = new_directory(output / f"{trainer}-{failure}")
        command = (command_of_verl if is_verl else command_of_trl)(failure, model, directory)
        attempts = recovered(spec, command, None, directory, STEP_MARK if is_verl else "'loss'")
        row = {"failure": failure, "options": options[failure], "attempts": attempts}
        note = f"{trainer} under the probe; each attempt has the changes that the one before it led to"
        print(record_row(name, row, "failure", note, results), flush=True)


def job_spec(adapter: str, gpus: int) -> RLJobSpec:
    spec = {
        "model": {"uri": "random://qwen3"},
        "task": {"name": "digits"},
        "algorithm": {"steps": 8},
        "policy": {"gpusPerReplica": gpus},
        "trainer": {"image": "here", "adapter": adapter},
    }
    return RLJobSpec.model_validate(spec, by_alias=True, by_name=False)


def recovered(
    spec: RLJobSpec, command: list[str], limit_mib: int | None, directory: Path, step_mark: str = "'loss'"
) -> list[dict[str, Any]]:
    """Run the command until it completes or no change is left; one row per attempt. `step_mark`: printed each step."""
    state = RecoveryState(other_trainers_first_plan(spec), spec.algorithm.steps)
    rows: list[dict[str, Any]] = []
    for number in range(1, MOST_ATTEMPTS + 1):
        assert state.plan is not None
        changes = adapter_changes(spec, state.plan)
        row, evidence = attempt(spec, number, command, changes, limit_mib, directory, step_mark)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if evidence is None:
            return rows
        report = FailureReport(row["message"], number, datetime.now(UTC), evidence=evidence)
        answer = respond(report, state, constraints(spec, limit_mib))
        if not isinstance(answer, Changed):
            row["gave_up"] = answer.message if isinstance(answer, Restart) else answer.explanation
            return rows
        remedy = answer.change.remedy
        row |= {"class": answer.change.diagnosis.class_name, "setting": remedy.setting, "after": remedy.after}
        state = answer.state
    return rows


def new_directory(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path.absolute()


def attempt(
    spec: RLJobSpec,
    number: int,
    command: list[str],
    changes: dict[str, Any],
    limit_mib: int | None,
    directory: Path,
    step_mark: str,
) -> tuple[dict[str, Any], Evidence | None]:
    """One run of the program, in the environment of a pod; evidence only if it ran out of memory.

    Its output is kept in `directory`."""
    log = directory / f"end-{number}.json"
    assert spec.trainer is not None
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")])),
        "RLJOB_TERMINATION_LOG": str(log),
        "RLJOB_PROBE_NOTES": str(directory / f"notes-{number}"),
        "RLJOB_ATTEMPT": str(number),
        "RLJOB_OUTPUT": str(directory / "output"),
        "RLJOB_ADAPTER": str(spec.trainer.adapter),
        "RLJOB_ADAPTER_CHANGES": json.dumps(changes),
    }

    def limited() -> None:
        if limit_mib:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_mib << 20, limit_mib << 20))

    begun = time.monotonic()
    output = directory / f"attempt-{number}.log"
    with output.open("wb") as file:
        done = subprocess.run(
            command, env=os.environ | variables, stdout=file, stderr=file, check=False, preexec_fn=limited
        )
    printed = output.read_text(errors="replace")
    lines = [line.partition("rljob: ")[2] for line in printed.splitlines() if line.startswith("rljob: ")]
    row = {
        "attempt": number,
        "changes": changes,
        "adapter": lines,
        "exit_code": done.returncode,
        "seconds": round(time.monotonic() - begun, 1),
        "steps": printed.count(step_mark),
    }
    if done.returncode == 0:
        return row, None
    message = read_termination_message(log.read_text()) if log.exists() else None
    if message is None or message.evidence is None:
        return row | {"message": printed[-2000:]}, None
    return row | {"message": message.message[:500]}, diagnosed(message.evidence)


def constraints(spec: RLJobSpec, limit_mib: int | None) -> Constraints:
    assert spec.trainer is not None
    return Constraints(
        settings=spec.memory,
        recovery=spec.recovery,
        setup=None,
        levels=frozenset({"ReplacePods"}),
        supported_settings=spec.trainer.changeable_settings,
        without_gpus=spec.policy.gpus_per_replica == 0,
        host_memory_limit_bytes=limit_mib << 20 if limit_mib else None,
    )


def command_of_trl(failure: str, model: Path, directory: Path) -> list[str]:
    """TRL's command line. Writes its options into `directory`."""
    chosen = TRL[failure]
    options = {
        "model_name_or_path": str(model),
        "dtype": "float32",
        "num_generations": BATCH.group_size,
        "gradient_accumulation_steps": BATCH.prompts * BATCH.group_size // chosen["per_device_train_batch_size"],
        "max_completion_length": BATCH.response_tokens,
        "gradient_checkpointing": False,
    }
    return trl_command(directory / "trl.yaml", COLOCATED | options | chosen, "--steps", str(STEPS))


def command_of_verl(failure: str, model: Path, directory: Path) -> list[str]:
    """verl's command line. Writes its prompts and its reward function into `directory`."""
    settings = grpo_settings(model, directory, BATCH, STEPS) | {
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 16,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 16,
        f"{ROLLOUT}.enforce_eager": True,
        f"{ROLLOUT}.gpu_memory_utilization": 0.3,
    }
    return verl_command(settings | dict(option.split("=", 1) for option in VERL[failure]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=["cpu", "trl", "verl"])
    parser.add_argument("failures", nargs="*", choices=[*TRL, []], metavar="FAILURE", help=", ".join(TRL))
    parser.add_argument("--output", type=Path, default=Path("runs/adapter_recovery"), help="of the attempts (replaced)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    main(**vars(parser.parse_args()))
