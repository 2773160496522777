"""Environment variables of the pods: the interface between operator and trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import AliasGenerator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJobSpec
from rljob_api.status import Role
from rljob_api.topology import worker_pods
from rljob_client.errors import RunError

TERMINATION_LOG_VARIABLE = "RLJOB_TERMINATION_LOG"
TERMINATION_LOG = Path("/dev/termination-log")


class InvalidEnvironment(RunError):
    """The pod is misconfigured; nothing was started."""

    exit_code = ExitCode.INVALID_MANIFEST


class PodEnvironment(BaseModel):
    """Variables of every pod of a job: `manifest` is RLJOB_MANIFEST, and so on. Empty variables count as absent."""

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
    """The attempt that the pod was created for. After a restart in place, `attempt_settings` has a later one."""

    plan_generation: int = Field(ge=1)
    """Generation of the memory plan that the pod was created for."""

    attempt_settings: Path
    """JSON file with `AttemptSettings` of the current attempt, which the node may refresh late."""

    workers: int = Field(ge=1)
    """Worker pods of the attempt."""

    manifest: Path
    """YAML file with the job."""

    output: Path
    """The volume that all pods of all attempts share."""

    ray_head: str = Field(pattern=r"^.+:\d+$")
    """Host and port of Ray in the controller's pod."""

    ray_first_port: int = Field(default=6380, ge=1024, le=65000)
    """First of the ports that this pod's Ray listens on."""

    model_dir: Path | None = None
    """Mount path of the model, for an oci:// or pvc:// URI."""

    task_dir: Path | None = None
    """Mount path of the files of the task. Absent: they are next to the manifest."""

    run_dir: Path = Path("/run/rljob")
    """Directory of small files through which the pod's processes and probes communicate."""

    termination_log: Path = TERMINATION_LOG

    join_timeout_seconds: float = Field(default=1800.0, gt=0)
    """Time that the pods wait for each other before the attempt fails."""

    restarts_in_place: bool = False
    """True if exit code 86 restarts all containers of the pod in place."""

    pod_ip: str = Field(validation_alias="POD_IP", min_length=1)

    ray_auth_token: str = Field(validation_alias="RAY_AUTH_TOKEN", min_length=1, repr=False)
    """Ray reads it from the environment; here it is only required to exist."""

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Self:
        """Parse `variables`. Raises `InvalidEnvironment`, which names every missing or invalid variable."""
        try:
            return cls.model_validate({name: value for name, value in variables.items() if value})
        except ValidationError as error:
            problems = "; ".join(_problem(detail["loc"], detail["msg"], variables) for detail in error.errors())
            raise InvalidEnvironment(
                f"the environment of the pod is invalid: {problems}. The operator sets these variables; "
                "check whether the job's pod template overrides one"
            ) from error

    @property
    def ready_file(self) -> Path:
        return self.run_dir / "ready"

    @property
    def controller_ended_file(self) -> Path:
        """File in a worker's pod that exists once the controller has announced its exit."""
        return self.run_dir / "controller-ended"

    @property
    def restart_file(self) -> Path:
        """The attempt for which the containers are to be restarted in place, once the controller has announced it."""
        return self.run_dir / "restart-in-place"

    @property
    def attempt_file(self) -> Path:
        """Number of the last attempt that began in this pod. The file survives a restart in place."""
        return self.run_dir / "attempt"

    def worker_pod_names(self, spec: RLJobSpec) -> list[str]:
        """Names of the worker pods, in the order of their numbers: those of the policy, then those of the rollout."""
        return [f"{self.name}-{pods.role}-{index}" for pods in worker_pods(spec) for index in range(pods.replicas)]

    @property
    def ray_head_address(self) -> tuple[str, int]:
        host, _, port = self.ray_head.rpartition(":")
        return host, int(port)


class ControllerEnvironment(PodEnvironment):
    """Additional variables of the controller's pod."""

    step_report: str | None = None
    """Name of the StepReport to write. Absent: no reports."""

    metrics_port: int = Field(default=9464, ge=1, le=65535)
    """Port of the job's Prometheus metrics."""

    metrics_token_sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")
    """SHA-256 of the bearer token of those who may read the metrics. Absent: none are served."""

    service_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """Directory with the token and the certificate authority of the API server."""


class WorkerEnvironment(PodEnvironment):
    """Additional variables of a worker's pod."""

    role: Role = "policy"
    """Role of the pod: policy, or rollout if the engines have pods of their own."""

    index: int = Field(ge=0)
    """Number of the pod among those of its role, from 0."""

    compile_cache_dir: Path | None = None
    """Directory on a volume in which compiled code is kept. Absent: it is gone with the pod."""

    @model_validator(mode="after")
    def _index_is_one_of_the_workers(self) -> Self:
        if self.index >= self.workers:
            raise ValueError(f"RLJOB_INDEX must be below RLJOB_WORKERS ({self.workers}), found {self.index}")
        return self

    def worker_number(self, spec: RLJobSpec) -> int:
        """Number of the worker among all worker pods, from 0: those of the policy come first."""
        before = 0 if self.role == "policy" else worker_pods(spec)[0].replicas
        return before + self.index


def _problem(location: tuple[int | str, ...], message: str, variables: Mapping[str, str]) -> str:
    if not location:
        return message.removeprefix("Value error, ")
    name = str(location[0])
    found = "it is not set" if not variables.get(name) else f"found {variables[name][:80]!r}"
    field = ".".join(map(str, location[1:]))
    return f"{name}{f' ({field})' if field else ''}: {message}, {found}"
