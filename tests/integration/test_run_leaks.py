"""A process that leaks 200 MiB a step is replaced between two steps, before its container is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.exit_codes import ExitCode
from rljob_client.run_directory.memory_logs import logged_samples
from rljob_memory.sizes import GIB
from rljob_testing.machine import memory_group
from rljob_testing.patience import wait_for_end
from rljob_testing.runs import COLD, FinishedRun, start_rljob, write_manifest
from rljob_trainer.roles.faults import LEAKED_BYTES
from tests.integration.compared_runs import plan_changes

STEPS, LIMIT = 36, 6 * GIB
"""7 GiB are leaked. The processes of a run take some 3 GiB."""


@pytest.mark.parametrize(
    ("phase", "replaced"),
    [("update", "policyProcesses"), pytest.param("rollout", "engineProcesses", marks=pytest.mark.long)],
)
def test_a_process_that_leaks_is_replaced_without_a_kill_or_a_repeated_step(
    phase: str, replaced: str, tmp_path: Path
) -> None:
    manifest = write_manifest(
        tmp_path / "job.yaml",
        algorithm={"steps": STEPS, "promptsPerStep": 2, "groupSize": 2, "maxResponseTokens": 4},
        faultInjection={"enabled": True},
        checkpoint={"everySteps": 1000},
        recovery={"maxAdjustments": 0, "maxRestarts": 0},
    )
    options: list[str | Path] = ["--output", tmp_path / "run", "--device", "cpu", f"--fault=Leak@{phase}:1x{STEPS}"]
    try:
        with memory_group(LIMIT) as group:
            process = start_rljob("run", manifest, *options, **COLD)
            (group / "cgroup.procs").write_text(str(process.pid))
            printed = wait_for_end(process)
    except OSError as error:
        pytest.skip(f"a cgroup with a memory limit cannot be made: {error}")
    run = FinishedRun(process.returncode, printed, tmp_path / "run")
    assert run.exit_code == ExitCode.COMPLETE, printed
    assert [step["step"] for step in run.steps] == list(range(1, STEPS + 1))
    assert len(run.attempts) == 1
    assert sum(line["kind"] == "fault" for line in run.ledger) == STEPS, "each step was worked on once"
    assert sum(line.get("replayed_steps", 0) for line in run.ledger) == 0
    changes = {(change["remedy"]["setting"], change["preventive"]) for change in plan_changes(run)}
    assert changes == {(replaced, True)}
    samples = [sample for _, sample in logged_samples(run.output / "memory")]
    assert {sample.oom_kills for sample in samples} == {0}
    assert max(sample.host_limit_bytes for sample in samples) == LIMIT
    assert STEPS * LEAKED_BYTES > LIMIT, "without new processes, the container would have been full"
