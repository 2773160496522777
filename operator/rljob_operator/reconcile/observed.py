"""The observed state of one job, its pods and the nodes: the input of decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJob
from rljob_api.status import RLJobStatus, Role
from rljob_api.step_report import StepReportStatus
from rljob_api.termination_message import TerminationMessage
from rljob_operator.labels import FINALIZER

PodPhase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]

OUT_OF_MEMORY_CODES = frozenset(
    {ExitCode.DEVICE_OUT_OF_MEMORY, ExitCode.HOST_OUT_OF_MEMORY, ExitCode.SHARED_MEMORY_EXHAUSTED}
)


@dataclass(frozen=True, slots=True)
class ContainerTermination:
    """Termination of the container `rljob` of a pod."""

    exit_code: int
    reason: str
    """The kubelet's: Completed, Error, OOMKilled, ContainerStatusUnknown, …"""
    finished_at: datetime | None
    message: TerminationMessage | None
    """Message of the trainer in /dev/termination-log; None if there is none, or if it cannot be parsed."""
    text: str = ""
    """The raw termination message, if it is not the trainer's JSON; at most 1,024 characters."""

    @property
    def is_out_of_memory(self) -> bool:
        return self.reason == "OOMKilled" or self.exit_code in OUT_OF_MEMORY_CODES


