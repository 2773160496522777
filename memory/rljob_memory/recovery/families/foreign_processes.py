"""Memory of foreign processes on the GPU: restart the job's own processes, then leave the node.

Both act on ForeignProcess and ControllerContext; no setting of the plan does. A restart of the containers ends a
process that an earlier process of the same pod left on the GPU, so it is tried once. A process of somebody else stays
on its node, which the job then leaves.
"""

from __future__ import annotations

from rljob_api.memory_plan import MemoryPlan
from rljob_api.plan_change import RemedyLevel
from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family
from rljob_memory.recovery.state import PROCESSES

_ACTS_ON = frozenset({FailureClass.FOREIGN_PROCESS, FailureClass.CONTROLLER_CONTEXT})
_LEVEL: RemedyLevel = "ReplacePods"
_MOST_NODES = next(
    limit.max_length for limit in MemoryPlan.model_fields["excluded_nodes"].metadata if hasattr(limit, "max_length")
)


def _fresh_processes(case: Case) -> Change | None:
    if not case.on_gpu or any(change.remedy.setting == PROCESSES for change in case.state.changes):
        return None
    return Change("fresh", _held_bytes(case))


def _excluded_nodes(case: Case) -> Change | None:
    node, excluded = case.constraints.node, case.plan.excluded_nodes
    if node is None or node in excluded or len(excluded) >= _MOST_NODES or not case.on_gpu:
        return None
    return Change([*excluded, node], _held_bytes(case))


def _only_node(case: Case) -> str | None:
    if case.constraints.node is not None or not case.on_gpu or case.constraints.available_level(_LEVEL) is None:
        return None
    return "no other node is known to have room: stop the other process on its node, or add a node"


def _held_bytes(case: Case) -> int | None:
    """Expected: all memory of the foreign processes."""
    return case.number("contexts_bytes", "other_processes_bytes")


FRESH_PROCESSES = Family(PROCESSES, _ACTS_ON, "RestartInPlace", None, _fresh_processes)
EXCLUDED_NODES = Family("excluded_nodes", _ACTS_ON, _LEVEL, None, _excluded_nodes, _only_node)
