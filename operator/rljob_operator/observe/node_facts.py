"""Nodes: their reduced form, and the jobs that wait for room on them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from sys import intern

from rljob_api.quantity import quantity_bytes
from rljob_memory.hardware import GPU_TYPES, gpu_name
from rljob_memory.sizes import GIB
from rljob_operator import labels
from rljob_operator.kube.resources import Object
from rljob_operator.kube.watch import Key
from rljob_operator.observe.pod_facts import moment
from rljob_operator.reconcile.observed import ObservedNode

RESTARTS_IN_PLACE = "RestartAllContainersOnContainerExits"
"""Among the features that a kubelet declares, from Kubernetes 1.36 on. Pods that ask for it go to no other node."""

_KEEPS_OFF = ("NoSchedule", "NoExecute")


def observed_node(obj: Object, gpu_resources: tuple[str, ...]) -> ObservedNode:
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    allocatable, marks = status.get("allocatable") or {}, obj["metadata"].get("labels") or {}
    ready: Object = next((c for c in status.get("conditions") or () if c["type"] == "Ready"), {})
    gpu, memory_bytes = _gpu(marks)
    return ObservedNode(
        name=obj["metadata"]["name"],
        gpus=sum(_count(allocatable.get(resource)) for resource in gpu_resources),
        usable=ready.get("status") == "True" and not spec.get("unschedulable", False),
        tainted=any(taint.get("effect") in _KEEPS_OFF for taint in spec.get("taints") or ()),
        restarts_in_place=RESTARTS_IN_PLACE in (status.get("declaredFeatures") or ()),
        gpu=gpu,
        gpu_memory_bytes=memory_bytes,
        host_memory_bytes=_count(allocatable.get("memory")) // GIB * GIB,  # nodes of a type differ by some KiB
        labels=tuple(sorted(intern(f"{name}={value}") for name, value in marks.items())),
        unreachable_since=_unreachable_since(ready),
    )


def _gpu(marks: Mapping[str, str]) -> tuple[str, int]:
    """Type and memory of the node's GPUs, by its labels."""
    name = gpu_name(next((marks[label] for label in labels.GPU_PRODUCTS if label in marks), ""))
    if name in GPU_TYPES:
        return name, GPU_TYPES[name].memory_bytes
    return name, _count(f"{marks.get(labels.GPU_MEMORY_MIB, 0)}Mi")


def _unreachable_since(ready: Object) -> datetime | None:
    """The node controller sets the condition Ready to Unknown if the kubelet has not reported for some time."""
    time = ready.get("lastTransitionTime")
    return moment(time) if time and ready.get("status") == "Unknown" else None


def _count(quantity: str | None) -> int:
    """Bytes, or a number of extended resources, which the API server may write as 1k or 1e3; 0 if it is neither."""
    for parse in (quantity_bytes, lambda text: int(Decimal(text))):
        with suppress(ArithmeticError, ValueError):
            return parse(quantity or "0")
    return 0


# --- Jobs that wait for nodes ---


_PAUSE_SECONDS = 1.0
_PORTION = 100
"""Jobs woken in a second. Their pods wait in the scheduler, so nothing depends on a wake-up but messages, and jobs
whose pods were not created because there is no node. Ten thousand take 100 s and a tenth of a core."""


class UnplacedJobs:
    """Index of the jobs without nodes. `wake` gets the key of each job to reconcile."""

    def __init__(self, wake: Callable[[Key], None]) -> None:
        self._wake = wake
        self._jobs: dict[Key, None] = {}
        self._due: OrderedDict[Key, None] = OrderedDict()
        self._all_due = False
        self._something_due = asyncio.Event()

    def update(self, key: Key, *, waits: bool) -> None:
        if waits:
            self._jobs[key] = None
        else:
            self._jobs.pop(key, None)
            self._due.pop(key, None)

    def wake_later(self) -> None:
        """Wake all of them, within a second if they are few. Repetitions in between cost nothing."""
        self._all_due = True
        self._something_due.set()

    def next_portion(self) -> list[Key]:
        """The jobs to wake now, those first that have waited longest for it."""
        if self._all_due:
            self._all_due = False
            for key in self._jobs:
                self._due.setdefault(key)
        portion = [self._due.popitem(last=False)[0] for _ in range(min(_PORTION, len(self._due)))]
        if not self._due:
            self._something_due.clear()
        return portion

    async def run(self) -> None:
        """Wake jobs until cancelled."""
        while True:
            await self._something_due.wait()
            await asyncio.sleep(_PAUSE_SECONDS)  # a node often changes several times in a row
            for key in self.next_portion():
                self._wake(key)


def gains_room(before: ObservedNode | None, after: ObservedNode | None) -> bool:
    """Pods may fit that did not fit before the change of the node."""
    if after is None or not after.usable:
        return False
    if before is None or not before.usable:
        return True
    gpu_free = before.gpus > 0 and after.gpus == 0  # for controllers
    more = after.gpus > before.gpus or after.host_memory_bytes > before.host_memory_bytes
    return gpu_free or more or after.labels != before.labels or (before.tainted and not after.tainted)
