"""Runs the executor against a scripted API server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from rljob_operator.apply.event_recorder import EventRecorder
from rljob_operator.apply.executor import Executor
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.retry import RetryPolicy
from rljob_operator.labels import FINALIZER
from rljob_operator.observation import Observation
from rljob_operator.reconcile.desired import Desired, EventNote
from rljob_operator.reconcile.observed import Observed
from tests.unit.operator.kube.scripted_api_server import ScriptedApiServer, Serving, nothing, play

Object = dict[str, Any]
Step = Callable[[Executor], Any]

UID = "job-uid"
JOB = "/apis/rljob.dev/v1alpha1/namespaces/research/rljobs/sums"
PODS = "/api/v1/namespaces/research/pods"
CLAIMS = "/api/v1/namespaces/research/persistentvolumeclaims"
OWNER = {"kind": "RLJob", "name": "sums", "uid": UID, "controller": True}


def manifest(kind: str, name: str, attempt: str = "1", **content: Any) -> Object:
    labels = {"rljob.dev/attempt": attempt}
    return {
        "apiVersion": "rljob.dev/v1alpha1" if kind == "StepReport" else "v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": "research", "labels": labels, "ownerReferences": [OWNER]},
    } | content


def observation(finalizers: tuple[str, ...] = (FINALIZER,), **known: Any) -> Observation:
    facts: Object = {
        "job": None,
        "namespace": "research",
        "name": "sums",
        "uid": UID,
        "generation": 1,
        "created_at": datetime(2026, 1, 2, tzinfo=UTC),
        "deleting": False,
        "has_finalizer": FINALIZER in finalizers,
        "pods": (),
        "step_report": None,
        "nodes": (),
    }
    return Observation(lambda: Observed(**facts | known), "10", finalizers, lambda: {"step": 2, "reward": 0.5})


class Recorded(EventRecorder):
    """Keeps the notes; what becomes of them is the recorder's matter."""

    def __init__(self) -> None:
        self.notes: list[EventNote] = []

    def record(self, job: Observed, note: EventNote) -> None:
        self.notes.append(note)


class Run:
    """The writes, the observations, the notes and the last error of a run."""

    def __init__(
        self, steps: list[tuple[Desired, Observation]], script: Callable[[ScriptedApiServer], None] = nothing
    ) -> None:
        self.seen: list[Object] = []
        self.error: Exception | None = None
        recorder = Recorded()

        async def story(serving: Serving) -> None:
            retry = RetryPolicy(attempts=2, first_seconds=0.001)
            client = ApiClient(serving.connection, concurrency=1, retry=retry)
            executor = Executor(client, recorder, self.seen.append)
            for desired, state in steps:
                try:
                    await executor.execute(desired, state)
                except Exception as error:
                    self.error = error
            await client.close()

        server = play(story, script)
        self.asked = server.asked
        self.writes = server.writes()
        self.notes = recorder.notes


def execute(desired: Desired, state: Observation | None = None, script: Any = nothing) -> Run:
    return Run([(desired, state or observation())], script)
