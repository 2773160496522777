"""Observation of jobs, combined from the caches. Makes no requests."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial

from rljob_operator.kube.resources import MEMORY_PROFILES, NODES, PODS, RLJOBS, STEP_REPORTS, Object
from rljob_operator.kube.watch import Key
from rljob_operator.metrics import JOBS
from rljob_operator.observe.cache import Cache
from rljob_operator.observe.job_facts import (
    JobFact,
    StepReportFact,
    job_fact,
    parse_job,
    raw_status,
    step_report_fact,
    stored_profile,
)
from rljob_operator.observe.node_facts import UnplacedJobs, gains_room, observed_node
from rljob_operator.observe.pod_facts import PodFact, pod_fact
from rljob_operator.reconcile.observed import JobMetadata, ObservedJob, ObservedNode, StoredProfile
from rljob_operator.reconcile.pod_deletion import waiting_workloads
from rljob_operator.reconcile.status import write_budget
from rljob_operator.token_bucket import TokenBucket

VOLCANO_GROUP = "scheduling.volcano.sh"
KUEUE_GROUP = "kueue.x-k8s.io"

CHECK_SECONDS = 1800.0
"""Mean interval of the lookups of a running job's objects, 8 requests each: 44 a second for 10,000 running jobs."""
_RETRY_CHECK_SECONDS = 60.0
_DUE = 0.0
"""Time of a lookup that is due at once."""


