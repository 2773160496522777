"""Jobs run out of memory, by themselves or by an injected fault, and resume under a changed plan or explain why not."""

from __future__ import annotations

from typing import Any

from rljob_api.attempt_settings import AttemptSettings
from rljob_api.quantity import quantity_bytes
from rljob_operator import labels
from rljob_testing.cluster import (
    NAMESPACE,
    AdminKubectl,
    Object,
    account,
    at_step,
    digits,
    finished,
    holds,
    status,
    wait_for_event,
)
from rljob_testing.patience import PATIENCE_SECONDS

WITHOUT_RAYS_MONITOR = {"name": "RAY_memory_monitor_refresh_ms", "value": "0"}
"""Ray kills a process before the kernel has to, unless its memory monitor is disabled."""


def worker(**pod_spec: Any) -> Object:
    """A policy's worker: a template, and no GPU."""
    return {"gpusPerReplica": 0, "template": {"spec": pod_spec}}


def limited(memory: str, *env: Object) -> Object:
    return worker(containers=[{"name": "rljob", "resources": {"limits": {"memory": memory}}, "env": list(env)}])


def faults(*given: Object) -> Object:
    return {"enabled": True, "faults": list(given)}


def changes(job: Object) -> list[str]:
    """The settings that were changed, in order."""
    return [change["remedy"]["setting"] for change in status(job)["planChanges"]]


def test_small_host_memory_and_dev_shm_are_enlarged(jobs: AdminKubectl, kubectl: AdminKubectl) -> None:
    small_shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "600Mi"}}
    # While the roles start: later, an early warning may raise the limit first.
    fault = faults({"class": "HostMemory", "phase": "load", "step": 1})
    in_1_gib = limited("1Gi", WITHOUT_RAYS_MONITOR)
    jobs.apply(
        digits("host", policy=in_1_gib, recovery={"maxHostMemory": "4Gi"}, faultInjection=fault),
        digits("shm", policy=worker(volumes=[small_shm]), recovery={"maxSharedMemory": "4Gi"}),
    )
    jobs.wait("rljob", "host", lambda job: status(job).get("planChanges"), PATIENCE_SECONDS)
    wait_for_event(jobs, "host", "PlanChanged")  # written after the status: a killed operator may lose it
    system = AdminKubectl(kubectl.program, kubectl.kubeconfig, NAMESPACE)
    system("delete", "pod", "-l", "app.kubernetes.io/name=rljob-operator", "--grace-period=0", "--force")

    job = jobs.wait("rljob", "host", finished, PATIENCE_SECONDS)
    assert holds("Complete")(job), status(job)
    change = status(job)["planChanges"][0]
    [killed] = [of for of in status(job)["attempts"] if of["number"] == change["attempt"]]
    assert (killed["reason"], killed["diagnosis"]["class"]) == ("HostOutOfMemory", "HostMemory"), account(job)
    assert set(changes(job)) == {"hostMemory"}, account(job)
    assert quantity_bytes(change["remedy"]["after"]) >= 1200 << 20, (
        "half as much again, or the prediction if it is more"
    )
    assert status(job)["restarts"] == 0, account(job)
    reasons = wait_for_event(jobs, "host", "JobCompleted")
    since = reasons[reasons.index("OutOfMemory") :]
    assert "PlanChanged" in since[: since.index("Recovered")]

    job = jobs.wait("rljob", "shm", finished, PATIENCE_SECONDS)
    assert holds("Complete")(job), status(job)
    assert set(changes(job)) == {"sharedMemory"}
    assert status(job)["plan"]["sharedMemory"] >= 1200 << 20
    assert status(job)["lastOutOfMemory"]["diagnosis"]["class"] == "SharedMemory"


def test_a_running_pod_gets_a_larger_limit_before_the_kernel_kills(jobs: AdminKubectl) -> None:
    """6 GiB are leaked, three times the first limit of what the pod does not use."""
    leak = {"class": "Leak", "phase": "update", "step": 1, "times": 30}
    jobs.apply(
        digits(
            algorithm={"steps": 30, "promptsPerStep": 8, "groupSize": 8, "maxResponseTokens": 64},
            policy=limited("4Gi", WITHOUT_RAYS_MONITOR),
            recovery={"maxHostMemory": "8Gi", "maxAdjustments": 0, "maxRestarts": 0},
            faultInjection=faults(leak),
        )
    )
    jobs.wait("stepreport", "digits", at_step(1), PATIENCE_SECONDS)
    before = jobs.get("pod", "digits-policy-0")
    jobs.wait("rljob", "digits", lambda job: status(job).get("plan", {}).get("hostMemory"), PATIENCE_SECONDS)
    resized = jobs.wait("pod", "digits-policy-0", lambda pod: _limit_bytes(pod) >= 6 << 30, PATIENCE_SECONDS)
    assert resized["metadata"]["uid"] == before["metadata"]["uid"]
    assert resized["status"]["containerStatuses"][0]["restartCount"] == 0
    job = jobs.wait("rljob", "digits", finished, PATIENCE_SECONDS)
    assert holds("Complete")(job), status(job)
    assert [attempt["reason"] for attempt in status(job)["attempts"]] == ["AllStepsCommitted"]
    assert (status(job)["adjustments"], status(job)["restarts"]) == (0, 0)
    assert set(changes(job)) <= {"policyProcesses"}, "at the bound, its process is replaced"


