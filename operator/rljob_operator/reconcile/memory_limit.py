"""What a user can do about a pod that ran out of host memory."""

from __future__ import annotations

from rljob_api.quantity import byte_quantity
from rljob_operator.reconcile.observed import ObservedPod


def host_memory_advice(pod: ObservedPod) -> str:
    where = f"resources.limits.memory of container rljob in spec.{pod.role}.template"
    if pod.memory_limit_bytes is None:
        return f"it has no limit of its own, so its node ran out: give it room by {where}"
    return f"its limit is {byte_quantity(pod.memory_limit_bytes)}: raise {where}, or recovery.maxHostMemory"
