"""Kills and restarts of the operator."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from rljob_testing.operator.api_client import ApiClient, ApiError
from rljob_testing.operator.eventually import EFFECT_SECONDS
from rljob_testing.operator.fault_proxy import FaultProxy, RecordedRequest
from rljob_testing.operator.operator_process import OperatorProcess
from rljob_testing.operator.watched_job import WatchedJob

OPERATOR_NAMESPACE = "rljob-system"
KILLED_EFFECT_SECONDS = 3 * EFFECT_SECONDS
"""Limit for one effect of an operator that is killed after each change: it starts a dozen times before."""


def forget_leader(api: ApiClient, namespace: str = OPERATOR_NAMESPACE) -> None:
    """Delete the Lease of a killed leader, which would block other replicas for 15 s."""
    for lease in api.list("leases", namespace):
        try:
            api.delete("leases", lease["metadata"]["name"], namespace)
        except ApiError as error:
            if error.status != 404:  # `kept_running` deletes it too
                raise


def restart(operator: OperatorProcess, api: ApiClient) -> None:
    """Kill the operator and start it again."""
    operator.kill()
    forget_leader(api)
    operator.start()


@contextmanager
def kept_running(operator: OperatorProcess, api: ApiClient, namespace: str = OPERATOR_NAMESPACE) -> Iterator[None]:
    """Restart the operator if it loses its Lease, as a kubelet would: an API server that shares two busy cores with all
    other tests may not answer for 10 s.
    """
    done = threading.Event()

    def keep() -> None:
        while not done.wait(0.2):
            if operator.lost_its_lease:
                with suppress(httpx.TransportError, ApiError):  # the API server may be away, or starting
                    forget_leader(api, namespace)
                    operator.revive()

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    try:
        yield
    finally:
        done.set()
        keeper.join()


@contextmanager
def killed_after_each_change(operator: OperatorProcess, proxy: FaultProxy, api: ApiClient) -> Iterator[list[str]]:
    """Within the block, kill the operator after each change that it makes, and restart it. Yields those changes."""
    kills: list[str] = []
    stopping = threading.Event()

    def kill(change: RecordedRequest) -> None:
        if operator.running:  # a dead process's last writes may come after it
            operator.kill()
            kills.append(str(change))

    def revive() -> None:
        while not stopping.wait(0.02):
            if operator.crashed:  # and not if it lost its Lease: `kept_running` starts it again
                forget_leader(api)
                operator.start(wait=False)

    proxy.after_each_change(kill)
    reviver = threading.Thread(target=revive)
    reviver.start()
    try:
        yield kills
    finally:
        proxy.after_each_change(None)
        stopping.set()
        reviver.join()
        if operator.crashed:
            forget_leader(api)
            operator.start(wait=False)
        operator.wait_ready()


def outcome(job: WatchedJob) -> dict[str, Any]:
    """Fields of the status that do not depend on the time of a kill: no times, no names."""
    status = job.status
    return {
        "conditions": {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]},
        "attempts": [(a["fromStep"], a.get("toStep"), a.get("reason")) for a in status["attempts"]],
        "steps": (status["step"], status["steps"], status.get("restarts", 0)),
        "plan": status["plan"],
        "pods": sorted(name.removeprefix(job.name) for name in job.pods),
        "phase": job.phase,
    }
