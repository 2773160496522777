"""The processes of the roles in a pod write compiled code to the directory that the worker restores and saves."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rljob_testing.runs import write_manifest
from tests.integration.pod_processes import Pods
from tests.integration.stopped_runs import MORE_STEPS_THAN_NEEDED

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT")


def role_environments(worker: psutil.Process) -> list[dict[str, str]]:
    """Of the Ray actors in the pod: policy and rollout."""
    environments = []
    for process in worker.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # Ray's idle processes end at any time
            if process.name().startswith("ray::RoleActor"):
                environments.append(process.environ())
    return environments


@pytest.mark.long
def test_policy_and_rollout_write_to_the_directory_of_the_pod(tmp_path: Path) -> None:
    manifest = write_manifest(
        tmp_path / "job.yaml", algorithm={"steps": MORE_STEPS_THAN_NEEDED}, policy={"gpusPerReplica": 0}
    )
    volume = tmp_path / "volume" / ".compile-cache"
    pods = Pods(tmp_path, manifest, 1, of_workers={"RLJOB_COMPILE_CACHE_DIR": str(volume)})
    attempt = pods.start(1)
    try:
        attempt.wait_for_step(1)
        (worker,) = attempt.workers
        environments = role_environments(psutil.Process(worker.process.pid))
        assert len(environments) == 2
        for environment in environments:
            for variable in VARIABLES:
                assert Path(environment[variable]).is_relative_to(worker.temporary / "rljob-compiled")
        assert "compiled code: none in" in worker.log
    finally:
        attempt.kill()
