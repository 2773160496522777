"""Whether a job's workers could do without a node: to exclude one that they need would keep them from ever going on."""

from __future__ import annotations

from collections.abc import Iterable

from rljob_operator.reconcile.view import JobView


def can_leave(node: str, view: JobView) -> bool:
    """Whether the nodes that are left beside it have the GPUs for all workers, whoever uses them at the moment.

    Workers with GPUs tolerate the taint that nodes with GPUs commonly have; others tolerate none by themselves.
    """
    left_out = {node, *(view.status.plan.excluded_nodes if view.status.plan else ())}
    others = [other for other in view.observed.nodes if other.usable and other.name not in left_out]
    wanted = view.layout.worker_gpus
    if not any(wanted):
        return any(not other.tainted for other in others)
    return _hold((other.gpus for other in others), wanted)


def _hold(nodes: Iterable[int], pods: Iterable[int]) -> bool:
    """Whether nodes with so many GPUs hold pods that want so many: the largest pod first, where it leaves least."""
    free = sorted(nodes)
    for wanted in sorted(pods, reverse=True):
        fitting = [gpus for gpus in free if gpus >= wanted]
        if not fitting:
            return False
        free.remove(fitting[0])
        free = sorted([*free, fitting[0] - wanted])
    return True
