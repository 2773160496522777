"""Start of an attempt in a pod: its settings, which are never those of an earlier attempt or of an older memory plan.

A node refreshes the volume with the settings up to two and a half minutes after the operator has written them. A
container may start before that: in a pod that is restarted in place, or in a new pod on a node that still has the file
of an earlier pod. So each pod knows the attempt and the generation of the plan that it must run, and waits for these.
"""

from __future__ import annotations

import time

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.job import RLJob, grown_job
from rljob_api.manifest import load_manifest
from rljob_client.errors import RunError
from rljob_client.run_directory.durable_files import write_atomically
from rljob_trainer.pods.environment import InvalidEnvironment, PodEnvironment

WAIT_SECONDS = 180.0
"""A kubelet synchronizes a pod at least every 90 s, with a ConfigMap that it watches or reads every minute."""

_POLL_SECONDS = 0.5
_LOG_EVERY_SECONDS = 30.0


class RequiredAttempt(BaseModel):
    """The earliest attempt and plan that a pod may run."""

    model_config = ConfigDict(frozen=True)

    number: int = Field(ge=1)

    plan_generation: int = Field(ge=1)

    def is_met_by(self, settings: AttemptSettings) -> bool:
        """True if `settings` are those of this attempt and plan, or of later ones."""
        return settings.attempt >= self.number and settings.plan_generation >= self.plan_generation


class OutdatedSettings(RunError):
    """The settings of the attempt do not reach the pod, or no restart was requested. The pod fails, and is replaced."""


def start_attempt(environment: PodEnvironment) -> AttemptSettings:
    """Remove the files that earlier containers of the pod left, and wait for the settings of the attempt.

    Raises `OutdatedSettings` after `WAIT_SECONDS`, and `InvalidEnvironment` for a file that cannot be parsed.
    """
    environment.run_dir.mkdir(parents=True, exist_ok=True)
    required = required_attempt(environment)
    for file in (environment.ready_file, environment.controller_ended_file):
        file.unlink(missing_ok=True)
    settings = _wait_for_settings(environment, required)
    environment.attempt_file.write_text(str(settings.attempt), encoding="utf-8")
    environment.restart_file.unlink(missing_ok=True)
    return settings


def job_of_attempt(environment: PodEnvironment, settings: AttemptSettings) -> RLJob:
    """The job of the manifest, with the policy's size in the attempt. Raises `ManifestError`."""
    return grown_job(load_manifest(environment.manifest), settings.memory_plan)


def required_attempt(environment: PodEnvironment) -> RequiredAttempt:
    """The attempt that a restart in place was announced for, or the one that the pod was created for.

    A container that restarts without an announcement waits for the next attempt: the present one continues without it.
    """
    number, plan_generation = environment.attempt, environment.plan_generation
    if environment.attempt_file.exists():
        number = max(number, int(environment.attempt_file.read_text(encoding="utf-8")) + 1)
    if environment.restart_file.exists():
        announced = RequiredAttempt.model_validate_json(environment.restart_file.read_text(encoding="utf-8"))
        number, plan_generation = max(number, announced.number), max(plan_generation, announced.plan_generation)
    return RequiredAttempt(number=number, plan_generation=plan_generation)


def announce_restart(environment: PodEnvironment, attempt: RequiredAttempt) -> None:
    """Record that the containers of this pod are to be restarted in place for `attempt`."""
    write_atomically(environment.restart_file, attempt.model_dump_json().encode())


def _wait_for_settings(environment: PodEnvironment, required: RequiredAttempt) -> AttemptSettings:
    began = next_log = time.monotonic()
    while not required.is_met_by(settings := _read(environment)):
        now = time.monotonic()
        expected = f"attempt {required.number} with memory plan {required.plan_generation}"
        found = f"attempt {settings.attempt} with memory plan {settings.plan_generation}"
        if now - began >= WAIT_SECONDS:
            raise OutdatedSettings(
                f"expected {expected} in {environment.attempt_settings} within {WAIT_SECONDS:.0f} s, found {found}: "
                "the node does not refresh the volume, or the container was restarted without a new attempt; "
                "the pod is to be replaced"
            )
        if now >= next_log:
            print(f"waiting for {expected}; the node still has {found}", flush=True)
            next_log += _LOG_EVERY_SECONDS
        time.sleep(_POLL_SECONDS)
    return settings


def _read(environment: PodEnvironment) -> AttemptSettings:
    """One read of one file: Kubernetes replaces the files of a volume at once, so that none is half written."""
    file = environment.attempt_settings
    try:
        return AttemptSettings.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise InvalidEnvironment(
            f"expected the settings of an attempt in {file} (RLJOB_ATTEMPT_SETTINGS), found: {error}; check whether "
            "operator and trainer image have the same version"
        ) from error
