"""Another trainer that runs out of memory until an adapter has changed its options.

Probe, diagnosis, recovery engine and adapter work together as in pods, without a cluster.

    python -m bench.programs.adapter_recovery --adapter TRL --data-limit-mib 2600 -- python images/trl/train.py
    python -m bench.programs.adapter_recovery --adapter TRL --gpu --name adapter_recovery_h200 -- \\
        python -m bench.programs.trl_steps MODEL --micro-batch 128

The first trains on a CPU under a limit of private memory (RLIMIT_DATA), the second on a GPU that its micro-batch does
not fit. TRL, or verl, has to be importable, and the packages of requirements/operator.txt. With torch's build for CUDA,
2,100 MiB are private before the first step; TRL's tile for log-probabilities has 512 MiB until a micro-batch has fewer
than 4,096 tokens. Records `bench/results/adapter_recovery.json`, or `--name`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.harness.record import record
from rljob_api.job import RLJobSpec
from rljob_api.step_report import Evidence
from rljob_api.termination_message import read_termination_message
from rljob_memory.diagnosis import diagnosed
from rljob_memory.next_plan import adapter_changes, other_trainers_first_plan
from rljob_memory.recovery import Changed, Constraints, FailureReport, RecoveryState, Restart, respond
from rljob_testing.repository import ROOT

SITE = ROOT / "images" / "probe" / "rljob_probe" / "site"
MOST_ATTEMPTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--adapter", choices=("TRL", "Verl"), default="TRL")
    parser.add_argument("--data-limit-mib", type=int, help="limit of each process's private memory")
    parser.add_argument("--gpu", action="store_true", help="the program trains on a GPU")
    parser.add_argument("--name", default="adapter_recovery", help="of the file in bench/results")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    spec = job_spec(given.adapter, gpus=int(given.gpu))
    with tempfile.TemporaryDirectory() as directory:
        attempts = recovered(spec, given.command, given.data_limit_mib, Path(directory))
    limit = f", each process limited to {given.data_limit_mib} MiB of private memory" if given.data_limit_mib else ""
    record(given.name, attempts, f"adapter {given.adapter}, command {' '.join(given.command)}{limit}")
    if attempts[-1]["exit_code"] != 0:
        sys.exit("the program did not complete; the last attempt has the reason")


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


@contextmanager
def kept_directory(logs: Path | None, name: str) -> Iterator[Path]:
    """A directory for the files of a program: `name` in `logs`, or a temporary one."""
    if logs is None:
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)
    else:
        (logs / name).mkdir(parents=True, exist_ok=True)
        yield (logs / name).absolute()


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
        profile=None,
        levels=frozenset({"ReplacePods"}),
        supported_settings=spec.trainer.changeable_settings,
        without_gpus=spec.policy.gpus_per_replica == 0,
        host_memory_limit_bytes=limit_mib << 20 if limit_mib else None,
    )


if __name__ == "__main__":
    main()
