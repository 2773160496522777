"""Growth of the policy, once no setting of the memory plan is left: the sizes that a caller can start."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import RemedyLevel
from rljob_api.policy_growth import larger_policies
from rljob_api.topology import worker_pods


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
