"""Growth of the policy after an out-of-memory failure: the sizes that a job allows."""

from __future__ import annotations

from typing import Any

from rljob_api.api_model import Rule
from rljob_api.topology import worker_pods

LARGEST_POLICY = 1024
_SIZES = tuple(1 << exponent for exponent in range(1, LARGEST_POLICY.bit_length()))


def larger_policies(spec: Any) -> tuple[int, ...]:
    """Numbers of ranks to which the policy of an `RLJobSpec` may grow, ascending; empty without `recovery.maxGpus`.

    They are powers of two above the present number that fill whole pods and divide the prompts of a step, so that all
    ranks and all colocated engines have the same share.
    """
    most = spec.recovery.max_gpus or 0
    policy, prompts = worker_pods(spec)[0], spec.algorithm.prompts_per_step
    return tuple(
        ranks
        for ranks in _SIZES
        if policy.processes < ranks <= most and ranks % policy.processes_per_pod == 0 and prompts % ranks == 0
    )


_RANKS_PER_POD_CEL = "(self.policy.gpusPerReplica == 0 ? 1 : self.policy.gpusPerReplica)"

GROWTH_RULES = (
    Rule(
        cel="!has(self.recovery.maxGpus) || !has(self.trainer)",
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
