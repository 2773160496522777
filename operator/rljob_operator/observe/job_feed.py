"""RLJobs from kopf to the cache.

Kopf tells of every change that it sees. It does not tell when its first listing is complete, nor of what was deleted
while its watch was broken, and a silent watch looks like a quiet cluster. So whenever kopf lists, the jobs are listed
here too, and kopf's answers are listened to as signs of life.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog
from yarl import URL

from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import ApiError
from rljob_operator.kube.resources import RLJOBS, Object
from rljob_operator.kube.watch import list_into
from rljob_operator.observe.cache import Cache
from rljob_operator.observe.job_facts import JobFact

_log = structlog.get_logger(__name__)

_WAIT_AFTER_ERROR_SECONDS = 2.0


class JobFeed:
    """Feeds the cache of RLJobs. `namespaces`: those that are watched; empty: all."""

    def __init__(self, client: ApiClient, jobs: Cache[JobFact], namespaces: tuple[str, ...]) -> None:
        self.resource = RLJOBS
        self.synced = asyncio.Event()
        """Set when the first listing is in the cache."""
        self._client = client
        self._jobs = jobs
        self._namespaces: tuple[str | None, ...] = namespaces or (None,)
        self._paths = frozenset(RLJOBS.path(namespace) for namespace in self._namespaces)
        self._heard_at = dict.fromkeys(self._paths, time.monotonic())
        self._list_again = asyncio.Event()
        self._list_again.set()

    @property
    def age_seconds(self) -> float:
        """Time since the API server last answered one of kopf's requests for RLJobs, in the worst namespace."""
        return time.monotonic() - min(self._heard_at.values())

    def on_event(self, event: Any) -> None:
        """A change, as kopf gives it: type None in a listing, else ADDED, MODIFIED or DELETED."""
        obj: Object = event["object"]
        if event["type"] == "DELETED":
            self._jobs.remove(obj)
        else:
            self._jobs.put(obj)

    def on_answer(self, url: URL, code: int) -> None:
        """An answer to a request of kopf's."""
        if code == 200 and url.path in self._paths:
            self._heard_at[url.path] = time.monotonic()
            if "watch" not in url.query:
                self._list_again.set()

    async def run(self) -> None:
        """Lists whenever that is needed, until cancelled."""
        while True:
            await self._list_again.wait()
            self._list_again.clear()
            try:
                for namespace in self._namespaces:
                    await list_into(self._jobs, self._client, RLJOBS, namespace)
            except ApiError as error:
                _log.warning("RLJobs cannot be listed", error=error.sentence)
                self._list_again.set()
                await asyncio.sleep(_WAIT_AFTER_ERROR_SECONDS)
            else:
                self.synced.set()
