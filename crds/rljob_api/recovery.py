"""Limits on automatic recovery, and the growth of the policy that they allow."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rljob_api.api_model import ApiModel, Rule
from rljob_api.quantity import Bytes
from rljob_api.topology import worker_pods


class RecoverySpec(ApiModel):
    """Limits on automatic recovery. RLJob counts adjustments (changes of the memory plan) and restarts (with the same
    plan) separately."""

    max_adjustments: int = Field(default=6, ge=0, le=100)
    """Maximum changes of the memory plan before the job fails. Committed steps reduce the count over time."""

    max_restarts: int = Field(default=3, ge=0, le=100)
    """Maximum restarts with the same plan before the job fails. RLJob restarts a job after failures that a change of
    the memory plan cannot prevent."""

    phase_deadline_seconds: int = Field(default=600, ge=0, le=604_800)
    """Minimum time limit of a phase of a step, in seconds; ten times the median duration of the phase if that is more.
    A process that exceeds it writes its stacks to its log and is restarted. The limit is 6 times as long for
    checkpoints and for the first phases of a process, in which it compiles, and 12 times as long for its start. 0: no
    limit."""

    max_steps_without_learning: int = Field(default=50, ge=0, le=1_000_000)
    """Maximum steps in a row in which all responses to each prompt have equal rewards, so that the policy learns
    nothing, before the job fails. The limit does not apply while the mean reward is higher than in the first five
    steps: a task that the policy has solved gives equal rewards, too. Raise it if rewards are rare at the start. 0: no
    limit. For RLJob's own trainer only."""

    max_gpus: int | None = Field(default=None, ge=1, le=1024)
    """Maximum GPUs to which RLJob may grow the policy if it runs out of memory and no change of a memory setting is
    left. A rank without a GPU counts as one. The policy gets more pods like its current ones, up to the next power of
    two that divides algorithm.promptsPerStep. For RLJob's own trainer only. Absent: the policy never grows."""

    max_host_memory: Bytes | None = None
    """Maximum memory limit to which RLJob may raise a pod's container, as a Kubernetes quantity. Absent: RLJob never
    raises the limit in the pod template."""

    max_shared_memory: Bytes | None = None
    """Maximum size to which RLJob may raise /dev/shm, as a Kubernetes quantity. Data in /dev/shm counts as host memory
    of the pod that writes it. Absent: half the memory limit of the pod."""


# Growth of the policy after an out-of-memory failure: the sizes that a job allows.

LARGEST_POLICY = 1024
_SIZES = tuple(1 << exponent for exponent in range(1, LARGEST_POLICY.bit_length()))


def larger_policies(spec: Any) -> tuple[int, ...]:
    """Numbers of ranks to which the policy of an `RLJobSpec` may grow, ascending; empty without `recovery.maxGpus`.

    They are powers of two above the current number that fill whole pods and divide the prompts of a step, so that all
    ranks and all colocated engines have equal shares.
    """
    limit = spec.recovery.max_gpus or 0
    policy, prompts = worker_pods(spec)[0], spec.algorithm.prompts_per_step
    return tuple(
        ranks
        for ranks in _SIZES
        if policy.processes < ranks <= limit and ranks % policy.processes_per_pod == 0 and prompts % ranks == 0
    )


_RANKS_PER_POD_CEL = "(self.policy.gpusPerReplica == 0 ? 1 : self.policy.gpusPerReplica)"

GROWTH_RULES = (
    Rule(
        cel="!has(self.trainer) || !has(self.recovery.maxGpus)",
        holds=lambda spec: spec.recovery.max_gpus is None or spec.trainer is None,
        field="recovery.maxGpus",
        message="requires RLJob's own trainer, which divides a checkpoint among more GPUs: remove it, or trainer",
    ),
    Rule(
        cel=f"!has(self.recovery.maxGpus) || has(self.trainer) || {list(_SIZES)}.exists(ranks, "
        f"ranks > self.policy.replicas * {_RANKS_PER_POD_CEL} && ranks <= self.recovery.maxGpus"
        f" && ranks % {_RANKS_PER_POD_CEL} == 0 && self.algorithm.promptsPerStep % ranks == 0)",
        holds=lambda spec: spec.recovery.max_gpus is None or spec.trainer is not None or bool(larger_policies(spec)),
        field="recovery.maxGpus",
        message="must leave room for a larger policy: at least the next power of two above policy.replicas x "
        "policy.gpusPerReplica that is a multiple of policy.gpusPerReplica and divides algorithm.promptsPerStep; "
        "write that, or remove maxGpus",
    ),
)
