"""No object that the API server may store ends the process, or stops the reconciles of another job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from rljob_operator.apply.executor import JobGone
from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import Conflict, Forbidden, Invalid, NamespaceGone, NotFound, Unavailable
from rljob_operator.kube.resources import NODES, PODS, RLJOBS, STEP_REPORTS, Resource
from rljob_operator.kube.watch import Reflector, Sink
from rljob_operator.observe.observer import Observer
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.observed import ObservedJob
from rljob_operator.reconcile.reconcile import reconcile
from rljob_operator.runtime.job_queue import JobQueue
from rljob_operator.runtime.reconcile_loop import ReconcileLoop
from rljob_operator.settings import OperatorSettings
from rljob_testing.operator import manifests
from tests.unit.operator.observe.objects import Object, job, node, pod, step_report
from tests.unit.operator.runtime.test_reconcile_loop import SETTINGS, Answers

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
STATUS = {
    "step": 2,
    "attempts": [{"number": 1, "planGeneration": 1, "startTime": "2026-01-02T03:04:05Z", "fromStep": 1}],
    "conditions": [{"type": "Scheduled", "status": "True"}],
    "display": {"phase": "Running"},
}
OBJECTS: dict[Resource, list[Object]] = {
    RLJOBS: [job(status=STATUS)],
    PODS: [pod(status={"phase": "Running", "conditions": [{"type": "PodScheduled", "status": "True"}]})],
    STEP_REPORTS: [step_report(step=3, attempt=1, updateTime="2026-01-02T03:04:05Z")],
    NODES: [node(gpus="8")],
}
DEEP = '{"a":' * 1200 + "1" + "}" * 1200


@st.composite
def changed(draw: st.DrawFn, obj: Any) -> Any:
    """The object with one of its values replaced by anything, or left out."""
    if not obj or not isinstance(obj, dict | list) or draw(st.integers(0, 4)) == 0:
        return draw(JSON | st.just("DEEP"))
    if isinstance(obj, list):
        index = draw(st.integers(0, len(obj) - 1))
        return [*obj[:index], draw(changed(obj[index])), *obj[index + 1 :]]
    name = draw(st.sampled_from(sorted(obj)))
    if draw(st.integers(0, 9)) == 0:
        return {key: value for key, value in obj.items() if key != name}
    return obj | {name: draw(changed(obj[name]))}


def identified(obj: Any, original: Object) -> Object:
    """The API server guarantees the fields that identify an object."""
    metadata = original["metadata"]
    given = obj.get("metadata") if isinstance(obj, dict) else None
    known = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    identity = {name: metadata[name] for name in known if name in metadata}
    return (obj if isinstance(obj, dict) else {}) | {
        "metadata": (given if isinstance(given, dict) else {}) | identity | {"resourceVersion": "60"}
    }


class Stream:
    """A watch response with these lines, which then stays open."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self.content = self

    @property
    def is_drained(self) -> bool:
        return not self._lines

    async def readany(self) -> bytes:
        if self._lines:
            return self._lines.pop(0).encode() + b"\n"
        await asyncio.sleep(60)
        return b""

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class HostileAnswers(Answers):
    """Fails with the given error for the hostile job."""

    async def execute(self, desired: Desired, observed: ObservedJob) -> None:
        if observed.name != "honest":
            await super().execute(desired, observed)


class SimulatedApiServer:
    """An API server with these objects of each resource, in the listing or as events of a watch."""

    def __init__(self, listed: dict[Resource, list[Any]], lines: dict[Resource, list[str]]) -> None:
        self._listed = listed
        self._lines = lines
        self._streams: list[Stream] = []

    @property
    def is_drained(self) -> bool:
        """All lines were read."""
        return not self._lines and all(stream.is_drained for stream in self._streams)

    async def list_pages(self, resource: Resource, *_: Any) -> AsyncIterator[tuple[list[Any], str]]:
        yield self._listed.get(resource, []), "50"

    async def watch(self, resource: Resource, *_: Any) -> Stream:
        self._streams.append(Stream(self._lines.pop(resource, [])))
        return self._streams[-1]


