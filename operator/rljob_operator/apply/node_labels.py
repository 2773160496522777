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

_WAIT_AFTER_ERROR_SECONDS = 5.0


class NodeLabels:
    """Writes the label of a node if it is wrong."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._wrong: dict[str, bool] = {}
        self._something_wrong = asyncio.Event()

    def check(self, node: str, *, has_gpus: bool, labelled: bool) -> None:
        """A node as it was just observed."""
        if has_gpus == labelled:
            self._wrong.pop(node, None)
        else:
            self._wrong[node] = has_gpus
            self._something_wrong.set()

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._something_wrong.wait()
            self._something_wrong.clear()
            while self._wrong:
                node, has_gpus = self._wrong.popitem()
                try:
                    await self._label(node, has_gpus=has_gpus)
                except NotFound:
                    continue
                except ApiError as error:
                    _log.warning("node not labelled", node=node, error=error.message)
                    self._wrong.setdefault(node, has_gpus)
                    await asyncio.sleep(_WAIT_AFTER_ERROR_SECONDS)

    async def _label(self, node: str, *, has_gpus: bool) -> None:
        value = "true" if has_gpus else None
        await self._client.patch(NODES, node, {"metadata": {"labels": {labels.NODE_HAS_GPUS: value}}})
        NODE_LABEL_WRITES.inc()
        _log.info("node labelled", node=node, has_gpus=has_gpus)
