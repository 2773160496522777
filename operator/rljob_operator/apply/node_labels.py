"""Maintains the label of nodes with GPUs, which keeps controller pods off them."""

from __future__ import annotations

import asyncio

import structlog

from rljob_operator import labels
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import ApiError, NotFound
from rljob_operator.kube.resources import NODES
from rljob_operator.metrics import NODE_LABEL_WRITES

_log = structlog.get_logger(__name__)

_FIRST_RETRY_SECONDS = 5.0
_LONGEST_RETRY_SECONDS = 300.0


class NodeLabels:
    """Writes the label of a node if it is wrong.

    A refused node is retried after a back-off of its own, and delays no other node.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._wrong: dict[str, bool] = {}
        """The nodes whose label is wrong; True if they have GPUs."""
        self._ready: dict[str, None] = {}
        """The ones to write now, in the order in which they were observed."""
        self._failures: dict[str, int] = {}
        self._retries: dict[str, asyncio.TimerHandle] = {}
        self._something_ready = asyncio.Event()

    def check(self, node: str, *, has_gpus: bool, labelled: bool) -> None:
        """A node as it was just observed."""
        if has_gpus == labelled:
            self._forget(node)
            return
        self._wrong[node] = has_gpus
        if node not in self._retries:
            self._make_ready(node)

    async def run(self) -> None:
        """Writes until cancelled."""
        try:
            while True:
                await self._something_ready.wait()
                self._something_ready.clear()
                while self._ready:
                    await self._write(next(iter(self._ready)))
        finally:
            for retry in self._retries.values():
                retry.cancel()

    async def _write(self, node: str) -> None:
        del self._ready[node]
        has_gpus = self._wrong[node]
        try:
            await self._label(node, has_gpus=has_gpus)
        except NotFound:
            self._forget(node)
        except ApiError as error:
            self._retry_later(node, error)
        else:
            self._failures.pop(node, None)
            if self._wrong.get(node) == has_gpus:
                self._forget(node)

    def _retry_later(self, node: str, error: ApiError) -> None:
        failures = self._failures[node] = self._failures.get(node, 0) + 1
        delay = min(_FIRST_RETRY_SECONDS * 2 ** min(failures - 1, 10), _LONGEST_RETRY_SECONDS)
        _log.warning("node not labelled", node=node, error=error.message, retry_in_seconds=delay)
        self._ready.pop(node, None)
        self._retries[node] = asyncio.get_running_loop().call_later(delay, self._make_ready, node)

    def _make_ready(self, node: str) -> None:
        self._retries.pop(node, None)
        if node in self._wrong:
            self._ready[node] = None
            self._something_ready.set()

    def _forget(self, node: str) -> None:
        for known in (self._wrong, self._ready, self._failures):
            known.pop(node, None)
        if retry := self._retries.pop(node, None):
            retry.cancel()

    async def _label(self, node: str, *, has_gpus: bool) -> None:
        value = "true" if has_gpus else None
        await self._client.patch(NODES, node, {"metadata": {"labels": {labels.NODE_HAS_GPUS: value}}})
        NODE_LABEL_WRITES.inc()
        _log.info("node labelled", node=node, has_gpus=has_gpus)
