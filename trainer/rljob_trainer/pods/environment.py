"""What a pod tells the process in it, by environment variables: the contract with whoever makes the pods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import AliasGenerator, BaseModel, ConfigDict, Field, Json, ValidationError, model_validator

from rljob_api.exit_codes import ExitCode
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import PlanChange
from rljob_api.status import Role
from rljob_trainer.errors import TrainerError

TERMINATION_LOG_VARIABLE = "RLJOB_TERMINATION_LOG"
TERMINATION_LOG = Path("/dev/termination-log")


class InvalidEnvironment(TrainerError):
    """The pod was made wrong: nothing was started."""

    exit_code = ExitCode.INVALID_MANIFEST


class PodEnvironment(BaseModel):
    """What every pod of a job knows: `manifest` is RLJOB_MANIFEST, and so on. An empty variable counts as absent."""

    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        alias_generator=AliasGenerator(validation_alias=lambda name: f"RLJOB_{name.upper()}"),
        use_attribute_docstrings=True,
    )

    name: str
    """Name of the job."""

    namespace: str

    attempt: int = Field(ge=1)
    """The operator's number of this life of the pods."""

    workers: int = Field(ge=1)
    """Worker pods of the attempt."""

    manifest: Path
    """The job, as YAML."""

    output: Path
    """The volume that all pods of all attempts share."""

    ray_head: str = Field(pattern=r"^.+:\d+$")
    """Host and port at which the controller's pod is found."""

    ray_first_port: int = Field(default=6380, ge=1024, le=65000)
    """First of the ports that this pod's Ray listens on."""

    model_dir: Path | None = None
    """Where the model of an oci:// or pvc:// URI is mounted."""

    run_dir: Path = Path("/run/rljob")
    """Small files by which the processes of the pod, and its probes, know of each other."""

    termination_log: Path = TERMINATION_LOG

    join_timeout_seconds: float = Field(default=1800.0, gt=0)
    """How long the pods wait for each other before the attempt is given up."""

    restarts_in_place: bool = False
    """Whether the exit code that asks for it restarts all containers of the pod."""

    pod_ip: str = Field(validation_alias="POD_IP", min_length=1)

    ray_auth_token: str = Field(validation_alias="RAY_AUTH_TOKEN", min_length=1, repr=False)
    """Ray reads it itself; here it only has to be there."""

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Self:
        """Raises `InvalidEnvironment`, which names every variable that is missing or wrong."""
        try:
            return cls.model_validate({name: value for name, value in variables.items() if value})
        except ValidationError as error:
            problems = "; ".join(_problem(detail["loc"], detail["msg"], variables) for detail in error.errors())
            raise InvalidEnvironment(
                f"the pod's environment is not what `rljob` needs: {problems}. The operator makes pods "
                "that have it: does the job's pod template override a variable?"
            ) from error

    @property
    def ready_file(self) -> Path:
        return self.run_dir / "ready"

    @property
    def controller_ended_file(self) -> Path:
        """In a worker's pod: there once the controller has said that its end is in order."""
        return self.run_dir / "controller-ended"

    @property
    def restart_file(self) -> Path:
        """In a worker's pod: there once the controller has said that the pod is to be restarted in place."""
        return self.run_dir / "restart-in-place"

    @property
    def attempt_file(self) -> Path:
        """Number of the attempt that the containers last began, which outlives their restart in place."""
        return self.run_dir / "attempt"

    @property
    def stale_lives_file(self) -> Path:
        """How often the containers were restarted since, only to find the environment of that attempt again."""
        return self.run_dir / "stale-lives"

    def worker_pod_name(self, index: int) -> str:
        return f"{self.name}-policy-{index}"

    @property
    def ray_head_address(self) -> tuple[str, int]:
        host, _, port = self.ray_head.rpartition(":")
        return host, int(port)


class ControllerEnvironment(PodEnvironment):
    """What the controller's pod knows beside."""

    step_report: str | None = None
    """Name of the StepReport to write. Absent: nothing is reported."""

    memory_plan: Json[MemoryPlan] | None = None
    """Absent: the first attempt, which works it out."""

    plan_changes: Json[list[PlanChange]] = Field(default_factory=list)
    """Changes of the plan that the operator knows of, oldest first."""

    policy_environment: Json[dict[str, str]] | None = None
    """Variables of the CUDA allocator for each process of the role. Absent: those that suit the image's torch."""

    rollout_environment: Json[dict[str, str]] | None = None

    service_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Token and certificate authority of the API server."""

    @property
    def allocator_environments(self) -> dict[Role, dict[str, str]]:
        given: dict[Role, dict[str, str] | None] = {
            "policy": self.policy_environment,
            "rollout": self.rollout_environment,
        }
        return {role: variables for role, variables in given.items() if variables is not None}


class WorkerEnvironment(PodEnvironment):
    """What a worker's pod knows beside."""

    index: int = Field(ge=0)
    """Number of the worker, from 0."""

    @model_validator(mode="after")
    def _index_is_one_of_the_workers(self) -> Self:
        if self.index >= self.workers:
            raise ValueError(f"RLJOB_INDEX must be below RLJOB_WORKERS ({self.workers}), found {self.index}")
        return self


def _problem(location: tuple[int | str, ...], message: str, variables: Mapping[str, str]) -> str:
    if not location:
        return message.removeprefix("Value error, ")
    name = str(location[0])
    found = "it is not set" if not variables.get(name) else f"found {variables[name][:80]!r}"
    field = ".".join(map(str, location[1:]))
    return f"{name}{f' ({field})' if field else ''}: {message}, {found}"
