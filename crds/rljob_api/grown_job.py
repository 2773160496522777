"""A job whose policy has grown: `policyGpus` of the memory plan takes the place of `policy.replicas`.

Only the number of pods grows. Each keeps its GPUs, its template and its resources, so that a node that could run one
before still can.
"""

from __future__ import annotations

from rljob_api.job import RLJob, RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.topology import worker_pods


def grown_spec(spec: RLJobSpec, plan: MemoryPlan | None) -> RLJobSpec:
    """The spec with the policy's size in `plan`; `spec` itself if `plan` has no other size, or is None."""
    if plan is None or plan.policy_gpus is None:
        return spec
    policy = worker_pods(spec)[0]
    if plan.policy_gpus == policy.processes:
        return spec
    replicas = max(plan.policy_gpus // policy.processes_per_pod, 1)
    return spec.model_copy(update={"policy": spec.policy.model_copy(update={"replicas": replicas})})


def grown_job(job: RLJob, plan: MemoryPlan | None) -> RLJob:
    """The job with `grown_spec`."""
    spec = grown_spec(job.spec, plan)
    return job if spec is job.spec else job.model_copy(update={"spec": spec})
