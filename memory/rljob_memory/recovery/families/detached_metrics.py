"""Detached metrics: values kept for logging no longer hold the autograd graph of their micro-batch. Costs nothing.

The only remedy for RetainedGraph: smaller micro-batches and activation checkpointing shrink the retained graphs, and so
only delay the failure (Fast-LLM 486, verl 6699).
"""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family


def _next_change(case: Case) -> Change | None:
    """Expected: the growth of the memory in tensors over the observed steps."""
    if case.plan.detach_metrics or case.role == "controller":
        return None
    first, last = case.number("allocated_first_bytes"), case.number("allocated_last_bytes")
    grown = None if first is None or last is None else max(last - first, 0)
    return Change(True, grown)


DETACH_METRICS = Family("detach_metrics", frozenset({FailureClass.RETAINED_GRAPH}), "Live", "policy", _next_change)