async def run(served: SimulatedApiServer, *errors: Exception) -> list[str]:
    """Run the operator until the honest job was reconciled after everything was read. `errors`: of the API server, in
    the first reconciles of the other job. Returns the reported bugs of the operator."""
    honest, executor = asyncio.Event(), HostileAnswers(*errors)
    queue = JobQueue()
    observer = Observer(("nvidia.com/gpu",), queue.add)

    def decide(observed: ObservedJob, settings: OperatorSettings, now: datetime) -> Desired:
        if observed.name == "honest":
            honest.set()
        return reconcile(observed, settings, now)

    sinks: dict[Resource, Sink] = {
        RLJOBS: observer.jobs, PODS: observer.pods, STEP_REPORTS: observer.step_reports, NODES: observer.nodes,
    }  # fmt: skip
    client = cast(ApiClient, served)
    tasks = [asyncio.create_task(Reflector(client, *fed, reconnect_seconds=0.01).run()) for fed in sinks.items()]
    tasks.append(asyncio.create_task(ReconcileLoop(SETTINGS, queue, observer, executor, decide).run()))
    async with asyncio.timeout(240):
        await honest.wait()
        while not served.is_drained:
            await asyncio.sleep(0.001)
        honest.clear()
        queue.add(("research", "honest"))
        await honest.wait()
    await asyncio.sleep(0.01)
    ended = [task.exception() for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert ended == []
    return executor.bugs


RESOURCES = st.sampled_from(list(OBJECTS))


@settings(max_examples=120, deadline=None)
@given(st.data(), RESOURCES, st.sampled_from(["listed", "ADDED", "MODIFIED", "DELETED", "BOOKMARK"]))
def test_no_listed_or_changed_object_stops_anything(data: st.DataObject, resource: Resource, kind: str) -> None:
    [original] = OBJECTS[resource]
    hostile = identified(data.draw(changed(original)), original)
    if kind == "listed":
        listed, lines = OBJECTS | {resource: [hostile]}, {}
    else:
        listed, lines = dict(OBJECTS), {resource: [watch_event(kind, hostile)]}
    lines[RLJOBS] = [*lines.get(RLJOBS, []), HONEST]
    asyncio.run(run(SimulatedApiServer(listed, lines)))


def watch_event(kind: str, obj: Object) -> str:
    return json.dumps({"type": kind, "object": obj}).replace('"DEEP"', DEEP)


HONEST = watch_event("ADDED", job("honest", version=70, uid="honest"))


REPORTED: dict[str, Any] = {
    "attempt": 1,
    "step": 3,
    "seconds": {"rollout": 1.0},
    "updateTime": "2026-01-02T03:04:05Z",
    "memory": [{"role": "policy", "rank": 0, "deviceTotalBytes": 80 << 30}],
    "plan": manifests.PLAN,
    "pendingExit": {"exitCode": 80, "message": "out of memory"},
    "lastEvidence": {
        "time": "2026-01-02T03:04:05Z", "attempt": 1, "role": "policy", "rank": 0, "step": 4, "message": "oom",
    },
}  # fmt: skip
ERRORS = [
    Conflict("changed"),
    Unavailable("no answer"),
    Forbidden("exceeded quota"),
    Invalid("etcdserver: request is too large"),
    NotFound("no such object"),
    NamespaceGone("deleted"),
    JobGone("deleted"),
    RecursionError("too deep"),
]
HOSTILE_REPORTS = st.lists(
    changed(REPORTED) | changed(REPORTED | {"memory": [REPORTED["memory"][0]] * 300}), max_size=5
)


@settings(max_examples=60, deadline=None)
@given(st.data(), HOSTILE_REPORTS, st.lists(st.sampled_from(ERRORS), max_size=6))
def test_no_report_order_or_api_error_stops_anything(
    data: st.DataObject, contents: list[Any], errors: list[Exception]
) -> None:
    kinds = st.sampled_from(["ADDED", "MODIFIED", "DELETED"])
    reports = [
        watch_event(data.draw(kinds), step_report(version=60 + index) | {"status": content})
        for index, content in enumerate(contents)
    ]
    changed_job, changed_pod = (newer(OBJECTS[resource][0]) for resource in (RLJOBS, PODS))
    lines = {
        STEP_REPORTS: data.draw(st.permutations(reports)),
        RLJOBS: [watch_event("MODIFIED", changed_job), HONEST],
        PODS: [watch_event("MODIFIED", changed_pod)],
    }
    with capture_logs():  # tracebacks for the terminal take a second
        bugs = asyncio.run(run(SimulatedApiServer(dict(OBJECTS), lines), *errors))
    assert [bug for bug in bugs if "RecursionError: too deep" not in bug] == []


def newer(obj: Object) -> Object:
    return obj | {"metadata": obj["metadata"] | {"resourceVersion": "61"}}
