"""Names of the objects made for a job. All are the job's name and a suffix, at most 63 characters together. The
StepReport has the name of the job."""

from __future__ import annotations

from rljob_api.status import Role

SHARED_ACCOUNT = "rljob-controllers"
"""ServiceAccount of the controllers of a namespace; also its Role and RoleBinding. The chart's policy names it too."""

CONTROLLER_SERVICE = "rljob-controllers"
RENDEZVOUS_SERVICE = "rljob-rendezvous"
"""Headless Services of a namespace: of the controllers, and of the first pods of other trainers. A pod's address is its
name, followed by that of the Service."""


def controller_pod_name(job: str) -> str:
    """Return the name of the pod with the controller and Ray's head."""
    return f"{job}-controller"


def worker_pod_name(job: str, role: Role, index: int) -> str:
    """`role`: policy, or rollout if engines have pods of their own. `index` counts from 0."""
    return f"{job}-{role}-{index}"


def object_name(job: str) -> str:
    """Return the name of the job's ConfigMap, NetworkPolicy, Volcano PodGroup, ServiceAccount, Role and RoleBinding."""
    return f"{job}-rljob"


def ray_token_secret_name(job: str, uid: str) -> str:
    """The uid makes the name the job's own: the operator has no right to read Secrets, nor to patch them."""
    return f"{job}-ray-{uid[:8]}"


def kueue_group_name(job: str, attempt: int) -> str:
    """Return the name of Kueue's pod group, and of the Workload that Kueue makes for it. A group that has finished is
    not admitted again, so each attempt has its own."""
    return f"{job}-rljob-{attempt}"
