"""Snapshots of failed requests for GPU memory, for tests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from rljob_memory.evidence.oom_snapshot import Layout, OomSnapshot

BEGUN = datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp()
"""Start of the run, in seconds since the epoch."""
GIB, MIB = 1 << 30, 1 << 20


def oom_snapshot(**changes: Any) -> OomSnapshot:
    """A failed request in the update of step 7, 150 s after the start, with the fields in `changes` replaced."""
    values: dict[str, Any] = {
        "time": BEGUN + 150,
        "role": "policy",
        "rank": 1,
        "step": 7,
        "phase": "update",
        "micro_batch": 3,
        "gpu": 0,
        "requested_bytes": 4 * GIB + 3 * MIB,
        "allowed_bytes": 80 * GIB,
        "device_free_bytes": GIB,
        "device_total_bytes": 80 * GIB,
        "counters": {"allocated_bytes": 38 * GIB, "reserved_bytes": 39 * GIB},
        "layout": Layout(largest_free_block_bytes=600 * MIB),
        "stack": ["/site-packages/torch/optim/adamw.py in step"],
    }
    return OomSnapshot(**{**values, **changes})