class Observer:
    """Caches of jobs, pods, StepReports, MemoryProfiles and nodes. `wake` gets the key of each job affected by a
    change."""

    def __init__(
        self, gpu_resources: tuple[str, ...], wake: Callable[[Key], None], *, shares_profiles: bool = False
    ) -> None:
        """`shares_profiles`: jobs may use the MemoryProfiles of other namespaces."""
        self.jobs = Cache[JobFact](job_fact, self._job_changed, RLJOBS.plural)
        self.pods = Cache[PodFact](pod_fact, self._pod_changed, PODS.plural)
        self.step_reports = Cache[StepReportFact](step_report_fact, self._step_report_changed, STEP_REPORTS.plural)
        self.profiles = Cache[StoredProfile](stored_profile, self._profile_changed, MEMORY_PROFILES.plural)
        read_node = partial(observed_node, gpu_resources=gpu_resources)
        self.nodes = Cache[ObservedNode](read_node, self._node_changed, NODES.plural)
        self.api_groups: frozenset[str] = frozenset()
        self.api_groups_outdated: Callable[[], None] = lambda: None
        """Called if an API that was in use is not served any more."""
        self.node_changed: Callable[[ObservedNode], None] = lambda _: None
        """Called with each node that appears or changes."""
        self._wake = wake
        self._pods_of: dict[Key, dict[str, PodFact]] = {}
        self._refusals: dict[Key, ApiRefusals] = {}
        self._budgets: dict[Key, TokenBucket] = {}
        self._checks: dict[Key, float] = {}
        """Time of the next lookup of a job's objects, on the monotonic clock."""
        self._profiles: dict[str, dict[str, StoredProfile]] = {}
        self._shared_profiles: dict[str, StoredProfile] = {}
        """Each dict is replaced, not changed: observations refer to it."""
        self._shares_profiles = shares_profiles
        self._nodes: tuple[ObservedNode, ...] | None = ()
        self.unplaced = UnplacedJobs(wake)
        """The owner of the observer runs it."""

    def observe(self, key: Key) -> Callable[[], ObservedJob] | None:
        """The present observation of the job; None if it does not exist.

        The call parses the job and its report, from the state of now. It takes up to half a second, and belongs into a
        thread.
        """
        fact = self.jobs.get(key)
        if fact is None:
            return None
        pods = self._pods_of.get(key, {}).values()
        own = [pod.pod for pod in pods if pod.owner_uid == fact.uid and pod.pod is not None]
        others = [pod for pod in pods if pod.owner_uid != fact.uid or pod.pod is None]
        leaving = sorted(pod.name for pod in others if pod.pod and pod.pod.deleting)
        foreign = {pod.name for pod in others} - set(leaving)
        refusals = self._refusals.get(key) or ApiRefusals()
        observed = replace(
            _observed_metadata(fact),
            pods=tuple(sorted(own, key=lambda pod: pod.name)),
            foreign_pods=tuple(sorted(foreign.union(refusals.taken_names()))),
            nodes=self.observed_nodes(),
            profiles=self._profiles.get(key[0], {}),
            shared_profiles=self._shared_profiles,
            namespace_terminating=refusals.namespace_terminating,
            refused=refusals.refused,
            missing_object=refusals.missing_object,
            foreign_object=refusals.foreign_object,
            left_behind=refusals.left_behind or (_waiting_for(leaving[0]) if leaving else None),
            status_wait_seconds=budget.seconds_left(time.monotonic()) if (budget := self._budgets.get(key)) else 0.0,
            objects_check_seconds=self._seconds_until_check(key),
            volcano_installed=VOLCANO_GROUP in self.api_groups,
            kueue_installed=KUEUE_GROUP in self.api_groups,
            fresh_token=secrets.token_hex(32),
        )
        return partial(_parsed, observed, fact, self.step_reports.get(key))

    def observed_nodes(self) -> tuple[ObservedNode, ...]:
        """The present nodes, by name."""
        if self._nodes is None:
            self._nodes = tuple(sorted(self.nodes.values(), key=lambda node: node.name))
        return self._nodes

    def orphaned_workloads(self, key: Key) -> tuple[str, ...]:
        """Workloads that keep the pods of a job that is gone, as jobs without a finalizer are at once."""
        if KUEUE_GROUP not in self.api_groups:
            return ()
        pods = self._pods_of.get(key, {}).values()
        return waiting_workloads(key[1], [pod.pod for pod in pods if pod.pod and pod.owner_uid])

    def observe_metadata(self, key: Key) -> ObservedJob | None:
        """The job without its spec, for a report about a job that cannot be observed; None: there is no such job."""
        fact = self.jobs.get(key)
        return None if fact is None else replace(_observed_metadata(fact), raw_status=raw_status(fact.text))

    def runs(self, key: Key) -> bool:
        """The job's pods hold nodes, or it recovers from a failure."""
        fact = self.jobs.get(key)
        return fact is not None and fact.runs

    def saw(self, obj: Object) -> None:
        """Update the caches with an object that a write returned, without waiting for the watch."""
        if obj.get("kind") == RLJOBS.kind:
            self.jobs.put(obj)
        elif obj.get("kind") == PODS.kind:
            self.pods.put(obj)
        elif obj.get("kind") == MEMORY_PROFILES.kind:
            self.profiles.put(obj)

    def refusals(self, key: Key) -> ApiRefusals:
        return self._refusals.setdefault(key, ApiRefusals())

    def accepted(self, key: Key) -> None:
        """Clear the refusals of the job."""
        self._refusals.pop(key, None)

    def status_written(self, key: Key) -> None:
        """Count a write of the job's status."""
        self._budgets.setdefault(key, write_budget()).take(time.monotonic())

    def objects_checked(self, key: Key, *, failed: bool = False) -> None:
        """Plan the next lookup of the objects of the job other than its pods. `failed`: also before each lookup.

        If the StepReport was deleted during the lookup, the next one stays due.
        """
        if not failed and self._checks.get(key) == _DUE:
            return
        after = _RETRY_CHECK_SECONDS if failed else CHECK_SECONDS * random.uniform(0.75, 1.25)
        self._checks[key] = time.monotonic() + after

    def _seconds_until_check(self, key: Key) -> float:
        """The first one comes at any time of the interval, so that those of all jobs are spread."""
        now = time.monotonic()
        return max(0.0, self._checks.setdefault(key, now + random.uniform(0.0, CHECK_SECONDS)) - now)

    def set_api_groups(self, groups: frozenset[str]) -> None:
        """Set the API groups that the cluster serves; the schedulers are detected by theirs."""
        if groups != self.api_groups:
            self.api_groups = groups
            self.unplaced.wake_later()

    # --- changes of the caches ---

    def _job_changed(self, key: Key, before: JobFact | None, after: JobFact | None) -> None:
        if before and not before.delegated:
            JOBS.labels(before.phase).dec()
        if after and not after.delegated:
            JOBS.labels(after.phase).inc()
        self.unplaced.update(key, waits=after is not None and not after.placed)
        if after is None or (before and before.uid != after.uid):
            self._refusals.pop(key, None)
            self._budgets.pop(key, None)
            self._checks.pop(key, None)
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

    def _step_report_changed(self, key: Key, before: StepReportFact | None, after: StepReportFact | None) -> None:
        """Wake the job, if the report is its own: a job that is not known yet is woken when it appears. If somebody has
        deleted the report, other objects may be gone too."""
        job = self.jobs.get(key)
        was_own, is_own = (bool(job and report and job.uid in report.owners) for report in (before, after))
        if was_own and not is_own:
            self._checks[key] = _DUE
        if was_own or is_own:
            self._wake(key)

    def _profile_changed(self, key: Key, before: StoredProfile | None, after: StoredProfile | None) -> None:
        namespace, name = key
        if own := _with(self._profiles.get(namespace, {}), name, after):
            self._profiles[namespace] = own
        else:
            self._profiles.pop(namespace, None)
        if self._shares_profiles:
            same = (profiles[name] for profiles in self._profiles.values() if name in profiles)
            latest = max(same, key=lambda profile: profile.last_used_at, default=None)
            self._shared_profiles = _with(self._shared_profiles, name, latest)

    def _node_changed(self, key: Key, before: ObservedNode | None, after: ObservedNode | None) -> None:
        """Wake the jobs that wait for nodes, if there is room for more pods."""
        self._nodes = None
        if after:
            self.node_changed(after)
        if gains_room(before, after):
            self.unplaced.wake_later()