@dataclass(frozen=True, slots=True)
class ContainerFailure:
    """Failure of a container other than `rljob`."""

    name: str
    exit_code: int
    reason: str
    """The kubelet's: Error, OOMKilled, StartError, …"""
    text: str
    """Its termination message; at most 1,024 characters."""

    def message(self, kind: str, pod: str) -> str:
        """Message about the failure. `kind`: init container, or container."""
        reason = f" ({self.reason})" if self.reason not in ("", "Error") else ""
        details = f": {self.text}" if self.text else f"; kubectl logs {pod} -c {self.name} has more"
        return f"{kind} {self.name} of pod {pod} exited with code {self.exit_code}{reason}{details}"


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """A pod that the job controls (owner reference with the job's uid)."""

    name: str
    uid: str
    role: Role
    index: int
    attempt: int
    phase: PodPhase
    created_at: datetime
    node: str | None = None
    scheduled_at: datetime | None = None
    ready: bool = False
    """The container `rljob` is ready, on a node that reports."""
    started: bool = False
    """The container `rljob` runs or has run."""
    deleting: bool = False
    deletion_grace_seconds: int | None = None
    deletion_due_at: datetime | None = None
    """Deletion timestamp, at which the grace period ends."""
    gated: bool = False
    """A scheduling gate holds it, such as Kueue's."""
    in_group: bool = False
    """It was created in a group of Kueue or Volcano."""
    unschedulable: str | None = None
    """Message of the scheduler (condition PodScheduled) if it finds no node."""
    waiting: str | None = None
    """Reason why a container does not start, as `reason: message`: ErrImagePull, CreateContainerConfigError, … but not
    ContainerCreating and PodInitializing. The message names a container other than `rljob`."""
    end: ContainerTermination | None = None
    failed_init_container: ContainerFailure | None = None
    """Init container that failed and is not restarted."""
    failed_sidecar: ContainerFailure | None = None
    """Container other than `rljob` that failed and is not restarted."""
    running_sidecars: tuple[str, ...] = ()
    """Names of the containers other than `rljob` that run."""
    evicted: str | None = None
    """Message of the kubelet if it evicted the pod for exceeding a limit of its own, such as that of a volume."""
    disruption: str | None = None
    """Reason of the condition DisruptionTarget (PreemptionByScheduler, …), or of the pod (NodeLost, NodeShutdown)."""
    restart_count: int = 0
    memory_limit_bytes: int | None = None
    """Host memory limit of the container `rljob`; None without a limit."""
    memory_request_bytes: int | None = None
    """Host memory request of the container `rljob`; None without a request."""
    resize_pending: str = ""
    """Message of the kubelet about a new memory limit that its node has no room for."""
    shared_memory_bytes: int | None = None
    """Size of its /dev/shm; None without a limit."""
    restarts_in_place: bool = False
    """It has a restart rule: an exit code of the container `rljob` restarts all containers."""
    spec_digest: str = ""
    """Digest of the spec that it was created with."""

    @property
    def has_terminated(self) -> bool:
        """All containers of the pod have terminated: it holds no resources of its node."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def ended(self) -> bool:
        """The trainer in it has ended, even if other containers still run in the pod.

        A sidecar that keeps running, such as a service mesh injects, keeps the phase at Running.
        """
        restarts = self.end is not None and self.restarts_in_place and self.end.exit_code == ExitCode.RESTART_IN_PLACE
        return self.has_terminated or (self.end is not None and not restarts)

    @property
    def kept_by(self) -> str:
        """The containers that keep a pod whose trainer has ended, for messages; empty if there are none."""
        if not self.ended or self.has_terminated or not self.running_sidecars:
            return ""
        names = ", ".join(self.running_sidecars)
        if len(self.running_sidecars) == 1:
            return f"container {names} of pod {self.name} still runs"
        return f"containers {names} of pod {self.name} still run"

    @property
    def taken_by_cluster(self) -> bool:
        """It was evicted, deleted or preempted, or lost with its node."""
        lost = self.ended and (self.end is None or self.end.reason == "ContainerStatusUnknown")
        return bool(self.disruption) or self.deleting or lost

    @property
    def placed_at(self) -> datetime:
        """Time of its scheduling, or of its creation if that is unknown."""
        return self.scheduled_at or self.created_at


@dataclass(frozen=True, slots=True)
class ObservedNode:
    name: str
    gpus: int
    """Allocatable GPUs."""
    usable: bool
    """Ready and not cordoned."""
    tainted: bool = False
    """It has a taint (NoSchedule or NoExecute) that keeps pods without a toleration off."""
    restarts_in_place: bool = False
    """Its kubelet supports restart rules that restart all containers of a pod."""
    gpu: str = ""
    """Type of its GPUs by a label of the node, or their product name; empty: unknown."""
    gpu_memory_bytes: int = 0
    """Memory of each of its GPUs; 0: unknown."""
    host_memory_bytes: int = 0
    """Allocatable host memory, in whole GiB; 0: unknown."""
    labels: tuple[str, ...] = ()
    """Its labels, each as NAME=VALUE."""
    unreachable_since: datetime | None = None
    """Time at which its kubelet stopped reporting (condition Ready is Unknown); None if it reports."""


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A MemoryProfile. It is parsed only for the jobs that it is about."""

    namespace: str
    last_used_at: datetime
    text: bytes
    """The object as JSON, without managed fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMetadata:
    """Facts about a job that are known even if it cannot be parsed."""

    namespace: str
    name: str
    uid: str
    generation: int
    created_at: datetime
    deleting: bool
    finalizers: tuple[str, ...]
    resource_version: str = ""
    """The job's. Writes of the job name it, so that they fail if the job has changed since."""
    operator: str = ""
    """Installation of the operator that reconciles the job, from its annotation; empty if none does yet."""
    delegated: bool = False
    """`spec.managedBy` leaves the job to another controller, whether or not the spec is valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedJob(JobMetadata):
    """Everything that a decision about one job may depend on."""

    job: RLJob | None
    """The job, without a status that cannot be parsed; None if the job cannot be parsed: `problem` has the error."""
    pods: tuple[ObservedPod, ...]
    step_report: StepReportStatus | None
    """The job's own; None if there is none, or if it cannot be parsed: `step_report_problem` has the error."""
    nodes: tuple[ObservedNode, ...]
    raw_status: dict[str, Any] = field(default_factory=dict)
    """The status as it is stored. Writes of the status are patches of it."""
    problem: str | None = None
    stored_status: RLJobStatus | None = None
    """The status if `job` is None and the status can be parsed."""
    foreign_pods: tuple[str, ...] = ()
    """Foreign pods with a name that this job needs, or with its labels."""
    step_report_problem: str | None = None
    step_report_version: str = ""
    """Its resourceVersion."""
    namespace_terminating: bool = False
    refused: str | None = None
    """Message of the API server about an object that it refused (403, 404, 422), until a write for the job succeeds."""
    missing_object: str | None = None
    """Message about an object that the job names and that does not exist, until a write for the job succeeds."""
    foreign_object: str | None = None
    """Message about an object that is not the job's and has a name that the job needs."""
    left_behind: str | None = None
    """Message about an object of a deleted job of the same name, which is about to be removed."""
    status_wait_seconds: float = 0.0
    """Seconds until a write of the status that only reports may be made; 0: now."""
    objects_check_seconds: float | None = None
    """Seconds until the objects other than the pods are looked up, in case one was deleted; 0: now."""
    profiles: Mapping[str, StoredProfile] = field(default_factory=dict)
    """MemoryProfiles of the job's namespace, by name."""
    shared_profiles: Mapping[str, StoredProfile] = field(default_factory=dict)
    """MemoryProfiles of all namespaces, by name, if the jobs of a namespace may use those of others."""
    volcano_installed: bool = False
    kueue_installed: bool = False
    fresh_token: str = ""
    """A new random token, for a Ray token Secret that does not exist yet."""

    @property
    def has_finalizer(self) -> bool:
        return FINALIZER in self.finalizers

    @property
    def status(self) -> RLJobStatus:
        """The stored status; empty if it cannot be parsed."""
        stored = self.job.status if self.job else self.stored_status
        return stored or RLJobStatus()
