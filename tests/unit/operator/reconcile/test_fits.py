"""The condition Fits, and `spec.memory.admission`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rljob_api.conditions import ConditionReason, ConditionType
from rljob_api.job import RLJobSpec
from rljob_memory.hardware import GPU_TYPES
from rljob_operator.events import EventReason
from rljob_operator.reconcile.fits import Objection, objection, prediction
from rljob_operator.reconcile.observed import ObservedNode
from rljob_testing.memory_plans import memory_facts
from rljob_testing.simulated_cluster import CPU_NODE, SimulatedCluster, job_spec, new_job, running_job

GIB = 1 << 30
H100 = ObservedNode(
    "h100",
    gpus=8,
    usable=True,
    gpu="h100",
    gpu_memory_bytes=GPU_TYPES["h100"].memory_bytes,
    host_memory_bytes=2048 * GIB,
    labels=("nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3", "pool=large"),
)
SMALL_BYTES = GPU_TYPES["a100-40"].memory_bytes
A100_40 = replace(H100, name="a100", gpu="a100-40", gpu_memory_bytes=SMALL_BYTES, labels=("pool=small",))
MODEL = {"uri": "hf://Qwen/Qwen3-8B"}
LONG = {"steps": 60, "maxPromptTokens": 1024, "maxResponseTokens": 65536}
SHORT = LONG | {"maxResponseTokens": 1024}
ENFORCE = {"admission": "Enforce"}
PINNED = {"kvCache": "64Gi"}
"""A setting with which the job does not fit; it can change, as most others cannot."""


def spec_of(**overrides: Any) -> RLJobSpec:
    return RLJobSpec.model_validate(job_spec(**{"model": MODEL, "policy": {}} | overrides))


def job(nodes: tuple[ObservedNode, ...] = (CPU_NODE, H100), **overrides: Any) -> SimulatedCluster:
    cluster = new_job(nodes=nodes)
    cluster.spec = job_spec(**{"model": MODEL, "policy": {}, "algorithm": LONG} | overrides)
    return cluster


def test_the_condition_is_written_before_any_pod_and_names_phase_numbers_and_changes() -> None:
    cluster = job()
    cluster.round()
    assert not cluster.pods
    cluster.expect(
        fits=(False, "DoesNotFit"),
        fits_contains=(
            "1 × h100",
            "the update needs",
            "71.19 GiB can be used",
            "it fits with algorithm.maxResponseTokens",
        ),
    )
    assert cluster.events.count(EventReason.DOES_NOT_FIT) == 1
    cluster.settle()
    assert cluster.pods, "a warning keeps nobody from anything"
    assert cluster.events.count(EventReason.DOES_NOT_FIT) == 1


def test_enforced_a_job_that_does_not_fit_has_no_pods_until_its_spec_fits() -> None:
    cluster = job(algorithm=SHORT, memory=ENFORCE | PINNED).settled(
        fits="DoesNotFit", scheduled="NotAdmitted", phase="Pending", pods=set()
    )
    assert (cluster.kstatus, cluster.condition(ConditionType.STALLED).reason) == ("Failed", "NotAdmitted")
    assert not cluster.stored.attempts
    writes = cluster.writes
    for _ in range(5):
        cluster.tick(60).settle()
    assert cluster.writes == writes, "it waits without a write"
    assert (cluster.last.requeue_after_seconds or 0) >= 60
    cluster.change_spec(memory=ENFORCE).settled(fits=(True, "PredictedToFit"), phase="Pending")
    assert cluster.pods
    assert cluster.kstatus == "InProgress"


def test_enforced_it_starts_once_a_node_with_enough_memory_appears() -> None:
    cluster = job((CPU_NODE, A100_40), memory=ENFORCE, algorithm=SHORT).settled(scheduled="NotAdmitted", pods=set())
    cluster.nodes = (CPU_NODE, A100_40, H100)
    cluster.settled(fits=(True, "PredictedToFit"), fits_contains="on 1 × a100-40 (39.40 GiB)")
    assert cluster.pods


def test_a_job_that_has_committed_a_step_is_never_held() -> None:
    cluster = job(algorithm=SHORT, memory=ENFORCE).run().reports(3).tick(20)
    cluster.settled(fits=(True, "StepsCommitted"))
    cluster.change_spec(suspend=True).stop().expect(phase="Suspended")
    cluster.change_spec(suspend=False, memory=ENFORCE | PINNED).settled(fits="DoesNotFit")
    assert cluster.pods


def test_that_a_job_fits_costs_no_write_of_its_own() -> None:
    cluster = running_job(nodes=(CPU_NODE, H100)).expect(fits="ModelUnknown")
    before = cluster.status_writes
    cluster.reports(1).settle()
    assert cluster.status_writes == before, "it waits for the next report of progress"
    cluster.tick(10).settled(fits="StepsCommitted")


def test_the_shape_that_the_trainer_has_reported_counts_on_the_nodes_of_the_next_attempt() -> None:
    small = memory_facts(device_memory_bytes=8 * GIB)
    alone = running_job(nodes=(CPU_NODE,), algorithm=LONG).expect(fits="NodesUnknown")
    alone.reports(0, memory_facts=small).tick(20).settled(fits="DoesNotFit", fits_contains="(8.00 GiB)")
    other = running_job(nodes=(CPU_NODE, H100)).expect(fits="ModelUnknown")
    other.reports(0, memory_facts=small).tick(20).settled(fits="PredictedToFit", fits_contains="h100 (79.10 GiB)")


@pytest.mark.parametrize(
    ("overrides", "nodes", "reason", "parts"),
    [
        ({"trainer": {"image": "verl:1"}}, (H100,), ConditionReason.OTHER_TRAINER, ("spec.trainer",)),
        ({}, (), ConditionReason.NODES_UNKNOWN, ("with 1 GPUs", "nvidia.com/gpu.product")),
        ({}, (replace(H100, gpu="", gpu_memory_bytes=0),), ConditionReason.NODES_UNKNOWN, ()),
        ({"policy": {"gpusPerReplica": 16}}, (H100,), ConditionReason.NODES_UNKNOWN, ("with 16 GPUs",)),
        (
            {"policy": {"template": {"spec": {"nodeSelector": {"pool": "none"}}}}},
            (H100,),
            ConditionReason.NODES_UNKNOWN,
            (),
        ),
        ({"model": {"uri": "hf://org/name"}}, (H100,), ConditionReason.MODEL_UNKNOWN, ("hf://org/name is not known",)),
        (
            {"model": {"uri": "hf://org/new-70B"}},
            (H100,),
            ConditionReason.MODEL_UNKNOWN,
            ("typical model of the size in its name", "does not fit"),
        ),
        (
            {"topology": "Disaggregated", "rollout": {"template": {"spec": {"nodeSelector": {"pool": "none"}}}}},
            (H100,),
            ConditionReason.NODES_UNKNOWN,
            (),
        ),
    ],
)
def test_what_is_not_known_is_unknown_and_holds_nobody(
    overrides: dict[str, Any], nodes: tuple[ObservedNode, ...], reason: ConditionReason, parts: tuple[str, ...]
) -> None:
    spec = spec_of(**overrides, memory=ENFORCE)
    found = prediction(spec, nodes)
    assert (found.fits, found.reason) == (None, reason)
    assert [part for part in parts if part not in found.message] == []
    assert objection(spec, None, nodes) is None


def test_only_nodes_that_the_template_selects_count() -> None:
    def fits(pool: str) -> bool | None:
        template = {"spec": {"nodeSelector": {"pool": pool}}}
        return prediction(spec_of(algorithm=SHORT, policy={"template": template}), (H100, A100_40)).fits

    assert (fits("large"), fits("small")) == (True, False)
    mixed = prediction(spec_of(algorithm=SHORT), (A100_40, H100))
    assert mixed.fits is True
    assert "on 1 × h100" in mixed.message
    assert "on 1 × a100-40 (39.40 GiB), 2048.00 GiB of host memory, it does not fit" in mixed.message


def test_a_selector_of_any_form_raises_nothing() -> None:
    for selector in ("text", [1], {"a": {"b": 1}}, {"pool": None}):
        prediction(spec_of(policy={"template": {"spec": {"nodeSelector": selector}}}), (H100,))


def test_sizes_that_no_machine_has_do_not_fit() -> None:
    sizes = "hidden=9999872&layers=9999999&heads=1000000&kvHeads=1000000&vocabulary=9999999&intermediate=9999999"
    tokens = {
        "steps": 1,
        "promptsPerStep": 65536,
        "groupSize": 1024,
        "maxPromptTokens": 10**6,
        "maxResponseTokens": 10**6,
    }
    policy = {"replicas": 1024, "gpusPerReplica": 8}
    found = prediction(spec_of(model={"uri": f"random://qwen3?{sizes}"}, algorithm=tokens, policy=policy), (H100,))
    assert found.fits is False
    assert "no single change makes it fit" in found.message


def test_the_memory_of_a_slice_is_that_of_its_label() -> None:
    slice_of_gpu = replace(H100, gpu="NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", gpu_memory_bytes=40448 << 20)
    found = prediction(spec_of(algorithm=SHORT), (slice_of_gpu,))
    assert found.fits is False
    assert "39.50 GiB" in found.message


def test_a_limit_in_the_template_bounds_the_host_memory_unless_recovery_may_raise_it() -> None:
    container = {"name": "rljob", "resources": {"limits": {"memory": "16Gi"}}}
    policy = {"template": {"spec": {"containers": [container]}}}
    found = prediction(spec_of(algorithm=SHORT, policy=policy), (H100,))
    assert (found.fits, "of the host" in found.message or "16.00 GiB of host memory" in found.message) == (False, True)
    raised = prediction(spec_of(algorithm=SHORT, policy=policy, recovery={"maxHostMemory": "1Ti"}), (H100,))
    assert raised.fits is True


def test_a_job_on_cpus_fits_by_host_memory_alone() -> None:
    spec = spec_of(model={"uri": "random://qwen3"}, policy={"gpusPerReplica": 0})
    assert prediction(spec, (replace(CPU_NODE, host_memory_bytes=16 * GIB),)).fits is True
    assert prediction(spec, (replace(CPU_NODE, host_memory_bytes=GIB),)).fits is False
    assert prediction(spec, (CPU_NODE,)).fits is None


# --- the admission webhook ---


def test_a_request_is_refused_only_if_enforced_and_only_if_the_job_fitted_before() -> None:
    nodes = (H100,)
    large, small = spec_of(algorithm=LONG), spec_of(algorithm=SHORT)
    enforced, fitting = spec_of(algorithm=LONG, memory=ENFORCE), spec_of(algorithm=SHORT, memory=ENFORCE)
    suspended = enforced.model_copy(update={"suspend": True})
    assert objection(small, None, nodes) is None
    assert objection(fitting, enforced, nodes) is None
    warning = objection(large, None, nodes)
    assert isinstance(warning, Objection)
    assert (warning.refused, warning.message) == (False, f"spec: {prediction(large, nodes).message}")
    for before, refused in ((None, True), (fitting, True), (enforced, False)):
        found = objection(enforced, before, nodes)
        assert found is not None
        assert found.refused is refused
    found = objection(suspended, enforced, nodes)
    assert found is not None
    assert not found.refused, "a job that does not fit can be suspended"