def _with(profiles: dict[str, StoredProfile], name: str, profile: StoredProfile | None) -> dict[str, StoredProfile]:
    """`profiles` with one of them replaced, or without it."""
    others = {other: each for other, each in profiles.items() if other != name}
    return others if profile is None else {**others, name: profile}


def _observed_metadata(fact: JobFact) -> ObservedJob:
    metadata = {each.name: getattr(fact, each.name) for each in fields(JobMetadata)}
    return ObservedJob(**metadata, job=None, pods=(), step_report=None, nodes=())


def _parsed(observed: ObservedJob, fact: JobFact, report: StepReportFact | None) -> ObservedJob:
    """The observation with the job and its report, which are parsed for it."""
    text = fact.text
    parsed = parse_job(text)
    step_report, step_report_problem = report.content(fact.uid) if report else (None, None)
    return replace(
        observed,
        job=parsed.job,
        problem=parsed.problem,
        stored_status=parsed.status,
        raw_status=raw_status(text),
        step_report=step_report,
        step_report_problem=step_report_problem,
        step_report_version=report.resource_version if report else "",
    )


def _waiting_for(pod: str) -> str:
    return f"pod {pod} of a deleted job of this name is being deleted; waiting for it to terminate"


# --- Refusals of the API server ---


_FOREIGN_POD_REMEMBERED_SECONDS = 30.0
"""Time after which a name that a foreign pod had is tried again."""


@dataclass(slots=True)
class ApiRefusals:
    """The refusals of one job."""

    refused: str | None = None
    """The API server's message about an object that it refused."""
    missing_object: str | None = None
    """Message about an object that the job names and that does not exist."""
    foreign_object: str | None = None
    """Message about an object that is not the job's and has a name that the job needs."""
    left_behind: str | None = None
    """Message about an object of a deleted job of the same name."""
    namespace_terminating: bool = False
    _taken_until: dict[str, float] = field(default_factory=dict)

    def name_taken(self, pod: str) -> None:
        """Record that a foreign pod has a name that the job needs."""
        self._taken_until[pod] = time.monotonic() + _FOREIGN_POD_REMEMBERED_SECONDS

    def taken_names(self) -> tuple[str, ...]:
        now = time.monotonic()
        return tuple(sorted(name for name, until in self._taken_until.items() if now < until))
