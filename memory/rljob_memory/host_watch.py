"""Host memory of a container within a step: a warning shortly before it reaches its limit.

The forecast over steps comes too late for memory that grows fast, or before enough steps were seen.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rljob_api.plan_change import DiagnosisStatus, Role
from rljob_api.step_report import MemoryPressure
from rljob_memory.diagnosis import FailureClass
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import human_bytes

LOOK_EVERY_SECONDS = 1.0
"""A report, two reconciles and a kubelet take some seconds together."""

_NEARLY_FULL_SHARE = 0.9
_SOON = ((0.7, 30.0), (_NEARLY_FULL_SHARE, 300.0), (0.97, math.inf))
"""Share of the limit that is in use, and seconds to the limit at the present rate: the longer, the less room is left. A
predicted limit is twice the prediction, so that fast growth below the first share is usual, as while a model loads."""
_SAMPLES = 6
_CONFIDENCE = 0.95


@dataclass(slots=True)
class HostWatch:
    """Watches the container of one process."""

    role: Role
    rank: int
    _seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    def look(self, seconds: float, sample: MemorySample) -> MemoryPressure | None:
        """The warning, if memory is about to reach the limit. `seconds`: time of the sample, of any clock."""
        used, limit = sample.host_used_bytes, sample.host_limit_bytes
        room = max(limit - used, 0)
        self._seen.append((seconds, used))
        left = _seconds_left(list(self._seen), limit)
        if not limit or not any(used >= share * limit and left <= seconds for share, seconds in _SOON):
            return None
        rate = f", enough for {left:.0f} s at the present rate" if left < math.inf else ""
        return MemoryPressure(
            diagnosis=DiagnosisStatus(
                class_name=str(FailureClass.HOST_MEMORY),
                confidence=_CONFIDENCE,
                message=f"{human_bytes(used)} of host memory are in use, {human_bytes(room)} left{rate}.",
                numbers={"limit_bytes": limit, "room_bytes": room},
            ),
            role=self.role,
            rank=self.rank,
            steps_left=0,
        )


def is_nearly_full(container: MemorySample) -> bool:
    """True if nine tenths of the limit are in use."""
    return container.host_used_bytes >= _NEARLY_FULL_SHARE * container.host_limit_bytes > 0


def _seconds_left(seen: list[tuple[float, int]], limit: int) -> float:
    """Seconds to the limit at the rate of the last samples; infinite if memory does not grow."""
    (began, before), (now, used) = seen[0], seen[-1]
    grown = used - before
    return (limit - used) * (now - began) / grown if grown > 0 and now > began else math.inf
