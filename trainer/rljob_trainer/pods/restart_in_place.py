"""Restart in place: a failed controller waits for the next attempt, for which its pods are restarted.

The operator writes the memory plan to the job's status, then the pods' environment to their ConfigMap, and finally the
record of the next attempt. Once that record exists, restarted containers get the new environment. Pods that are to be
replaced are deleted instead, and the signal ends the wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from rljob_api.exit_codes import ExitCode
from rljob_api.names import API_VERSION
from rljob_api.step_report import PendingExit
from rljob_trainer.errors import TrainerError
from rljob_trainer.pods.environment import PodEnvironment
from rljob_trainer.step_report.api_server import ApiServer, NoAnswer

WAIT_SECONDS = 60.0
MAY_RESTART_IN_PLACE = frozenset(
    {
        ExitCode.DEVICE_OUT_OF_MEMORY,
        ExitCode.HOST_OUT_OF_MEMORY,
        ExitCode.SHARED_MEMORY_EXHAUSTED,
        ExitCode.WORKER_LOST,
    }
)
"""Failures after which new processes in the same pods can resume."""

MAX_STALE_STARTS = 20
"""Limit for restarts with an old environment. A restart takes at least 2 s, and a node sees a changed ConfigMap within
a minute. The kubelet has no back-off for these restarts, and the operator may be down."""

_POLL_SECONDS = 1.0
_LONGEST_MESSAGE = 1024

Next = Literal["Restart", "End", "Wait"]


class StaleEnvironment(TrainerError):
    """The containers were restarted before their node had the new environment."""

    exit_code = ExitCode.RESTART_IN_PLACE


class NoNewEnvironment(TrainerError):
    """The new environment does not arrive, or no restart was requested. The pod fails, so that it is replaced."""


def prepare_pod(environment: PodEnvironment) -> None:
    """Remove the files that earlier containers of the pod left.

    Raises `StaleEnvironment`, after a short wait, if the containers were restarted with their old environment, and
    `NoNewEnvironment` after `MAX_STALE_STARTS` of these restarts.
    """
    environment.run_dir.mkdir(parents=True, exist_ok=True)
    left = [environment.ready_file, environment.controller_ended_file, environment.restart_file]
    for file in left:
        file.unlink(missing_ok=True)
    attempt_file, stale_starts_file = environment.attempt_file, environment.stale_starts_file
    restarted = environment.restarts_in_place and attempt_file.exists()
    if restarted and int(attempt_file.read_text()) >= environment.attempt:
        _exit_stale_start(stale_starts_file, environment.attempt)
    attempt_file.write_text(str(environment.attempt))
    stale_starts_file.unlink(missing_ok=True)


def _exit_stale_start(file: Path, attempt: int) -> NoReturn:
    starts = int(file.read_text()) + 1 if file.exists() else 1
    file.write_text(str(starts))
    still = f"the environment is still that of attempt {attempt}"
    if starts > MAX_STALE_STARTS:
        raise NoNewEnvironment(
            f"expected a new environment within {MAX_STALE_STARTS} restarts in place, {still}; replace the pod"
        )
    time.sleep(_POLL_SECONDS)
    raise StaleEnvironment(f"{still}: restarting the containers again")


class JobReader:
    """Reads the RLJob of the pod from the API server."""

    def __init__(self, server: ApiServer, namespace: str, name: str) -> None:
        self._server = server
        self._path = f"/apis/{API_VERSION}/namespaces/{namespace}/rljobs/{name}"

    def __call__(self) -> Mapping[str, Any]:
        """The RLJob. Raises `NoAnswer`."""
        found: dict[str, Any] = json.loads(self._server.get(self._path))
        return found


def pending_exit(exit_code: ExitCode, message: str) -> PendingExit:
    """The StepReport's entry for an attempt that exits with `exit_code` unless it is restarted in place."""
    return PendingExit(exit_code=exit_code, message=message[:_LONGEST_MESSAGE])


def wait_for_restart(read_job: Callable[[], Mapping[str, Any]], attempt: int) -> bool:
    """Wait for the operator's decision, for at most a minute. True if the pods are to be restarted in place.

    `read_job`: returns the stored RLJob; may raise `NoAnswer`.
    """
    give_up_at = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < give_up_at:
        try:
            decided = next_for(read_job().get("status") or {}, attempt)
        except NoAnswer:
            decided = "Wait"
        if decided != "Wait":
            return decided == "Restart"
        time.sleep(_POLL_SECONDS)
    return False


def next_for(status: Mapping[str, Any], attempt: int) -> Next:
    """The operator's decision for the failed pods of `attempt`, from the job's status. Pure."""
    latest = (status.get("attempts") or [{}])[-1]
    if latest.get("number", 0) > attempt:
        return "Restart" if "podsOfAttempt" in latest else "End"
    failed = any(c["type"] == "Failed" and c["status"] == "True" for c in status.get("conditions") or ())
    return "End" if failed else "Wait"
