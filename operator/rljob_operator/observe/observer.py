"""Observation of jobs, combined from the caches. Makes no requests."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from rljob_operator.kube.resources import NODES, PODS, RLJOBS, STEP_REPORTS, Object
from rljob_operator.kube.watch import Key
from rljob_operator.metrics import JOBS
from rljob_operator.observation import Observation
from rljob_operator.observe.api_refusals import ApiRefusals
from rljob_operator.observe.cache import Cache
from rljob_operator.observe.job_facts import JobFact, job_fact, parse_job, parse_step_report, step_report_text
from rljob_operator.observe.node_facts import NodeFact, node_fact
from rljob_operator.observe.pod_facts import PodFact, pod_fact
from rljob_operator.reconcile.observed import Observed, ObservedNode

VOLCANO_GROUP = "scheduling.volcano.sh"
KUEUE_GROUP = "kueue.x-k8s.io"


class Observer:
    """Caches of jobs, pods, StepReports and nodes. `wake` gets the key of each job affected by a change."""

    def __init__(self, gpu_resources: tuple[str, ...], wake: Callable[[Key], None]) -> None:
        self.jobs = Cache[JobFact](job_fact, self._job_changed, RLJOBS.plural)
        self.pods = Cache[PodFact](pod_fact, self._pod_changed, PODS.plural)
        self.step_reports = Cache[bytes](step_report_text, self._step_report_changed, STEP_REPORTS.plural)
        self.nodes = Cache[NodeFact](lambda obj: node_fact(obj, gpu_resources), self._node_changed, NODES.plural)
        self.api_groups: frozenset[str] = frozenset()
        self.api_groups_outdated: Callable[[], None] = lambda: None
        """Called if an API that was in use is not served any more."""
        self.node_changed: Callable[[NodeFact], None] = lambda _: None
        """Called with each node that appears or changes."""
        self._wake = wake
        self._pods_of: dict[Key, dict[str, PodFact]] = {}
        self._refusals: dict[Key, ApiRefusals] = {}
        self._nodes: tuple[ObservedNode, ...] | None = ()

    def observe(self, key: Key) -> Observation | None:
        """The present observation of the job; None if it does not exist."""
        fact = self.jobs.get(key)
        if fact is None:
            return None
        parsed = parse_job(fact.text)
        step_report_text = self.step_reports.get(key)
        step_report, step_report_problem = parse_step_report(step_report_text) if step_report_text else (None, None)
        pods = self._pods_of.get(key, {}).values()
        own = [pod.pod for pod in pods if pod.owner_uid == fact.uid and pod.pod is not None]
        foreign = {pod.name for pod in pods if pod.owner_uid != fact.uid or pod.pod is None}
        refusals = self._refusals.get(key) or ApiRefusals()
        observed = Observed(
            job=parsed.job,
            problem=parsed.problem,
            stored_status=parsed.status,
            namespace=fact.namespace,
            name=fact.name,
            uid=fact.uid,
            generation=fact.generation,
            created_at=fact.created_at,
            deleting=fact.deleting,
            has_finalizer=fact.has_finalizer,
            pods=tuple(sorted(own, key=lambda pod: pod.name)),
            foreign_pods=tuple(sorted(foreign.union(refusals.taken_names()))),
            step_report=step_report,
            step_report_problem=step_report_problem,
            nodes=self._observed_nodes(),
            namespace_terminating=refusals.namespace_terminating,
            refused=refusals.refused,
            foreign_object=refusals.foreign_object,
            left_behind=refusals.left_behind,
            volcano_installed=VOLCANO_GROUP in self.api_groups,
            kueue_installed=KUEUE_GROUP in self.api_groups,
            fresh_token=secrets.token_hex(32),
        )
        return Observation(observed, fact.resource_version, fact.finalizers, fact.status())

    def observe_metadata(self, key: Key) -> Observation | None:
        """The job without its spec, for a report about a job that cannot be observed; None: there is no such job."""
        fact = self.jobs.get(key)
        if fact is None:
            return None
        observed = Observed(
            job=None,
            namespace=fact.namespace,
            name=fact.name,
            uid=fact.uid,
            generation=fact.generation,
            created_at=fact.created_at,
            deleting=fact.deleting,
            has_finalizer=fact.has_finalizer,
            pods=(),
            step_report=None,
            nodes=(),
        )
        return Observation(observed, fact.resource_version, fact.finalizers, fact.status())

    def saw(self, obj: Object) -> None:
        """Update the caches with an object that a write returned, without waiting for the watch."""
        if obj.get("kind") == RLJOBS.kind:
            self.jobs.put(obj)
        elif obj.get("kind") == PODS.kind:
            self.pods.put(obj)

    def refusals(self, key: Key) -> ApiRefusals:
        return self._refusals.setdefault(key, ApiRefusals())

    def accepted(self, key: Key) -> None:
        """Clear the refusals of the job."""
        self._refusals.pop(key, None)

    def set_api_groups(self, groups: frozenset[str]) -> None:
        """Set the API groups that the cluster serves; the schedulers are detected by theirs."""
        if groups != self.api_groups:
            self.api_groups = groups
            self._wake_unplaced()

    # --- changes of the caches ---

    def _job_changed(self, key: Key, before: JobFact | None, after: JobFact | None) -> None:
        if before:
            JOBS.labels(before.phase).dec()
        if after:
            JOBS.labels(after.phase).inc()
        if after is None or (before and before.uid != after.uid):
            self._refusals.pop(key, None)
        self._wake(key)

    def _pod_changed(self, key: Key, before: PodFact | None, after: PodFact | None) -> None:
        namespace, name = key
        for fact in (before, after):
            if fact is None:
                continue
            job = (namespace, fact.job_name)
            pods = self._pods_of.setdefault(job, {})
            pods.pop(name, None)
            if fact is after:
                pods[name] = fact
            if not pods:
                del self._pods_of[job]
            self._wake(job)

    def _step_report_changed(self, key: Key, before: bytes | None, after: bytes | None) -> None:
        self._wake(key)

    def _node_changed(self, key: Key, before: NodeFact | None, after: NodeFact | None) -> None:
        """Wake the jobs that wait for nodes."""
        if after:
            self.node_changed(after)
        if (before and before.node) != (after and after.node):
            self._nodes = None
            self._wake_unplaced()

    def _wake_unplaced(self) -> None:
        for key, fact in self.jobs.items():
            if not fact.placed:
                self._wake(key)

    def _observed_nodes(self) -> tuple[ObservedNode, ...]:
        if self._nodes is None:
            self._nodes = tuple(sorted((fact.node for fact in self.nodes.values()), key=lambda node: node.name))
        return self._nodes
