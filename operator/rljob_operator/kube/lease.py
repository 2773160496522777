"""Leader election on a Lease, with client-go's rules and times: of all replicas one acts, the others wait."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import structlog

from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import AlreadyExists, ApiError, Conflict, NotFound
from rljob_operator.kube.resources import LEASES, Object

_log = structlog.get_logger(__name__)


class LeadershipLost(Exception):
    """Another replica leads, or may soon: this process must end without another write."""


@dataclass(frozen=True, slots=True)
class ElectionTimes:
    """Seconds. The leader gives up `renew_deadline` after its last renewal, before others may take over."""

    lease_duration: float = 15.0
    renew_deadline: float = 10.0
    retry_period: float = 2.0


def decide(spec: Object | None, identity: str, unchanged_seconds: float) -> Literal["Create", "Take", "Renew", "Wait"]:
    """What a replica may do with the Lease that has this spec (None: there is none).

    `unchanged_seconds`: how long this replica has seen the very same Lease, by its own clock. The times in the Lease
    are never compared to it: clocks of two machines differ.
    """
    if spec is None:
        return "Create"
    holder = spec.get("holderIdentity")
    if holder == identity:
        return "Renew"
    if not holder or unchanged_seconds > spec.get("leaseDurationSeconds", 0):
        return "Take"
    return "Wait"


def held_spec(spec: Object | None, identity: str, times: ElectionTimes, now: datetime) -> Object:
    """The Lease's spec when `identity` has taken it, or renewed it if it was its own."""
    renewed = spec is not None and spec.get("holderIdentity") == identity
    before = spec or {}
    return {
        "holderIdentity": identity,
        "leaseDurationSeconds": int(times.lease_duration),
        "acquireTime": before.get("acquireTime") if renewed else _micro_time(now),
        "renewTime": _micro_time(now),
        "leaseTransitions": int(before.get("leaseTransitions") or 0) + (spec is not None and not renewed),
    }


class LeaderElection:
    """One replica's part in the election. Wait in `acquire`, then keep `hold` running; `guard` before each write."""

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
        self._trouble = ""

    @property
    def leading(self) -> bool:
        """Whether no other replica can have taken over yet."""
        return time.monotonic() < self._renewed_at + self._times.lease_duration

    def guard(self) -> None:
        """Raises LeadershipLost where a write might come too late."""
        if not self.leading:
            raise LeadershipLost(f"the Lease {self._namespace}/{self._name} was not renewed in time")

    async def acquire(self, standing_by: Callable[[], None] = lambda: None) -> None:
        """Returns as soon as this replica is the leader. `standing_by` is called when another one is found to lead."""
        said: str | None = None
        while not await self._try():
            leader = self._spec().get("holderIdentity")
            if leader and leader != said:
                _log.info("standing by", leader=leader)
                said = leader
                standing_by()
            await self._pause()
        _log.info("leading", lease=f"{self._namespace}/{self._name}", identity=self._identity)

    async def hold(self) -> None:
        """Renews until cancelled. Raises LeadershipLost."""
        while True:
            await self._pause()
            if not await self._try() and self._spec().get("holderIdentity") not in (self._identity, None):
                raise LeadershipLost(f"{self._spec()['holderIdentity']} leads now")
            if time.monotonic() > self._renewed_at + self._times.renew_deadline:
                raise LeadershipLost(f"the Lease was not renewed for {self._times.renew_deadline:g} s")

    async def release(self) -> None:
        """Lets the next replica take over at once. Best effort."""
        if not self.leading or self._lease is None:
            return
        self._renewed_at = float("-inf")
        spec = self._spec() | {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _micro_time(_now())}
        try:
            async with asyncio.timeout(self._times.retry_period):
                await self._client.update(LEASES, self._name, self._lease | {"spec": spec}, self._namespace)
        except (ApiError, TimeoutError) as error:
            _log.warning("the lease could not be released", error=str(error) or type(error).__name__)

    async def _try(self) -> bool:
        """One look at the Lease and, where allowed, one attempt to have it. False: another has it, or no answer."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._times.renew_deadline / 2):
                if not self.leading:
                    await self._look()
                if not await self._write():
                    return False
        except (ApiError, TimeoutError) as error:
            trouble = str(error) or type(error).__name__
            if trouble != self._trouble:
                _log.warning("the lease could not be had", error=trouble)
            self._trouble = trouble
            return False
        self._renewed_at = began
        self._trouble = ""
        return True

    async def _look(self) -> None:
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
        lease = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
        } | (self._lease or {})
        lease["spec"] = held_spec(spec, self._identity, self._times, _now())
        try:
            if decision == "Create":
                self._lease = await self._client.create(LEASES, lease, self._namespace)
            else:
                self._lease = await self._client.update(LEASES, self._name, lease, self._namespace)
        except (AlreadyExists, Conflict):
            await self._look()
            return False
        return True

    def _spec(self) -> dict[str, Any]:
        return (self._lease or {}).get("spec") or {}

    async def _pause(self) -> None:
        await asyncio.sleep(self._times.retry_period * random.uniform(1.0, 1.2))


def _now() -> datetime:
    return datetime.now(UTC)


def _micro_time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
