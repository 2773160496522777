"""`rljob run` with an engine of two processes, which has the policy's weights in every step, also after a failure."""

from __future__ import annotations

import json

import pytest
import yaml

from rljob_api.exit_codes import ExitCode
from rljob_testing.memory_plans import memory_plan
from rljob_testing.repository import EXAMPLES
from rljob_testing.runs import Run, rljob_run

STEPS = 4
FAILED_STEP = 2
PROCESSES = {"controller", "policy-0", "policy-1", "rollout-0", "rollout-1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A colocated run. The second process of its engine runs out of memory, for which the first one then waits."""
    directory = tmp_path_factory.mktemp("tensor_parallel")
    job = yaml.safe_load((EXAMPLES / "digits.yaml").read_text())
    job["spec"] |= {
        "policy": {"gpusPerReplica": 2},  # with --device cpu: two processes of each role
        "rollout": {"tensorParallelSize": 2},
        "faultInjection": {
            "enabled": True,
            "faults": [{"class": "KVCacheOversized", "phase": "rollout", "step": FAILED_STEP, "rank": 1}],
        },
    }
    job["spec"]["algorithm"]["steps"] = STEPS
    (directory / "job.yaml").write_text(yaml.safe_dump(job))
    (directory / "plan.json").write_text(json.dumps(memory_plan(kv_cache_bytes=128 << 20).model_dump(mode="json")))
    return rljob_run(directory / "job.yaml", directory / "run", "--plan", directory / "plan.json")


@pytest.mark.long
def test_a_failed_process_is_diagnosed_and_its_whole_engine_replaced(run: Run) -> None:
    assert run.exit_code == ExitCode.COMPLETE, run.printed
    [attempt] = run.attempts
    assert attempt["processes"].keys() == PROCESSES
    assert f"rollout rank 1 in rollout, step {FAILED_STEP}: KVCacheOversized" in run.printed
    starts = [log.read_text().count("starts as process") for log in sorted((run.output / "logs").glob("rollout-*.log"))]
    assert starts == [2, 2], "the process that waited for the failed one was replaced with it"


@pytest.mark.long
def test_the_engine_had_the_policys_weights_in_every_step(run: Run) -> None:
    assert [step["weights_version"] for step in run.steps] == list(range(1, STEPS + 1))
    assert max(step["metrics"]["logprob_diff_max"] for step in run.steps) <= 1e-4
