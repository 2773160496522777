"""A cluster in memory that executes the decisions of reconcile, with pods that tests control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from rljob_api.conditions import ConditionType
from rljob_api.job import MANAGED_BY_OPERATOR, RLJob
from rljob_api.memory_plan import MemoryPlan
from rljob_api.status import AttemptStatus, Condition, RLJobStatus
from rljob_api.step_report import Evidence, RankMemory, StepReportStatus
from rljob_api.termination_message import TerminationMessage
from rljob_operator.labels import FINALIZER
from rljob_operator.observe.job_facts import stored_profile
from rljob_operator.observe.pod_facts import observed_pod
from rljob_operator.reconcile.desired import Desired
from rljob_operator.reconcile.observed import ContainerTermination, ObservedJob, ObservedNode, ObservedPod
from rljob_operator.reconcile.reconcile import reconcile
from rljob_operator.reconcile.status import write_budget
from rljob_operator.settings import OperatorSettings
from rljob_operator.token_bucket import TokenBucket
from rljob_testing.memory_plans import memory_plan

START = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = OperatorSettings(trainer_image="registry.example/trainer:1", trainer_torch_version="2.8.0")
CPU_NODE = ObservedNode("cpu-node", gpus=0, usable=True)
GPU_NODE = ObservedNode("gpu-node", gpus=8, usable=True)
PLAN = memory_plan(logprob_chunk_tokens=1024)


def job_spec(**overrides: Any) -> dict[str, Any]:
    """Spec of a small job, in the spelling of the manifest. `steps` goes into `algorithm`."""
    algorithm = {"steps": overrides.pop("steps", 60)}
    spec = {"model": {"uri": "hf://org/name"}, "task": {"name": "digits"}, "algorithm": algorithm}
    return spec | {"policy": {"replicas": 2}} | overrides


class OperatorDied(Exception):
    """The operator was killed between two writes."""


@dataclass
class SimulatedCluster:
    """A cluster with one job. Events and checks return it, for chains such as `.tick(60).settled(phase="Failed")`."""

    spec: dict[str, Any] = field(default_factory=job_spec)
    settings: OperatorSettings = SETTINGS
    nodes: tuple[ObservedNode, ...] = (CPU_NODE, GPU_NODE)
    status: RLJobStatus | None = None
    pods: dict[str, ObservedPod] = field(default_factory=dict)
    report: StepReportStatus | None = None
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    """MemoryProfiles by name, which several jobs can share."""
    profile_writes: int = 0
    now: datetime = START
    uid: str = "job-uid"
    generation: int = 1
    finalizer: bool = False
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the job."""
    operator: str = ""
    deleting: bool = False
    gone: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    """Further fields of the observation."""
    events: list[str] = field(default_factory=list)
    writes: int = 0
    status_writes: int = 0
    budget: TokenBucket = field(default_factory=write_budget)
    last: Desired = field(default_factory=Desired)
    _uids: int = 0
    _version: int = 0

    # --- the operator ---

    def observe(self) -> ObservedJob:
        metadata = {"name": "demo", "namespace": "team", "labels": self.labels}
        manifest = {"metadata": metadata, "spec": self.spec}
        job = RLJob.model_validate(manifest).model_copy(update={"status": self.status})
        return ObservedJob(
            job=None if self.facts.get("problem") else job,
            stored_status=self.status,
            namespace="team",
            name="demo",
            uid=self.uid,
            generation=self.generation,
            created_at=START,
            deleting=self.deleting,
            finalizers=(FINALIZER,) if self.finalizer else (),
            operator=self.operator,
            delegated=self.spec.get("managedBy") not in (None, MANAGED_BY_OPERATOR),
            pods=tuple(self.pods.values()),
            step_report=self.report,
            nodes=self.nodes,
            fresh_token="token",
            profiles={name: stored_profile(manifest) for name, manifest in self.profiles.items()},
            status_wait_seconds=self.budget.seconds_left(self.now.timestamp()),
            **self.facts,
        )

    def snapshot(self) -> tuple[ObservedJob, int]:
        return self.observe(), self._version

    def round(self, stale: tuple[ObservedJob, int] | None = None, dies_after_writes: int | None = None) -> Desired:
        """One round of observe, reconcile and apply. Raises OperatorDied if the operator dies before all is written."""
        if self.gone:
            return Desired()
        observed, version = stale or self.snapshot()
        self.last = desired = self.decide(observed)
        self._apply(desired, version, dies_after_writes)
        return desired

    def decide(self, observed: ObservedJob | None = None) -> Desired:
        """The decision about the present state, or about `observed`, without a write."""
        observed = observed or self.observe()
        desired = reconcile(observed, self.settings, self.now)
        assert reconcile(observed, self.settings, self.now) == desired, "the same observation, another answer"
        return desired

    def settle(self, most: int = 12) -> Desired:
        """Repeat rounds until nothing is left to do. Returns the last decision."""
        for _ in range(most):
            desired = self.round()
            if replace(desired, requeue_after_seconds=None, is_status_delayed=False) == Desired():
                assert desired.requeue_after_seconds != 0.0, "a busy loop: nothing to do, and reconciled again at once"
                return desired
        raise AssertionError(f"still busy after {most} rounds: {self.last}")

    def _apply(self, desired: Desired, version: int, dies_after_writes: int | None) -> None:
        left = [dies_after_writes]

        def write() -> None:
            if left[0] is not None:
                if left[0] == 0:
                    raise OperatorDied
                left[0] -= 1
            self.writes += 1

        if desired.finalizer or desired.claim:
            write()
            self.finalizer = self.finalizer or desired.finalizer is True
            self.operator = desired.claim or self.operator
        for resize in desired.resize_pods:
            write()
            pod = self.pods.get(resize.name)
            if pod is not None and pod.uid == resize.uid:
                self._change(pod.name, memory_limit_bytes=resize.limit_bytes)
        for _ in desired.apply:
            write()
        for manifest in desired.create:
            write()
            if manifest["kind"] == "Pod":
                self._create_pod(manifest)
        for deletion in desired.delete_pods:
            write()
            pod = self.pods.get(deletion.name)
            if pod is not None and pod.uid == deletion.uid:
                self.delete_pod(pod.name, deletion.grace_seconds)
        if desired.decision is not None and self.report is not None:
            write()
            self.report = self.report.model_copy(update={"decision": desired.decision})
        if desired.profile is not None:
            write()
            self.profiles[desired.profile["metadata"]["name"]] = desired.profile
            self.profile_writes += 1
        for name in desired.delete_profiles:
            write()
            del self.profiles[name]
        if desired.delete_job:
            write()
            self.delete_job()
        if desired.status is not None:
            write()
            if version != self._version:
                return  # a conflict: the object was written since
            stored = RLJobStatus.model_validate_json(desired.status.model_dump_json())
            assert stored == desired.status, "the API server would store something else"
            self.set_status(stored)
            self.status_writes += 1
            self.budget.take(self.now.timestamp())
        self.events += [note.reason for note in desired.events]
        if desired.finalizer is False:
            write()
            self.finalizer, self.gone = False, self.deleting

    def _create_pod(self, manifest: dict[str, Any]) -> None:
        metadata = manifest["metadata"]
        if metadata["name"] in self.pods or self.deleting:
            return
        self._uids += 1
        stored = {"uid": f"uid-{self._uids}", "creationTimestamp": self.now.isoformat()}
        pod = observed_pod({**manifest, "metadata": metadata | stored, "status": {"phase": "Pending"}})
        assert pod is not None
        self.pods[pod.name] = pod

    # --- people ---

    def set_status(self, status: RLJobStatus | None) -> Self:
        self.status = status
        self._version += 1
        return self

    def change_spec(self, **overrides: Any) -> Self:
        self.spec = self.spec | overrides
        self.generation += 1
        self._version += 1
        return self

    def raise_steps(self, steps: int) -> Self:
        self.change_spec(algorithm=self.spec["algorithm"] | {"steps": steps})
        return self

    def delete_job(self) -> Self:
        self.deleting = True
        self.gone = not self.finalizer
        return self

    def delete_pod(self, name: str, grace_seconds: int | None = None) -> Self:
        """Delete gracefully. A pod that has ended or has no node is gone at once.

        `grace_seconds`: None is the pod's own.
        """
        pod = self.pods[name]
        if pod.node is None or pod.has_terminated:
            del self.pods[name]
        else:
            grace_seconds = self.settings.termination_grace_seconds if grace_seconds is None else grace_seconds
            due = self.now + timedelta(seconds=grace_seconds)
            self._change(name, deleting=True, deletion_grace_seconds=grace_seconds, deletion_due_at=due)
            if grace_seconds == 0:
                del self.pods[name]
        return self

    def observes(self, **facts: Any) -> Self:
        """Replace the further fields of the observation."""
        self.facts = facts
        return self

    # --- scheduler and kubelets ---

    def gate(self, gated: bool = True) -> Self:
        for name in self.pods:
            self._change(name, gated=gated)
        return self

    def tick(self, seconds: float) -> Self:
        self.now += timedelta(seconds=seconds)
        return self

    def place(self, *names: str, node: str | None = None) -> Self:
        for name in names or tuple(self.pods):
            where = node or ("cpu-node" if self.pods[name].role == "controller" else "gpu-node")
            self._change(name, node=where, scheduled_at=self.now, unschedulable=None)
        return self

    def unschedulable(self, text: str, *names: str) -> Self:
        for name in names:
            self._change(name, unschedulable=text)
        return self

    def start(self, *names: str) -> Self:
        for name in names or tuple(self.pods):
            self._change(name, phase="Running", started=True, waiting=None)
        return self

    def ready(self, *names: str) -> Self:
        for name in names or tuple(self.pods):
            self._change(name, ready=True)
        return self

    def end(
        self,
        name: str,
        exit_code: int,
        *,
        message: str | None = None,
        message_code: int | None = None,
        step: int | None = None,
        evidence: Evidence | None = None,
        reason: str = "Error",
        text: str = "",
        sidecars: tuple[str, ...] = (),
    ) -> Self:
        """`message_code`: exit code in the message, if it differs from the container's. `sidecars`: containers that
        keep running, and with them the phase."""
        code = exit_code if message_code is None else message_code
        written = None
        if message is not None:
            written = TerminationMessage(exit_code=code, message=message, step=step, evidence=evidence)
        end = ContainerTermination(exit_code, "Completed" if exit_code == 0 else reason, self.now, written, text)
        phase = "Running" if sidecars else "Failed" if exit_code else "Succeeded"
        self._change(name, phase=phase, ready=False, started=True, end=end, running_sidecars=sidecars)
        return self

    def restart(self, *names: str) -> Self:
        """Restart all containers of the pods in place."""
        for name in names or tuple(self.pods):
            self._change(name, restart_count=self.pods[name].restart_count + 1, ready=False, end=None)
        return self

    def vanish(self, name: str) -> Self:
        del self.pods[name]
        return self

    def finish_deletions(self) -> Self:
        """Remove the pods that are being deleted, without a termination status."""
        for name in [pod.name for pod in self.pods.values() if pod.deleting]:
            del self.pods[name]
        return self

    def change_pod(self, name: str, **changes: Any) -> Self:
        self._change(name, **changes)
        return self

    def _change(self, name: str, **changes: Any) -> None:
        self.pods[name] = replace(self.pods[name], **changes)

    # --- the trainer ---

    def reports(self, step: int, *, attempt: int | None = None, reward: float = 0.5, **more: Any) -> Self:
        self.report = StepReportStatus.model_validate(
            {"attempt": attempt or self.attempt.number, "step": step, "reward": reward} | {"plan": PLAN} | more
        )
        return self

    # --- what a test asks ---

    @property
    def attempt(self) -> AttemptStatus:
        assert self.status is not None
        return self.status.attempts[-1]

    def condition(self, type_: ConditionType) -> Condition:
        assert self.status is not None
        return next(condition for condition in self.status.conditions if condition.type == type_)

    def holds(self, type_: ConditionType) -> bool:
        return self.condition(type_).status == "True"

    @property
    def phase(self) -> str:
        assert self.status is not None
        assert self.status.display is not None
        return self.status.display.phase

    @property
    def kstatus(self) -> str:
        """The rules of sigs.k8s.io/cli-utils/pkg/kstatus/status for kinds that it does not know."""
        if self.stored.observed_generation != self.generation:
            return "InProgress"
        if self.holds(ConditionType.STALLED):
            return "Failed"
        return "Current" if self.holds(ConditionType.READY) else "InProgress"

    @property
    def stored(self) -> RLJobStatus:
        assert self.status is not None
        return self.status

    @property
    def plan(self) -> MemoryPlan:
        assert self.stored.plan is not None
        return self.stored.plan

    @property
    def remedies(self) -> list[str]:
        return [change.remedy.setting for change in self.stored.plan_changes]

    def names(self, role: str) -> list[str]:
        return sorted(pod.name for pod in self.pods.values() if pod.role == role)

    def expect(self, **expected: Any) -> Self:
        """Compare facts of the job with the expected ones. The names of facts:

        - a field of the status, or else of its latest attempt;
        - a condition in lower case: its status as a bool, its reason, or both in a tuple;
        - a condition or `message` with `_contains`: a part of its message, or several in a tuple;
        - `phase`; `kstatus`; `pods` and `deleting`, names of pods; `wait`, seconds until the next reconcile.
        """
        found = {name: self._fact(name, value) for name, value in expected.items()}
        assert found == expected, f"{found} is not {expected}"
        return self

    def settled(self, **expected: Any) -> Self:
        """Settle, and compare facts as `expect` does."""
        self.settle()
        return self.expect(**expected)

    def _fact(self, name: str, expected: Any) -> Any:
        subject = name.removesuffix("_contains")
        condition = None
        if subject.upper() in ConditionType.__members__:
            condition = self.condition(ConditionType[subject.upper()])
        if subject != name:
            message = (condition.message if condition else self.attempt.message) or ""
            parts = (expected,) if isinstance(expected, str) else expected
            return expected if all(part in message for part in parts) else message
        if condition:
            is_true, reason = condition.status == "True", condition.reason
            return (
                (is_true, reason) if isinstance(expected, tuple) else is_true if isinstance(expected, bool) else reason
            )
        if name in ("phase", "kstatus"):
            return getattr(self, name)
        if name in ("pods", "deleting"):
            return {pod.name for pod in self.pods.values() if name == "pods" or pod.deleting}
        if name == "wait":
            return self.last.requeue_after_seconds
        return getattr(self.stored if name in RLJobStatus.model_fields else self.attempt, name)

    # --- the way to where most tests begin ---

    def stop(self) -> Self:
        """Let all pods go that the operator deletes."""
        for _ in range(3):
            self.settle()
            self.finish_deletions()
        self.settle()
        return self

    def run(self) -> Self:
        """Run until the attempt commits steps."""
        self.settle()
        self.place()
        self.start()
        self.ready()
        self.settle()
        return self

    def complete(self, step: int = 60) -> Self:
        """Let the controller report that all steps are committed, and the workers go."""
        self.end("demo-controller", 0, message="all steps are committed", step=step)
        return self.settled().finish_deletions()

    def next_attempt_runs(self) -> Self:
        """Remove the old pods and start those of the next attempt."""
        self.stop()
        self.finish_deletions()
        self.tick(400)
        return self.run()


