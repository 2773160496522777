"""Runs the executor against a scripted API server."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rljob_operator.apply.event_recorder import EventRecorder
from rljob_operator.apply.executor import Executor
from rljob_operator.events import EventNote
from rljob_operator.kube.errors import RetryPolicy
from rljob_operator.labels import FINALIZER
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.observed import ObservedJob
from tests.unit.operator.kube.scripted_api_server import Answer, ScriptedApiServer, Serving, play, refusal

Object = dict[str, Any]
Script = Sequence[tuple[str, str, Answer]]
"""Methods, ends of paths, and the answers to such requests."""

UID = "job-uid"
OWNER = {"kind": "RLJob", "name": "sums", "uid": UID, "controller": True}


def manifest(kind: str, name: str, attempt: str = "1", **content: Any) -> Object:
    version = {"StepReport": "rljob.dev/v1alpha1", "Role": "rbac.authorization.k8s.io/v1"}
    labels = {"rljob.dev/attempt": attempt}
    return {
        "apiVersion": version.get(kind.removesuffix("Binding"), "v1"),
        "kind": kind,
        "metadata": {"name": name, "namespace": "research", "labels": labels, "ownerReferences": [OWNER]},
    } | content


def existing(kind: str, name: str, owners: Sequence[Object], **metadata: Any) -> Script:
    """An object that exists, with these owners."""
    found = manifest(kind, name, status={})
    found["metadata"] |= {"uid": "object-uid", "ownerReferences": list(owners)} | metadata
    plural = f"/{kind.lower()}s"
    return [("POST", plural, refusal(409, "AlreadyExists")), ("GET", f"{plural}/{name}", Answer(body=found))]


def observed(**known: Any) -> ObservedJob:
    facts: Object = {
        "job": None,
        "namespace": "research",
        "name": "sums",
        "uid": UID,
        "generation": 1,
        "created_at": datetime(2026, 1, 2, tzinfo=UTC),
        "deleting": False,
        "finalizers": (FINALIZER,),
        "resource_version": "10",
        "raw_status": {"step": 2, "reward": 0.5},
        "pods": (),
        "step_report": None,
        "nodes": (),
    }
    return ObservedJob(**facts | known)


class RecordedEvents(EventRecorder):
    """Keeps the notes instead of sending Events."""

    def __init__(self) -> None:
        self.notes: list[EventNote] = []

    def record(self, job: ObservedJob, note: EventNote) -> None:
        self.notes.append(note)


class Execution:
    """The requests, the observations, the notes and the last error of a run, which has the type `fails`."""

    def __init__(
        self, steps: Sequence[tuple[Desired, ObservedJob]], script: Script = (), fails: type[Exception] | None = None
    ) -> None:
        self.seen: list[Object] = []
        self.error: Exception | None = None
        recorder = RecordedEvents()

        async def story(serving: Serving) -> None:
            client = serving.client(retry=RetryPolicy(attempts=2, first_seconds=0.001))
            executor = Executor(client, recorder, self.seen.append)
            for desired, state in steps:
                try:
                    await executor.execute(desired, state)
                except Exception as error:
                    self.error = error

        server = play(story, scripted(script))
        assert isinstance(self.error, fails or type(None)), self.error
        self.asked = server.asked
        self.writes = server.writes()
        self.notes = recorder.notes

    @property
    def methods(self) -> list[str]:
        return [asked.method for asked in self.asked]

    @property
    def written(self) -> list[str]:
        """Last parts of the paths of writes."""
        return [path.rpartition("/")[2] for _, path in self.writes]


def scripted(script: Script) -> Any:
    def prepare(server: ScriptedApiServer) -> None:
        for rule in script:
            server.answer(*rule)

    return prepare


def execute(
    desired: Desired, state: ObservedJob | None = None, script: Script = (), fails: type[Exception] | None = None
) -> Execution:
    return Execution([(desired, state or observed())], script, fails)
