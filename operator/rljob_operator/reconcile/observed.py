"""What is known of one job at one moment, reduced to what decisions need."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from rljob_api.job import RLJob
from rljob_api.status import RLJobStatus, Role
from rljob_api.step_report import StepReport
from rljob_api.termination_message import TerminationMessage

PodPhase = Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]


@dataclass(frozen=True, slots=True)
class ContainerTermination:
    """How the container `rljob` of a pod ended."""

    exit_code: int
    reason: str
    """As the kubelet says it: Completed, Error, OOMKilled, ContainerStatusUnknown, …"""
    finished_at: datetime | None
    message: TerminationMessage | None
    """What the trainer left in /dev/termination-log; None where there is nothing, or nothing that can be read."""
    text: str = ""
    """The termination message as it is, for people, where it is not the trainer's JSON; at most 1,024 characters."""


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """A pod that belongs to the job: it is controlled by it (owner reference with the job's uid)."""

    name: str
    uid: str
    role: Role
    index: int
    attempt: int
    phase: PodPhase
    created_at: datetime
    node: str | None = None
    scheduled_at: datetime | None = None
    """When the condition PodScheduled became true."""
    ready: bool = False
    started: bool = False
    """The container `rljob` runs or has run."""
    deleting: bool = False
    """It has a deletion timestamp: somebody wants it gone."""
    deletion_grace_seconds: int | None = None
    """How long it may take to end then; None where it is not being deleted."""
    gated: bool = False
    """A scheduling gate holds it, such as Kueue's."""
    unschedulable: str | None = None
    """What the scheduler says (message of the condition PodScheduled) where it finds no node."""
    waiting: str | None = None
    """Why a container does not start, as `reason: message` of its waiting state: ErrImagePull,
    CreateContainerConfigError, … Not the ordinary ContainerCreating and PodInitializing."""
    end: ContainerTermination | None = None
    disruption: str | None = None
    """Reason of the condition DisruptionTarget (PreemptionByScheduler, EvictionByEvictionAPI, DeletionByTaintManager,
    TerminationByKubelet, …), or Evicted, NodeLost, NodeShutdown from the pod's own reason."""
    restart_count: int = 0
    memory_limit_bytes: int | None = None
    """Host memory limit of the container `rljob`; None: it has none."""
    shared_memory_bytes: int | None = None
    """Size of its /dev/shm; None where the pod's volume for it has no size."""
    restarts_in_place: bool = False
    """All its containers are restarted when the container `rljob` asks for it by its exit code."""
    spec_digest: str = ""
    """Of the spec that it was made with."""

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def placed_at(self) -> datetime:
        """When it got its node, as far as that is known."""
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
    """Its kubelet knows the rule by which an exit code restarts all containers of a pod."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a decision about one job may depend on."""

    job: RLJob | None
    """The job, parsed. None where the stored object does not parse: `problem` says why. A status that does not parse
    makes no problem: it is left out."""
    namespace: str
    name: str
    uid: str
    generation: int
    created_at: datetime
    deleting: bool
    has_finalizer: bool
    pods: tuple[ObservedPod, ...]
    step_report: StepReport | None
    nodes: tuple[ObservedNode, ...]
    problem: str | None = None
    stored_status: RLJobStatus | None = None
    """The status where `job` is None, as far as it can be read."""
    foreign_pods: tuple[str, ...] = ()
    """Names of pods that have a name this job needs, or its labels, and are not its own."""
    step_report_problem: str | None = None
    """Why the StepReport cannot be read, where it cannot."""
    namespace_terminating: bool = False
    refused: str | None = None
    """The API server's last answer where it refused an object of this job for good (403 quota or policy, 422), until a
    write for the job succeeds."""
    volcano_installed: bool = False
    kueue_installed: bool = False
    fresh_token: str = ""
    """A new random token, for a Ray token Secret that does not exist yet."""

    @property
    def status(self) -> RLJobStatus:
        """The stored status, as far as it can be read."""
        stored = self.job.status if self.job else self.stored_status
        return stored or RLJobStatus()
