"""A failure as it is reported to the recovery engine, as a remedy sees it, and the answers to it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import DiagnosisStatus, Phase, PlanChange, Role
from rljob_api.step_report import Evidence
from rljob_memory.budget import Phase as BudgetPhase
from rljob_memory.budget import Place, Pod, Setup, budget
from rljob_memory.budget.host import FEWEST_COPIES, host_holds
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.constraints import Constraints
from rljob_memory.recovery.state import RecoveryState

# Answers to a failure: a changed memory plan, a restart under the same plan, or giving up.


@dataclass(frozen=True, slots=True)
class Changed:
    """The job continues under a changed plan."""

    change: PlanChange
    """Ready to be written down, which comes before anything acts on it."""
    plan: MemoryPlan
    """The plan that it leads to."""
    state: RecoveryState
    """After the change."""
    renew: frozenset[Role]
    """Roles that need new processes; empty at level Live. From level RestartInPlace on, everything is renewed."""
    message: str
    """Message about the cause and the change."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The job continues with new processes, under the same plan."""

    state: RecoveryState
    """After the restart, which counts."""
    cause: str
    """The failure, and why the plan is not changed."""
    message: str
    """Message about the cause and the count."""
    of_one_process: bool = False
    """Only the lost process is replaced, in the same attempt. False: another attempt follows."""


