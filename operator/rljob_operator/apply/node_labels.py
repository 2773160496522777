"""Maintains the label of nodes with GPUs, which keeps controller pods off them."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

import structlog

from rljob_operator import labels
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import ApiError, NotFound
from rljob_operator.kube.resources import NODES
from rljob_operator.metrics import NODE_LABEL_WRITES
from rljob_operator.reconcile.observed import ObservedNode

_log = structlog.get_logger(__name__)

_FIRST_RETRY_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 300.0


@dataclass(slots=True)
class _WrongLabel:
    """A node with a wrong label. `due_at`: time of its next write, on the monotonic clock."""

    has_gpus: bool
    due_at: float = 0.0
    failures: int = 0


class NodeLabels:
    """Writes the label of each node whose label is wrong.

    A refused node is retried after a back-off of its own, and delays no other node.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._wrong: dict[str, _WrongLabel] = {}
        self._changed = asyncio.Event()

    def check(self, node: ObservedNode) -> None:
        """Take a node as it was just observed."""
        has_gpus = node.gpus > 0
        if has_gpus == (f"{labels.NODE_HAS_GPUS}=true" in node.labels):
            self._wrong.pop(node.name, None)
            return
        self._wrong.setdefault(node.name, _WrongLabel(has_gpus)).has_gpus = has_gpus
        self._changed.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            self._changed.clear()
            for node, wrong in list(self._wrong.items()):
                if self._wrong.get(node) is wrong and wrong.due_at <= time.monotonic():
                    await self._write(node, wrong)
            next_at = min((wrong.due_at for wrong in self._wrong.values()), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if next_at is None else max(0.0, next_at - time.monotonic())):
                    await self._changed.wait()

    async def _write(self, node: str, wrong: _WrongLabel) -> None:
        has_gpus = wrong.has_gpus
        value = "true" if has_gpus else None
        try:
            await self._client.patch(NODES, node, {"metadata": {"labels": {labels.NODE_HAS_GPUS: value}}})
        except NotFound:
            self._wrong.pop(node, None)
        except ApiError as error:
            delay = min(_FIRST_RETRY_SECONDS * 2 ** min(wrong.failures, 10), _LONGEST_RETRY_SECONDS)
            wrong.failures, wrong.due_at = wrong.failures + 1, time.monotonic() + delay
            _log.warning("node not labelled", node=node, error=error.message, retry_in_seconds=delay)
        else:
            NODE_LABEL_WRITES.inc()
            _log.info("node labelled", node=node, has_gpus=has_gpus)
            if self._wrong.get(node) is wrong and wrong.has_gpus == has_gpus:
                del self._wrong[node]
