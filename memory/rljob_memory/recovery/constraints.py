"""Constraints of a recovery: the changes that the user allows, and those that the caller can carry out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan, MemorySettings
from rljob_api.plan_change import RemedyLevel
from rljob_api.recovery import RecoverySpec, larger_policies
from rljob_api.topology import worker_pods
from rljob_memory.budget import Setup

# Growth of the policy, once no setting of the memory plan is left: the sizes that a caller can start.


@dataclass(frozen=True, slots=True)
class PolicyGrowth:
    """Sizes of the policy that its caller can start."""

    ranks: int
    """Present number of ranks, each with a GPU of its own unless the job uses none."""
    larger: tuple[int, ...]
    """Larger numbers of ranks that the job allows, ascending."""
    most: int
    """`recovery.maxGpus`."""
    level: RemedyLevel
    """Level at which the caller starts more ranks: new pods, or a new attempt on one machine."""
    room: int | None = None
    """GPUs that the machine has for the policy; None if they are not limited to one machine, or the job uses none."""

    def from_ranks(self, ranks: int) -> PolicyGrowth:
        """The sizes that remain once the plan has `ranks`, which a policy may not have reached yet."""
        return replace(self, ranks=ranks, larger=tuple(size for size in self.larger if size > ranks))


def policy_growth(spec: RLJobSpec, level: RemedyLevel, *, room: int | None = None) -> PolicyGrowth | None:
    """The sizes for a job with `spec`, whose policy may have grown before; None if it never grows."""
    if spec.recovery.max_gpus is None:
        return None
    ranks = worker_pods(spec)[0].processes
    return PolicyGrowth(ranks, larger_policies(spec), spec.recovery.max_gpus, level, room)


def within_max_gpus(plan: MemoryPlan, spec: RLJobSpec) -> MemoryPlan:
    """`plan` itself, or a plan of the next generation without its growth, if the user's `spec` does not allow it any
    more."""
    gpus = plan.policy_gpus
    if gpus is None or worker_pods(spec)[0].processes < gpus <= (spec.recovery.max_gpus or 0):
        return plan
    return plan.model_copy(update={"policy_gpus": None, "generation": plan.generation + 1})


LEVELS: tuple[RemedyLevel, ...] = get_args(RemedyLevel)
"""The cheapest first."""


@dataclass(frozen=True, slots=True)
class Constraints:
    """Bounds of the answers to a failure."""

    settings: MemorySettings
    """`spec.memory`. A pinned setting is never changed."""
    recovery: RecoverySpec
    """`spec.recovery`: the budgets, and upper bounds of host memory and /dev/shm."""
    setup: Setup | None
    """The job's work, model and machine; None if no trainer has reported them."""
    levels: frozenset[RemedyLevel]
    """Levels that the caller can carry out. A change that needs a lower level is carried out by the lowest of them that
    is higher: new containers also adopt what a live process could."""
    supported_settings: frozenset[str] | None = None
    """Settings that another trainer reads, as spelled in the manifest; None: all."""
    without_gpus: bool = False
    """Another trainer, which reports no facts, works on a CPU: its models and activations are in host memory."""
    host_memory_limit_bytes: int | None = None
    """Host memory limit of the pod that failed; None if it has none, or is not known."""
    predicted_host_memory_limit_bytes: int | None = None
    """The limit that RLJob predicted for that pod, before any change: it may be doubled even if
    `recovery.maxHostMemory` is absent. None: the limit is the user's, or there is none."""
    shared_memory_bytes: int | None = None
    """Size of /dev/shm in the pod that failed."""
    node: str | None = None
    """Node of the process that failed; None if it cannot run on another one."""

    growth: PolicyGrowth | None = None
    """Larger policies that the caller can start, once no setting is left; None: it starts none."""

    @property
    def may_change_plan(self) -> bool:
        return self.settings.mode != "Disabled"

    @property
    def is_supervised(self) -> bool:
        """A caller that cannot restart everything has a supervisor that can."""
        return not self.levels & {"RestartInPlace", "ReplacePods"}

    @property
    def can_replace_pods(self) -> bool:
        """New pods may run on another node, so a restart under the same plan can help after any failure."""
        return "ReplacePods" in self.levels

    def available_level(self, needed: RemedyLevel) -> RemedyLevel | None:
        """The lowest level of the caller that includes `needed`; None if no level does."""
        return next((level for level in LEVELS[LEVELS.index(needed) :] if level in self.levels), None)