class GiveUpReason(StrEnum):
    """Reasons to give up. All but the last two are reasons of the condition Failed."""

    ADJUSTMENTS_EXHAUSTED = "AdjustmentsExhausted"
    PINNED_SETTING_CONFLICT = "PinnedSettingConflict"
    NO_PROGRESS = "NoProgress"
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    BAD_INPUT = "BadInput"
    TRAINER_ERROR = "TrainerError"
    POD_CANNOT_START = "PodCannotStart"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    NOTHING_LEFT = "NothingLeft"
    LEFT_TO_SUPERVISOR = "LeftToSupervisor"


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The caller stops recovering."""

    reason: GiveUpReason
    explanation: str
    """The failure, every change that was tried, with its effect, and the changes of the manifest that help."""


Response = Changed | Restart | GiveUp


EVERY_ROLE: frozenset[Role] = frozenset({"controller", "policy", "rollout"})

_PAIRS_OF_WANTED_AND_LEFT = (
    ("requested_bytes", "free_bytes"),
    ("wanted_bytes", "free_bytes"),
    ("needed_bytes", "available_bytes"),
)


@dataclass(frozen=True, slots=True)
class FailureReport:
    """A failure that ended a phase or an attempt."""

    message: str
    """Message about the failure."""
    attempt: int
    """Number of the attempt that failed."""
    time: datetime
    """Time of the answer, which a change of the plan records."""
    evidence: Evidence | None = None
    """Evidence of an out-of-memory failure, with its diagnoses; None for any other failure."""
    dead: frozenset[Role] = EVERY_ROLE
    """Roles whose processes cannot be used any more."""
    final: GiveUpReason | None = None
    """Reason to give up at once; None if another attempt can help."""
    peers_work_on: bool = False
    """Only one process of a role was lost, and the others can do its work until it is replaced."""
    is_repeatable: bool = False
    """The error comes from code that would raise it again, rather than from a process that died."""
    advice: str = ""
    """Change of the manifest that helps if the plan is not changed."""
    earlier_failures: tuple[str, ...] = ()
    """Number and reason of each earlier attempt that failed, such as `1: WorkerLost`."""


@dataclass(frozen=True, slots=True)
class Case:
    """One out-of-memory failure, or one to come, with one of its diagnoses."""

    failure_class: FailureClass
    """The class to act on: that of the diagnosis, or Unknown once no remedy of that class is left."""
    diagnosis: DiagnosisStatus
    """The cause to answer."""
    role: Role
    """Role of the process that failed."""
    phase: Phase | None
    """Phase of the failure; None if the roles were starting."""
    state: RecoveryState
    constraints: Constraints
    dead: frozenset[Role]
    """Roles whose processes cannot be used any more; empty before a failure."""
    message: str = ""
    """The error as the process saw it."""
    device_free_bytes: int | None = None
    """Free memory of its GPU at that moment."""
    is_preventive: bool = False
    """Nothing has failed yet."""

    @property
    def plan(self) -> MemoryPlan:
        assert self.state.plan is not None, "there is nothing to change before the first plan"
        return self.state.plan

    @property
    def setup(self) -> Setup | None:
        setup = self.constraints.setup
        return setup and setup.under(self.plan)

    @property
    def pod(self) -> Pod:
        """The kind of pod of the process that failed."""
        is_apart = self.setup is not None and not self.setup.work.is_colocated
        return "rollout" if self.role == "rollout" and is_apart else "policy"

    def freed_bytes(self, changed: dict[str, object], phase: BudgetPhase) -> int | None:
        """The part of the memory that ran out that the plan needs less in `phase` if the fields `changed` have these
        values: the difference of two budgets, negative if it needs more; None without a setup."""
        if self.setup is None:
            return None
        plans = (self.plan, self.plan.model_copy(update=changed))
        budgets = (budget(_grown(self.setup, plan), plan) for plan in plans)
        before, after = (predicted.total(self.place, phase, pod=self.pod) for predicted in budgets)
        return before - after

    def has_room_for(self, setting: str, value: object, phase: BudgetPhase) -> bool:
        """True if the GPU, or the host, has room for the memory that another value moves there from the other one."""
        if self.setup is None:
            return True
        plans = self.plan, self.plan.model_copy(update={setting: value})
        place: Place = "host" if self.place == "gpu" else "gpu"
        before, after = (budget(self.setup, plan, FEWEST_COPIES).total(place, phase) for plan in plans)
        if after <= before:
            return True
        return host_holds(self.setup, plans[1]) if place == "host" else after - before <= (self.device_free_bytes or 0)

    @property
    def place(self) -> Place:
        """The memory that ran out."""
        if self.failure_class is FailureClass.SHARED_MEMORY:
            return "shm"
        return "gpu" if self.on_gpu and self.failure_class is not FailureClass.HOST_MEMORY else "host"

    def has_changed(self, setting: str) -> bool:
        """True if a change of `setting` has answered a failure."""
        return any(change.remedy.setting == setting and not change.preventive for change in self.state.changes)

    def number(self, *names: str) -> int | None:
        """The number of the diagnosis with the first of these names that it has; bytes, or a count."""
        return next((found for name in names if (found := self.diagnosis.numbers.get(name)) is not None), None)

    @property
    def need_bytes(self) -> int | None:
        """Missing memory: the request less the memory that was left. None if the failure gave no numbers."""
        for wanted_name, left_name in _PAIRS_OF_WANTED_AND_LEFT:
            if wanted := self.number(wanted_name):
                missing = wanted - (self.number(left_name) or 0)
                return missing if missing > 0 else wanted
        return None

    @property
    def on_gpu(self) -> bool:
        """True if the job uses GPUs, by its machine or else by its pods; a failure of GPU memory shows a GPU."""
        if self.setup is None:
            return not (self.constraints.without_gpus and self.diagnosis.class_name == FailureClass.HOST_MEMORY)
        return self.setup.hardware.device == "cuda"

    @property
    def shares_gpu(self) -> bool:
        """True if policy and engine take memory from each other."""
        return self.on_gpu and (self.setup is None or self.setup.work.is_colocated)

    @property
    def on_policys_gpu(self) -> bool:
        """True if a GPU of the policy ran out."""
        return self.on_gpu and (self.role == "policy" or self.shares_gpu)

    @property
    def of_a_shared_policy(self) -> bool:
        """True if the policy failed, on a GPU that an engine uses too."""
        return self.shares_gpu and self.role == "policy"

    @property
    def in_optimizer_step(self) -> bool:
        return self.diagnosis.class_name == FailureClass.OPTIMIZER_STATE

    @property
    def in_update(self) -> bool:
        """True if the policy was, or may have been, in a pass through the model: another trainer reports no phase."""
        not_reported = self.phase is None and (self.setup is None or self.is_preventive)
        return self.role == "policy" and (self.phase == "update" or not_reported)

    @property
    def in_micro_batch(self) -> bool:
        """True if the policy was, or may have been, processing a micro-batch: in an update, or at startup, where it
        compiles one layer with the passes of a micro-batch (`budget.compiles_ahead`)."""
        compiling = self.phase is None and self.failure_class == FailureClass.ACTIVATION_SPIKE
        return self.in_update or (self.role == "policy" and compiling)

    @property
    def kv_cache_is_awake(self) -> bool:
        """True if an engine may have held its KV cache at the failure, so that a smaller one would have left more. An
        engine that sleeps in the update gets it back when it has received its weights."""
        return self.role == "rollout" or self.phase not in ("update", "sync") or self.plan.rollout_sleep_level == 0


def _grown(setup: Setup, plan: MemoryPlan) -> Setup:
    """The setup with the ranks of `plan`, which a policy may not have reached yet. It grows by pods like its first."""
    if plan.policy_gpus is None:
        return setup
    work = setup.work
    pods = max(work.policy_pods * plan.policy_gpus // work.policy_ranks, 1)
    return setup.with_work(policy_ranks=plan.policy_gpus, policy_pods=pods)
