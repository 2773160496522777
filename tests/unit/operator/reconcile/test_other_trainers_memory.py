"""Another trainer runs out of memory: its probe or the kernel tells; its pods or a supported setting changes."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.conditions import ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_api.step_report import Evidence
from rljob_testing.simulated_cluster import POLICY_0, POLICY_1, SimulatedCluster, job_spec

GIB = 1 << 30
FRAGMENTED = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.40 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.00 GiB is free. Of the allocated memory 60.00 GiB is allocated by PyTorch, and 16.10 GiB is reserved "
    "by PyTorch but unallocated."
)


def running(trainer: dict[str, Any] | None = None, **spec: Any) -> SimulatedCluster:
    container = {"name": "rljob", "resources": {"limits": {"memory": "1Gi"}}}
    policy = {"replicas": 2, "gpusPerReplica": 1, "template": {"spec": {"containers": [container]}}}
    given = {"trainer": {"image": "registry.example/trl:1", **(trainer or {})}, "policy": policy, **spec}
    return SimulatedCluster(spec=job_spec(**given)).run()


def evidence(cluster: SimulatedCluster, message: str = FRAGMENTED) -> Evidence:
    values = {"time": cluster.now, "attempt": 1, "role": "policy", "rank": 1, "step": 7, "message": message}
    return Evidence.model_validate(values)


def test_the_job_has_a_plan_from_its_first_attempt_on() -> None:
    cluster = running()
    assert cluster.status is not None
    assert cluster.status.plan is not None
    assert cluster.status.plan.generation == 1
    assert cluster.attempt.plan_generation == 1


def test_a_kill_by_the_kernel_raises_the_limit() -> None:
    cluster = running(recovery={"maxHostMemory": "4Gi"})
    cluster.end(POLICY_0, 137, reason="OOMKilled")
    cluster.settle()
    assert cluster.status is not None
    assert cluster.status.plan is not None
    assert cluster.status.plan.host_memory_bytes is not None
    assert GIB < cluster.status.plan.host_memory_bytes <= 4 * GIB
    cluster.next_attempt_runs()
    assert (cluster.phase, cluster.attempt.number, cluster.status.restarts) == ("Running", 2, 0)


def test_the_probes_report_outweighs_the_exit_code() -> None:
    cluster = running()
    cluster.end(
        POLICY_1, 1, sentence="out of memory", message_code=ExitCode.DEVICE_OUT_OF_MEMORY, evidence=evidence(cluster)
    )
    cluster.settle()
    assert cluster.attempt.diagnosis is not None
    assert cluster.attempt.diagnosis.class_name == "Fragmentation"
    assert cluster.attempt.remedy is not None
    assert (cluster.attempt.remedy.setting, cluster.attempt.remedy.after) == ("expandableSegments", "Enabled")
    assert cluster.status is not None
    assert (cluster.status.adjustments, cluster.status.restarts) == (1, 0)


def test_words_about_host_memory_are_read_for_their_numbers() -> None:
    cluster = running(recovery={"maxAdjustments": 0, "maxRestarts": 0})
    words = evidence(cluster, "MemoryError: Unable to allocate 4.00 GiB for an array")
    cluster.end(POLICY_1, 1, sentence="out of memory", message_code=ExitCode.HOST_OUT_OF_MEMORY, evidence=words)
    cluster.settle()
    assert cluster.status is not None
    diagnosis = cluster.status.attempts[0].diagnosis
    assert diagnosis is not None
    assert diagnosis.class_name == "HostMemory"
    assert "4.00 GiB more did not fit" in diagnosis.message


def test_a_setting_that_the_trainer_does_not_support_stays() -> None:
    cluster = running({"supportedSettings": []})
    cluster.end(
        POLICY_1, 1, sentence="out of memory", message_code=ExitCode.DEVICE_OUT_OF_MEMORY, evidence=evidence(cluster)
    )
    cluster.settle()
    assert cluster.status is not None
    assert cluster.status.plan is not None
    assert not cluster.status.plan.expandable_segments


@pytest.mark.parametrize("code", [ExitCode.DEVICE_OUT_OF_MEMORY, ExitCode.HOST_OUT_OF_MEMORY])
def test_an_outlived_memory_message_does_not_fail_a_complete_job(code: ExitCode) -> None:
    cluster = running()
    cluster.end(POLICY_0, 0, sentence="out of memory", message_code=code, evidence=evidence(cluster))
    cluster.end(POLICY_1, 0)
    cluster.settle()
    assert cluster.phase == "Complete"
    assert not cluster.holds(ConditionType.FAILED)


def on_a_cpu(trainer: dict[str, Any], **spec: Any) -> SimulatedCluster:
    container = {"name": "rljob", "resources": {"limits": {"memory": "1Gi"}}}
    policy = {"gpusPerReplica": 0, "template": {"spec": {"containers": [container]}}}
    return SimulatedCluster(spec=job_spec(trainer={"image": "trl:1", **trainer}, policy=policy, **spec)).run()


def first_remedy(cluster: SimulatedCluster) -> str:
    assert cluster.status is not None
    remedy = cluster.status.attempts[0].remedy
    assert remedy is not None
    return remedy.setting


def test_with_an_adapter_a_kill_on_a_cpu_halves_the_micro_batch() -> None:
    cluster = on_a_cpu({"adapter": "TRL"})
    assert cluster.status is not None
    assert cluster.status.plan is not None
    before = cluster.status.plan.micro_batch_tokens
    cluster.end(POLICY_0, 137, reason="OOMKilled")
    cluster.settle()
    assert first_remedy(cluster) == "microBatchTokens"
    assert cluster.status.plan is not None
    assert cluster.status.plan.micro_batch_tokens == before // 2
    assert (cluster.status.adjustments, cluster.status.restarts) == (1, 0)


def test_without_an_adapter_the_message_names_the_setting() -> None:
    cluster = on_a_cpu({}, recovery={"maxRestarts": 0})
    cluster.end(POLICY_0, 137, reason="OOMKilled")
    cluster.settle()
    assert "microBatchTokens" in cluster.condition(ConditionType.FAILED).message


def test_with_an_adapter_the_limit_is_raised_first_if_it_may_be() -> None:
    cluster = on_a_cpu({"adapter": "TRL"}, recovery={"maxHostMemory": "4Gi"})
    cluster.end(POLICY_0, 137, reason="OOMKilled")
    cluster.settle()
    assert first_remedy(cluster) == "hostMemory"


def test_with_gpus_the_micro_batch_does_not_answer_a_kill() -> None:
    cluster = running({"adapter": "TRL"}, recovery={"maxRestarts": 0})
    cluster.end(POLICY_0, 137, reason="OOMKilled")
    cluster.settle()
    assert cluster.holds(ConditionType.FAILED)


SPIKE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 6.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which 1.00 GiB is free. Of the allocated memory 77.00 GiB is allocated by PyTorch, and 512.00 MiB is reserved "
    "by PyTorch but unallocated."
)


def test_with_an_adapter_a_spike_halves_the_micro_batch_first() -> None:
    """The size of another trainer's KV cache is unknown: it must not look as if it covered the request."""
    cluster = running({"adapter": "TRL", "supportedSettings": []})
    words = evidence(cluster, SPIKE)
    cluster.end(POLICY_1, 1, sentence="OOM", message_code=ExitCode.DEVICE_OUT_OF_MEMORY, evidence=words)
    cluster.settle()
    assert first_remedy(cluster) == "microBatchTokens"


def test_on_a_cpu_a_numbered_request_halves_the_micro_batch() -> None:
    cluster = on_a_cpu({"adapter": "TRL"})
    words = evidence(
        cluster,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 536870912 bytes. Error code 12 (Cannot allocate memory)",
    ).model_copy(update={"rank": 0, "phase": "update"})
    cluster.end(POLICY_0, 1, sentence="OOM", message_code=ExitCode.HOST_OUT_OF_MEMORY, evidence=words)
    cluster.settle()
    assert first_remedy(cluster) == "microBatchTokens"