def _limit_bytes(pod: Object) -> int:
    """The limit that the kubelet has set."""
    [container] = pod["status"]["containerStatuses"]
    return quantity_bytes(container.get("resources", {}).get("limits", {}).get("memory", "0"))


def test_a_lost_process_costs_no_pod_its_place(jobs: AdminKubectl) -> None:
    lost = {"class": "WorkerLost", "phase": "update", "step": 3}
    jobs.apply(digits(algorithm={"steps": 300}, policy={"gpusPerReplica": 0}, faultInjection=faults(lost)))
    jobs.wait("rljob", "digits", holds("Scheduled"))
    pods = ("digits-controller", "digits-policy-0")
    jobs.wait("stepreport", "digits", at_step(1), PATIENCE_SECONDS)
    before = [_place(jobs.get("pod", pod)) for pod in pods]

    # The rest of its steps, of less than 0.1 s, leave time to look into its pods.
    jobs.wait("stepreport", "digits", at_step(5, attempt_number=2), PATIENCE_SECONDS)
    after = [jobs.get("pod", pod) for pod in pods]
    assert [_place(pod) for pod in after] == before
    assert [pod["status"]["containerStatuses"][0]["restartCount"] for pod in after] == [1, 1]
    for pod in pods:
        assert jobs("exec", pod, "-c", "rljob", "--", "cat", "/run/rljob/attempt") == "2"
        settings = AttemptSettings.model_validate_json(
            jobs("exec", pod, "-c", "rljob", "--", "cat", "/etc/rljob/attempt.json")
        )
        assert (settings.attempt, settings.plan_generation) == (2, 1)
        assert settings.memory_plan is not None

    job = jobs.wait("rljob", "digits", finished, PATIENCE_SECONDS)
    assert holds("Complete")(job), status(job)
    assert [attempt["reason"] for attempt in status(job)["attempts"]] == ["WorkerLost", "AllStepsCommitted"]
    assert status(job)["attempts"][1]["podsOfAttempt"] == 1
    assert status(job)["restarts"] == 1


def apart_from_each_other(job: str) -> Object:
    """A template whose policy pods each need a separate node."""
    others = {"matchLabels": {labels.JOB_NAME: job, labels.ROLE: "policy"}}
    term = {"labelSelector": others, "topologyKey": "kubernetes.io/hostname"}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {"spec": {"affinity": affinity, "tolerations": [{"operator": "Exists"}]}}


def two_policy_pods_are_ready(job: Object) -> bool:
    return {"role": "policy", "desired": 2, "ready": 2} in status(job).get("pods", [])


def test_a_policy_with_no_setting_left_to_change_gets_a_second_pod(jobs: AdminKubectl) -> None:
    steps = 60
    spike = {"class": "ActivationSpike", "phase": "update", "step": 8, "times": 2}
    jobs.apply(
        digits(
            algorithm={"steps": steps},
            checkpoint={"everySteps": 5},
            policy={"gpusPerReplica": 0, "template": apart_from_each_other("digits")},
            recovery={"maxAdjustments": 1, "maxGpus": 2},
            faultInjection=faults(spike),
        )
    )
    jobs.wait("rljob", "digits", two_policy_pods_are_ready, PATIENCE_SECONDS)
    nodes = {jobs.get("pod", f"digits-policy-{index}")["spec"]["nodeName"] for index in range(2)}
    assert nodes == {"cpu-node", "gpu-node"}, "the ranks meet across nodes"
    job = jobs.wait("rljob", "digits", finished, PATIENCE_SECONDS)

    assert holds("Complete")(job), status(job)
    assert changes(job) == ["microBatchTokens", "policyGpus"]
    growth = status(job)["planChanges"][-1]
    assert (growth["remedy"]["before"], growth["remedy"]["after"], growth["level"]) == ("1", "2", "ReplacePods")
    assert growth["secondsToRecover"] > 0
    assert [(of["reason"], of["fromStep"], of["toStep"]) for of in status(job)["attempts"]] == [
        ("DeviceOutOfMemory", 1, 7),
        ("AllStepsCommitted", 8, steps),
    ]
    assert (status(job)["plan"]["policyGpus"], status(job)["adjustments"], status(job)["restarts"]) == (2, 1, 0)
    assert job["spec"]["policy"]["replicas"] == 1, "the manifest is not edited"


def _place(pod: Object) -> tuple[str, str, str]:
    return pod["metadata"]["uid"], pod["spec"]["nodeName"], pod["status"]["podIP"]
