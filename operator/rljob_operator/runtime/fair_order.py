"""The order in which waiting jobs are reconciled: by priority, and fair to the namespaces within one."""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum

from rljob_operator.kube.watch import Key

_URGENT_IN_A_ROW = 9
"""Running jobs that are taken one after the other while pending ones wait. A tenant whose running jobs report without
pause would otherwise keep all pending jobs waiting."""


class Priority(StrEnum):
    """Urgency of a job; the values are labels of metrics."""

    RUNNING = "running"
    """Its pods hold nodes, or it recovers from a failure."""
    PENDING = "pending"
    """It holds no nodes: it waits for pods, is suspended or has finished."""


class FairOrder:
    """Waiting keys, each once. All operations take constant time."""

    def __init__(self) -> None:
        self._priorities: dict[Key, Priority] = {}
        self._waiting = {priority: _RoundRobin() for priority in Priority}
        self._urgent_taken = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._priorities

    def __len__(self) -> int:
        return len(self._priorities)

    def depth(self, priority: Priority) -> int:
        return self._waiting[priority].size

    def put(self, key: Key, priority: Priority) -> None:
        """Add the key. One that waits already keeps its place, or gets one among running jobs if it runs by now."""
        before = self._priorities.get(key)
        if before in (priority, Priority.RUNNING):
            return
        if before is not None:
            self._waiting[before].remove(key)
        self._priorities[key] = priority
        self._waiting[priority].append(key)

    def take(self, *, running_only: bool = False) -> tuple[Key, Priority] | None:
        """The next key and the priority that it had; None if none waits."""
        pending, running = self._waiting[Priority.PENDING], self._waiting[Priority.RUNNING]
        turn_of_pending = self._urgent_taken >= _URGENT_IN_A_ROW and pending.size
        if running.size and (running_only or not turn_of_pending):
            self._urgent_taken += 1
            key, priority = running.popleft(), Priority.RUNNING
        elif pending.size and not running_only:
            self._urgent_taken = 0
            key, priority = pending.popleft(), Priority.PENDING
        else:
            return None
        del self._priorities[key]
        return key, priority


class _RoundRobin:
    """Keys, one of each namespace in turn; first in, first out within a namespace."""

    def __init__(self) -> None:
        self.size = 0
        self._namespaces: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()

    def append(self, key: Key) -> None:
        namespace, name = key
        self._namespaces.setdefault(namespace, OrderedDict())[name] = None
        self.size += 1

    def popleft(self) -> Key:
        namespace, names = self._namespaces.popitem(last=False)
        name, _ = names.popitem(last=False)
        if names:
            self._namespaces[namespace] = names  # behind the others
        self.size -= 1
        return namespace, name

    def remove(self, key: Key) -> None:
        namespace, name = key
        del self._namespaces[namespace][name]
        if not self._namespaces[namespace]:
            del self._namespaces[namespace]
        self.size -= 1
