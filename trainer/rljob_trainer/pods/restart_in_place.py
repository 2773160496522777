"""A controller that cannot go on waits for the next attempt, which its pods are then restarted for, in place.

The operator writes the memory plan into the job's status, the pods' environment into their ConfigMap, and last the
record of the next attempt: once that is there, a container that starts anew has the new environment. Pods that are to
be replaced are deleted instead, which ends the wait by a signal.
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
"""Ends after which fresh processes in the same pods can go on."""
MOST_STALE_LIVES = 20
"""A restart takes 2 s and more, and a node knows of a changed ConfigMap within a minute. The operator may be away, and
the kubelet has no back-off for such restarts, so that nobody else would end them."""

_LOOK_EVERY_SECONDS = 1.0
_LONGEST_MESSAGE = 1024

Next = Literal["Restart", "End", "Wait"]


class StaleEnvironment(TrainerError):
    """The containers were restarted before the node knew of their new environment."""

    exit_code = ExitCode.RESTART_IN_PLACE


class NoNewEnvironment(TrainerError):
    """The node does not come to know it, or nobody asked for the restart: the pod ends, so that it can be replaced."""


def begin_life(environment: PodEnvironment) -> None:
    """Clear away what the containers' last life left in the pod.

    Raises `StaleEnvironment`, after a moment's wait, where they were restarted and their environment is still the old
    one, and `NoNewEnvironment` after `MOST_STALE_LIVES` of those.
    """
    environment.run_dir.mkdir(parents=True, exist_ok=True)
    left = [environment.ready_file, environment.controller_ended_file, environment.restart_file]
    for file in left:
        file.unlink(missing_ok=True)
    attempt_file, stale_lives_file = environment.attempt_file, environment.stale_lives_file
    restarted = environment.restarts_in_place and attempt_file.exists()
    if restarted and int(attempt_file.read_text()) >= environment.attempt:
        _end_stale_life(stale_lives_file, environment.attempt)
    attempt_file.write_text(str(environment.attempt))
    stale_lives_file.unlink(missing_ok=True)


def _end_stale_life(file: Path, attempt: int) -> NoReturn:
    lives = int(file.read_text()) + 1 if file.exists() else 1
    file.write_text(str(lives))
    still = f"the environment is still that of attempt {attempt}"
    if lives > MOST_STALE_LIVES:
        raise NoNewEnvironment(
            f"after {lives} restarts of the containers in place, {still}: the pod has to be replaced"
        )
    time.sleep(_LOOK_EVERY_SECONDS)
    raise StaleEnvironment(f"{still}: the containers are restarted once more")


class JobReader:
    """Reads the pod's own RLJob, as it is stored."""

    def __init__(self, server: ApiServer, namespace: str, name: str) -> None:
        self._server = server
        self._path = f"/apis/{API_VERSION}/namespaces/{namespace}/rljobs/{name}"

    def __call__(self) -> Mapping[str, Any]:
        """Raises `NoAnswer`."""
        found: dict[str, Any] = json.loads(self._server.get(self._path))
        return found


def pending_exit(exit_code: ExitCode, message: str) -> PendingExit:
    """What the StepReport says of an attempt that ends with `exit_code`, unless a changed plan comes."""
    return PendingExit(exit_code=exit_code, message=message[:_LONGEST_MESSAGE])


def wait_for_restart(read_job: Callable[[], Mapping[str, Any]], attempt: int) -> bool:
    """Whether the pods are to be restarted in place; for at most a minute. `read_job`: the RLJob as it is stored; may
    raise `NoAnswer`."""
    give_up_at = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < give_up_at:
        try:
            decided = next_for(read_job().get("status") or {}, attempt)
        except NoAnswer:
            decided = "Wait"
        if decided != "Wait":
            return decided == "Restart"
        time.sleep(_LOOK_EVERY_SECONDS)
    return False


def next_for(status: Mapping[str, Any], attempt: int) -> Next:
    """What the job's status holds for the pods of `attempt`, which cannot go on. Pure."""
    latest = (status.get("attempts") or [{}])[-1]
    if latest.get("number", 0) > attempt:
        return "Restart" if "podsOfAttempt" in latest else "End"
    failed = any(c["type"] == "Failed" and c["status"] == "True" for c in status.get("conditions") or ())
    return "End" if failed else "Wait"
