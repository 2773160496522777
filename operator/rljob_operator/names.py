"""Names of the objects made for a job. All are the job's name and a suffix, at most 63 characters together."""

from __future__ import annotations

from rljob_api.status import Role


def controller_pod_name(job: str) -> str:
    return f"{job}-controller"


def worker_pod_name(job: str, role: Role, index: int) -> str:
    """`role`: policy, or rollout if engines have pods of their own. `index` counts from 0."""
    return f"{job}-{role}-{index}"


SHARED_ACCOUNT = "rljob-controllers"
"""ServiceAccount of the controllers of a namespace; also its Role and RoleBinding. The chart's policy names it too."""

CONTROLLER_SERVICE = "rljob-controllers"
RENDEZVOUS_SERVICE = "rljob-rendezvous"
"""Headless Services of a namespace: of the controllers, and of the first pods of other trainers. A pod's address is its
name, followed by that of the Service."""


def service_account_name(job: str) -> str:
    """Account of one job; also its Role and RoleBinding."""
    return f"{job}-rljob"


def ray_token_secret_name(job: str, uid: str) -> str:
    """The uid makes the name the job's own: the operator has no right to read Secrets, nor to patch them."""
    return f"{job}-ray-{uid[:8]}"


def config_map_name(job: str) -> str:
    """Holds the manifest and the memory plan that the pods read."""
    return f"{job}-rljob"


def pod_group_name(job: str) -> str:
    """Volcano's PodGroup."""
    return f"{job}-rljob"


def kueue_group_name(job: str, attempt: int) -> str:
    """Kueue's pod group, and the Workload that Kueue makes for it. A group that has finished is not admitted again, so
    each attempt has its own."""
    return f"{job}-rljob-{attempt}"


def network_policy_name(job: str) -> str:
    return f"{job}-rljob"


def step_report_name(job: str) -> str:
    return job