def new_job(
    settings: OperatorSettings = SETTINGS,
    nodes: tuple[ObservedNode, ...] = (CPU_NODE, GPU_NODE),
    facts: dict[str, Any] | None = None,
    **spec: Any,
) -> SimulatedCluster:
    """A job that was applied just now. `spec`: those of `job_spec`."""
    return SimulatedCluster(spec=job_spec(**spec), settings=settings, nodes=nodes, facts=dict(facts or {}))


def created_job(**given: Any) -> SimulatedCluster:
    """A job whose pods are created and not yet placed. `given`: those of `new_job`."""
    return new_job(**given).settled()


def running_job(**given: Any) -> SimulatedCluster:
    """A job whose attempt commits steps. `given`: those of `new_job`."""
    return new_job(**given).run()


CONTROLLER, POLICY_0, POLICY_1 = "demo-controller", "demo-policy-0", "demo-policy-1"


def rank_memory(**overrides: int) -> RankMemory:
    gib = 1 << 30
    values = {
        "reserved_bytes": 20 * gib,
        "peak_allocated_bytes": 40 * gib,
        "peak_reserved_bytes": 50 * gib,
        "device_free_bytes": 55 * gib,
        "device_total_bytes": 80 * gib,
    }
    return RankMemory.model_validate({"role": "policy", "rank": 0} | values | overrides)


def reasons(conditions: Sequence[Condition]) -> dict[str, str]:
    return {condition.type: condition.reason for condition in conditions}
