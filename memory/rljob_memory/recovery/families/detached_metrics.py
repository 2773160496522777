"""Detached metrics: what is kept of a micro-batch for logging no longer keeps its autograd graph. Costs nothing.

Acts on RetainedGraph, and nothing else does: smaller micro-batches and activation checkpointing make the graphs smaller
that are kept, and only delay the end (Fast-LLM 486, verl 6699).
"""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.family import Change, Family


def _next_change(case: Case) -> Change | None:
    """Expected: all that the tensors grew by while it was watched."""
    if case.plan.detach_metrics or case.role == "controller":
        return None
    first, last = case.number("allocated_first_bytes"), case.number("allocated_last_bytes")
    grown = None if first is None or last is None else max(last - first, 0)
    return Change(True, grown)


DETACH_METRICS = Family("detach_metrics", frozenset({FailureClass.RETAINED_GRAPH}), "Live", "policy", _next_change)
