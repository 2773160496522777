"""Leader election on a Lease, with the rules and times of client-go.

`kubernetes.aio.leaderelection` (version 37) measures time with the wall clock, which may jump, and does not release the
Lease. It has no guard before each write and no annotations.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import AlreadyExists, ApiError, Conflict, NotFound
from rljob_operator.kube.resources import LEASES, Object, micro_time

_log = structlog.get_logger(__name__)


class LeadershipLost(Exception):
    """Another replica leads, or may soon: this process must exit without another write."""


@dataclass(frozen=True, slots=True)
class ElectionTimes:
    """Times in seconds. The leader gives up `renew_deadline` after its last renewal, before others may take over."""

    lease_duration: float = 15.0
    renew_deadline: float = 10.0
    retry_period: float = 2.0


def decide(spec: Object | None, identity: str, unchanged_seconds: float) -> Literal["Create", "Take", "Renew", "Wait"]:
    """Next action of a replica on the Lease with this spec; None if there is no Lease.

    `unchanged_seconds`: time since this replica saw the Lease change, by its own clock. It is never compared with the
    times in the Lease, because clocks of machines differ.
    """
    if spec is None:
        return "Create"
    holder = spec.get("holderIdentity")
    if holder == identity:
        return "Renew"
    if not holder or unchanged_seconds > spec.get("leaseDurationSeconds", 0):
        return "Take"
    return "Wait"


def held_spec(spec: Object | None, identity: str, times: ElectionTimes, now: str) -> Object:
    """The spec of the Lease after `identity` has acquired or renewed it."""
    renewed = spec is not None and spec.get("holderIdentity") == identity
    before = spec or {}
    return {
        "holderIdentity": identity,
        "leaseDurationSeconds": int(times.lease_duration),
        "acquireTime": before.get("acquireTime") if renewed else now,
        "renewTime": now,
        "leaseTransitions": int(before.get("leaseTransitions") or 0) + (spec is not None and not renewed),
    }


class LeaderElection:
    """The election as seen by one replica: wait in `acquire`, keep `hold` running, call `guard` before each write."""

    def __init__(
        self, client: ApiClient, *, name: str, namespace: str, identity: str, times: ElectionTimes | None = None
    ) -> None:
        self._client = client
        self._name = name
        self._namespace = namespace
        self._identity = identity
        self._times = times or ElectionTimes()
        self._lease: Object | None = None
        self._seen_at = 0.0
        self._renewed_at = float("-inf")
        self._problem = ""
        self._annotations: dict[str, str] = {}
        self._writing = asyncio.Lock()

    @property
    def leading(self) -> bool:
        """No other replica can have taken over yet."""
        return time.monotonic() < self._renewed_at + self._times.lease_duration

    def guard(self) -> None:
        """Raise LeadershipLost if a write might come too late."""
        if not self.leading:
            raise LeadershipLost(f"the Lease {self._namespace}/{self._name} was not renewed in time")

    async def acquire(self, standing_by: Callable[[], None] = lambda: None) -> None:
        """Return once this replica leads. `standing_by` is called each time another leader is found."""
        logged: str | None = None
        while not await self._try():
            leader = self._spec().get("holderIdentity")
            if leader and leader != logged:
                _log.info("standing by", leader=leader)
                logged = leader
                standing_by()
            await self._pause()
        _log.info("leading", lease=f"{self._namespace}/{self._name}", identity=self._identity)

    async def hold(self) -> None:
        """Renew the Lease until cancelled. Raises LeadershipLost."""
        while True:
            await self._pause()
            if not await self._try() and self._spec().get("holderIdentity") not in (self._identity, None):
                raise LeadershipLost(f"{self._spec()['holderIdentity']} leads now")
            if time.monotonic() > self._renewed_at + self._times.renew_deadline:
                raise LeadershipLost(f"the Lease was not renewed for {self._times.renew_deadline:g} s")

    def annotation(self, name: str) -> str:
        """Value in the Lease as last read, perhaps of an earlier leader; empty if there is none."""
        return str(((self._lease or {}).get("metadata", {}).get("annotations") or {}).get(name, ""))

    async def annotate(self, name: str, value: str) -> None:
        """Write the annotation now; if that fails, the next renewal does it."""
        self._annotations[name] = value
        await self._try()

    async def release(self) -> None:
        """Let another replica take over at once. Best effort."""
        if not self.leading:
            return
        self._renewed_at = float("-inf")
        try:
            async with asyncio.timeout(self._times.renew_deadline / 2):
                while self._is_mine() and not await self._empty():
                    await self._read()
        except (ApiError, TimeoutError) as error:
            _log.warning("cannot release the lease", error=str(error) or type(error).__name__)

    async def _empty(self) -> bool:
        """Remove the holder from the Lease as last read. False if it has changed since: when `hold` is cancelled, the
        API server may execute a renewal whose response nobody receives.
        """
        spec = self._spec() | {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": micro_time()}
        try:
            await self._client.update(LEASES, self._name, (self._lease or {}) | {"spec": spec}, self._namespace)
        except Conflict:
            return False
        return True

    async def _try(self) -> bool:
        """Read the Lease and, if allowed, try to acquire it. False if another replica has it, or without an answer."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._times.renew_deadline / 2), self._writing:
                if not self.leading:
                    await self._read()
                # It may be held already, by a write whose response was lost.
                if not await self._write() and not (self._is_mine() and await self._write()):
                    return False
        except (ApiError, TimeoutError) as error:
            problem = str(error) or type(error).__name__
            if problem != self._problem:
                _log.warning("cannot acquire the lease", error=problem)
            self._problem = problem
            return False
        self._renewed_at = began
        self._problem = ""
        return True

    async def _read(self) -> None:
        try:
            lease = await self._client.get(LEASES, self._name, self._namespace)
        except NotFound:
            lease = None
        if lease is None or self._lease is None or lease["spec"] != self._lease["spec"]:
            self._seen_at = time.monotonic()
        self._lease = lease

    async def _write(self) -> bool:
        spec = None if self._lease is None else self._spec()
        decision = decide(spec, self._identity, time.monotonic() - self._seen_at)
        if decision == "Wait":
            return False
        lease: Object = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
        } | (self._lease or {})
        lease["spec"] = held_spec(spec, self._identity, self._times, micro_time())
        if self._annotations:
            annotations = lease["metadata"].get("annotations") or {}
            lease["metadata"] = lease["metadata"] | {"annotations": annotations | self._annotations}
        try:
            if decision == "Create":
                self._lease = await self._client.create(LEASES, lease, self._namespace)
            else:
                self._lease = await self._client.update(LEASES, self._name, lease, self._namespace)
        except (AlreadyExists, Conflict, NotFound):  # deleted: the next try creates it again
            await self._read()
            return False
        return True

    def _is_mine(self) -> bool:
        """This replica is the holder in the Lease as last read."""
        return bool(self._spec().get("holderIdentity") == self._identity)

    def _spec(self) -> dict[str, Any]:
        return (self._lease or {}).get("spec") or {}

    async def _pause(self) -> None:
        await asyncio.sleep(self._times.retry_period * random.uniform(1.0, 1.2))
