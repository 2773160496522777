"""A hundred jobs of ten shapes, whose trainers predict too little memory: only the first job of each shape fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJobSpec
from rljob_api.memory_plan import MemoryPlan
from rljob_api.quantity import quantity_bytes
from rljob_api.step_report import Evidence
from rljob_api.termination_message import TerminationMessage
from rljob_memory.budget import setup_of
from rljob_memory.plan import first_plan
from rljob_memory.profile import plan_on_machine
from rljob_operator import labels
from rljob_operator.objects.supporting_objects import ATTEMPT_SETTINGS_KEY
from rljob_testing.memory_plans import GIB, memory_facts
from rljob_testing.operator import manifests
from rljob_testing.operator.api_client import ResourceClient
from rljob_testing.operator.fault_proxy import FaultProxy
from rljob_testing.operator.simulated_kubelet import Pod, SimulatedKubelet
from rljob_testing.operator.watched_job import WatchedJob
from rljob_testing.patience import eventually
from tests.integration.operator.conftest import Kubectl, NewJob

SHAPES = 10
JOBS_OF_A_SHAPE = 10
TIMEOUT_SECONDS = 240.0
STEPS = 10
FACTS = memory_facts()
LIMIT = {"name": "rljob", "resources": {"limits": {"memory": "8Gi"}}}


@dataclass(frozen=True)
class Shape:
    """Jobs that differ from others in the length of responses. Micro-batches need a multiple of the predicted memory,
    or workers more host memory than their limit."""

    number: int

    @property
    def spec(self) -> dict[str, Any]:
        tokens = {"maxResponseTokens": 64 * (self.number + 1)}
        if not self.lacks_host_memory:
            return {"algorithm": tokens}
        policy = {"template": {"spec": {"containers": [LIMIT]}}}
        return {"algorithm": tokens, "policy": policy, "recovery": {"maxHostMemory": "16Gi"}}

    @property
    def lacks_host_memory(self) -> bool:
        return self.number >= 8

    @property
    def setup(self) -> Any:
        job = manifests.job(**self.spec)
        return setup_of(RLJobSpec.model_validate(job["spec"]), FACTS)

    @property
    def predicted(self) -> MemoryPlan:
        return first_plan(RLJobSpec.model_validate(manifests.job(**self.spec)["spec"]).memory, self.setup)

    def holds(self, plan: MemoryPlan, worker: Pod) -> bool:
        """The truth, which the prediction does not know."""
        if self.lacks_host_memory:
            limits = worker["spec"]["containers"][0]["resources"]["limits"]
            return quantity_bytes(limits["memory"]) >= 12 * GIB
        return plan.micro_batch_tokens <= self.predicted.micro_batch_tokens >> (1 + self.number % 3)


@dataclass
class Trainers:
    """Act as the controller pods of all jobs of a namespace, whose names are `shape-NUMBER-job-NUMBER`."""

    api: ResourceClient
    kubelet: SimulatedKubelet
    namespace: str
    failures: Counter[int] = field(default_factory=Counter)
    """Failed attempts, by shape."""
    _played: set[str] = field(default_factory=set)

    def run(self, names: list[str]) -> None:
        """Create the jobs, and train until all are complete."""
        for name in names:
            shape = Shape(int(name.split("-")[1]))
            self.api.create("rljobs", manifests.job(name, **shape.spec), self.namespace)
        eventually(lambda: self._round() >= set(names), "all jobs complete", TIMEOUT_SECONDS, self._unfinished)

    def _round(self) -> set[str]:
        """Play each attempt that runs. Returns the names of the jobs that are complete."""
        pods = {pod["metadata"]["name"]: pod for pod in self.kubelet.pods(self.namespace)}
        settings = {
            found["metadata"]["labels"][labels.JOB_NAME]: found["data"][ATTEMPT_SETTINGS_KEY]
            for found in self.api.list("configmaps", self.namespace, labels.JOB_NAME)
        }
        for pod in pods.values():
            name, uid = pod["metadata"]["labels"][labels.JOB_NAME], pod["metadata"]["uid"]
            worker = pods.get(f"{name}-policy-0")
            ready = worker is not None and all(each["status"]["phase"] == "Running" for each in (pod, worker))
            if pod["metadata"]["labels"][labels.ROLE] == "controller" and ready and uid not in self._played:
                attempt = AttemptSettings.model_validate_json(settings[name])
                if str(attempt.attempt) == pod["metadata"]["labels"][labels.ATTEMPT]:
                    self._played.add(uid)
                    self._play(WatchedJob(self.api, self.kubelet, self.namespace, name), attempt, pod, worker or {})
        return {name for name, phase in self._phases().items() if phase == "Complete"}

    def _play(self, job: WatchedJob, settings: AttemptSettings, controller: Pod, worker: Pod) -> None:
        """Plan as the trainer does, and report; then fail, or commit all steps."""
        shape = Shape(int(job.name.split("-")[1]))
        plan = settings.memory_plan or shape.predicted
        if settings.memory_profile is not None and plan.generation == 1:
            plan, _ = plan_on_machine(plan, settings.memory_profile, shape.predicted, FACTS)
        holds = shape.holds(plan, worker)
        fields = {
            "plan": plan.model_dump(mode="json", by_alias=True, exclude_none=True),
            "planGeneration": plan.generation,
            "memoryFacts": FACTS.model_dump(mode="json", by_alias=True),
            "memory": [{"role": "policy", "rank": 0, "peakReservedBytes": 30 * GIB, "deviceTotalBytes": 80 * GIB}],
        }
        job.report(STEPS if holds else 0, settings.attempt, **fields)
        if holds:
            done = TerminationMessage(exit_code=0, message="all steps are committed", step=STEPS)
            self.kubelet.end(controller, 0, message=done)
            return
        self.failures[shape.number] += 1
        if shape.lacks_host_memory:
            self.kubelet.end(worker, 137, reason="OOMKilled")
            return
        cause = {"class": "ActivationSpike", "confidence": 0.9, "message": "one pass needs more than is left"}
        evidence = Evidence.model_validate(
            {
                "time": datetime.now(UTC),
                "attempt": settings.attempt,
                "role": "policy",
                "rank": 0,
                "step": 1,
                "phase": "update",
                "microBatch": 0,
                "message": "CUDA out of memory",
                "diagnoses": [cause],
            }
        )
        code = ExitCode.DEVICE_OUT_OF_MEMORY
        message = TerminationMessage(exit_code=code, message="policy rank 0 ran out", step=0, evidence=evidence)
        self.kubelet.end(controller, code, message=message)

    def _phases(self) -> dict[str, str]:
        jobs = self.api.list("rljobs", self.namespace)
        return {job["metadata"]["name"]: job.get("status", {}).get("display", {}).get("phase", "") for job in jobs}

    def _unfinished(self) -> dict[str, str]:
        return {name: phase for name, phase in self._phases().items() if phase != "Complete"}


def test_no_shape_fails_twice_in_a_hundred_jobs(
    new_job: NewJob, api: ResourceClient, kubelet: SimulatedKubelet, proxy: FaultProxy, namespace: str, kubectl: Kubectl
) -> None:
    new_job(namespace)
    kubelet.follow(namespace)
    trainers = Trainers(api, kubelet, namespace)
    trainers.run([f"shape-{shape}-job-0" for shape in range(SHAPES)])
    first = Counter(trainers.failures)
    assert set(first) == set(range(SHAPES)), "each prediction is wrong"
    assert max(first.values()) > 1
    trainers.run([f"shape-{shape}-job-{job}" for shape in range(SHAPES) for job in range(1, JOBS_OF_A_SHAPE)])
    assert trainers.failures == first, "a later job has failed"

    profiles = api.list("memoryprofiles", namespace)
    assert len(profiles) == SHAPES
    assert all(2 <= profile["status"]["jobs"] <= JOBS_OF_A_SHAPE for profile in profiles)
    changed = Counter(profile["status"]["display"]["changes"] for profile in profiles)
    assert changed == {"microBatchTokens": 8, "hostMemory": 2}
    writes = [write for write in proxy.writes(namespace) if write.resource == "memoryprofiles"]
    assert len(writes) <= sum(first.values()) + SHAPES * JOBS_OF_A_SHAPE, "one for each change, and for each job"
    table = kubectl("get", "memoryprofiles").stdout
    assert table.splitlines()[0].split() == ["NAME", "MODEL", "GPU", "GPUS", "PEAK", "CHANGES", "JOBS", "USED", "AGE"]
    assert "30.0Gi" in table
    started = WatchedJob(api, kubelet, namespace, "shape-0-job-1")
    assert "StartedFromProfile" in started.event_reasons()
    assert started.status["memoryProfile"]["name"] in {profile["metadata"]["name"] for profile in profiles}
